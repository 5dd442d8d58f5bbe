"""The whole way on real data in a few minutes: handwritten digits, a small ResNet, 15 % of its MACs.

Budget and network are chosen so that each step can be seen: the cut alone guesses, recovery brings most of it back,
fine-tuning most of the rest. The time falls less than the MACs do, as with any network that gets thin
(``benchmarks/thin_layers.py`` says why); the last line on the screen says how much less.

`timm-knapsack quickstart` runs it; everything happens offline, on the CPU. `stages.QUICKSTART` lists what it does.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..human_numbers import human
from ..images.loaders import create_loader
from ..pruning.budget import Budget
from .digits import load_digits, write_images
from .progress import say as say_on_stderr
from .recipe import LatencyPart, ModelPart, PrunePart, RecoverPart, Settings
from .stage import Job, run_stages
from .stages import QUICKSTART, stages

MODEL = "cifar_resnet8x2"  # 32 × 32 images in, 48 M MACs; registered in timm by `import timm_knapsack`
BUDGET = 0.15
ROUND_TO = 8  # what a CPU computes at once
CALIBRATION_IMAGES = 512
SWEEP = {"budgets": (0.5, 0.25, 0.07), "sides": (28, 24)}
AUGMENTATION = {"crop": "pad", "pad": 2, "hflip": 0}  # a mirrored digit is another digit


class DigitsJob(Job):
    """A job on arrays in memory; some of the training digits to score and recover with."""

    def open(self, purpose: str, **changes) -> Any:
        train, test = self.options["digits"]
        if purpose == "evaluation":
            return create_loader(test, self["base"], batch_size=150, **changes)
        options = {"limit": CALIBRATION_IMAGES, "shuffle": True}
        if purpose == "training":
            options = {"training": True, "augmentation": AUGMENTATION}
        return create_loader(train, self["base"], batch_size=64, **options, **changes)


def quickstart(
    folder: str | Path = "quickstart",
    *,
    model_name: str = MODEL,
    model_args: Mapping[str, Any] | None = None,
    base_epochs: int = 8,
    tune_epochs: int = 4,
    round_to: int = ROUND_TO,
    sweep: bool = True,
    say: Callable[[str], Any] = say_on_stderr,
) -> dict[str, Any]:
    """Train, score, prune, recover, fine-tune, evaluate, save, load back, report.

    Besides the pruned ``model``, the folder gets the ``images`` and the original's weights (``base.safetensors``): what
    the other commands of ``timm-knapsack`` need to do the same step by step.

    Args:
        model_args: arguments of ``timm.create_model``; 10 classes by default.
        round_to: keep multiples of this many channels.
        sweep: also measure other budgets and the original on smaller images, for the report's curve.
        say: gets the line of each stage.

    Returns:
        Accuracies in percent, the table, the files, and the two lines of Python that use the result.

    Example:
        >>> tiny = {"model_args": {"channels": (8, 8, 8)}, "round_to": 1, "base_epochs": 1, "tune_epochs": 1}
        >>> result = quickstart("quickstart", sweep=False, **tiny)
        >>> list(result["top1"])
        ['original', 'pruned', 'recovered', 'fine-tuned']
    """
    start = time.monotonic()
    folder = Path(folder)
    write_images(folder / "images")
    train = {
        "epochs": base_epochs, "lr": 0.1, "weight_decay": 5e-4, "warmup_epochs": min(1, base_epochs / 2),
        "label_smoothing": 0.1, "weights": folder / "base.safetensors",
    }  # fmt: skip
    settings = Settings(
        model=ModelPart(model_name, pretrained=False, args={"num_classes": 10, **(model_args or {})}),
        budget=Budget(macs=BUDGET),
        prune=PrunePart(round_to=round_to),
        recover=RecoverPart(images=CALIBRATION_IMAGES),
        finetune={"epochs": tune_epochs, "log_interval": 5, "progress": False},
        latency=LatencyPart(batch_size=16, seconds=5),
    )
    job = DigitsJob(
        settings, folder=folder / "model", data_name="digits", eval_name="scikit-learn digits", eval_split="held out",
        command="timm-knapsack quickstart", saving={"base_model": ""}, say=say,
        options={"digits": load_digits(), "train": train, "sweep": SWEEP},
    )  # fmt: skip
    torch.manual_seed(0)
    run_stages(stages(*QUICKSTART, without=() if sweep else ("sweep",)), job)
    say(f"done in {time.monotonic() - start:.0f} s")
    return _outcome(job, time.monotonic() - start)


def _outcome(job: Job, seconds: float) -> dict[str, Any]:
    report, times = job["student"].result.report, job["student"].record.latency
    macs, params = report.line("macs"), report.line("params")
    top1 = {row["what"]: row["top1"] for row in job["evaluations"]}
    saved = str(job["saved"])
    return {
        "top1": top1,
        "macs": {"original": macs.original, "asked": macs.asked, "counted": macs.counted},
        "seconds": seconds,
        "speed": _speed(macs, times),
        "table": _table(top1, macs, params, times),
        "model": saved,
        "report": str(job["report"]),
        "code": f'import timm, timm_knapsack\nmodel = timm.create_model("local-dir:{saved}", pretrained=True)',
    }


def _speed(macs: Any, times: Mapping[str, Any]) -> str:
    """What the clock says to the MACs: a line for whoever expects the one to fall as the other does."""
    work, time_left = macs.counted / macs.original, times["pruned"] / times["original"]
    line = f"{work:.0%} of the MACs take {time_left:.0%} of the time here, at batch {times['batch_size']}"
    if time_left <= 1.1 * work:
        return f"{line}."
    return f"{line}: a CPU computes thin layers at a lower rate, and a budget may be a time (docs/latency.md)."


def _bar(percent: float, width: int = 20) -> str:
    """A bar with a resolution of an eighth of a character: a point of accuracy more is a longer one.

    Example:
        >>> _bar(50.0, 8), _bar(51.0, 8)
        ('████', '████▏')
    """
    whole, eighths = divmod(round(percent / 100 * width * 8), 8)
    return "█" * whole + ("", *"▏▎▍▌▋▊▉")[eighths]


def _table(top1: Mapping[str, float], macs: Any, params: Any, times: Mapping[str, Any]) -> list[list[str]]:
    """What each step did to the accuracy, as a curve of bars, and what it costs: a head and a row for each step."""
    words = {"pruned": f"cut to {macs.counted / macs.original:.0%} of the MACs", "recovered": "recovered, no training"}
    rows = [["", "top-1", "", "MACs", "parameters", f"time, batch {times['batch_size']}"]]
    for what, value in top1.items():
        figures = [human(macs.original), human(params.original), human(times["original"], "s")]
        if what != "original":
            figures = [human(macs.counted), human(params.counted), human(times["pruned"], "s")]
        rows.append([words.get(what, what), f"{value:.2f} %", _bar(value), *figures])
    left = [line.counted / line.original for line in (macs, params)] + [times["pruned"] / times["original"]]
    change = top1["fine-tuned"] - top1["original"]
    return [*rows, ["change", f"{change:+.2f}", "", *(f"{share - 1:+.1%}" for share in left)]]
