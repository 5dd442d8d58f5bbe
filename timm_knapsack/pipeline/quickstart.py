"""The whole way on real data in a few minutes: handwritten digits, a small ResNet, 40 % of its MACs.

`timm-knapsack quickstart` runs it; everything happens offline, on the CPU. `stages.QUICKSTART` lists what it does.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..images.loaders import create_loader
from ..pruning.budget import Budget
from .digits import load_digits, write_images
from .progress import say as say_on_stderr
from .recipe import LatencyPart, ModelPart, RecoverPart, Settings
from .stage import Job, run_stages
from .stages import QUICKSTART, stages

MODEL = "cifar_resnet20"  # 32 × 32 images in, 41 MMACs; registered in timm by `import timm_knapsack`
BUDGET = 0.4
RECOVERY_IMAGES = 384
SWEEP = {"budgets": (0.6, 0.25, 0.15), "sides": (24, 16)}
AUGMENTATION = {"crop": "pad", "pad": 3, "hflip": 0}  # a mirrored digit is another digit


class DigitsJob(Job):
    """A job on arrays in memory: all training digits, in their order, to score and recover with."""

    def open(self, purpose: str, **changes) -> Any:
        train, test = self.options["digits"]
        if purpose == "evaluation":
            return create_loader(test, self["base"], batch_size=150, **changes)
        augmented = {"training": True, "augmentation": AUGMENTATION} if purpose == "training" else {}
        return create_loader(train, self["base"], batch_size=64, **augmented, **changes)


def quickstart(
    folder: str | Path = "quickstart",
    *,
    model_name: str = MODEL,
    model_args: Mapping[str, Any] | None = None,
    base_epochs: int = 8,
    tune_epochs: int = 8,
    sweep: bool = True,
    say: Callable[[str], Any] = say_on_stderr,
) -> dict[str, Any]:
    """Train, score, prune, recover, fine-tune, evaluate, save, load back, report.

    Besides the pruned ``model``, the folder gets the ``images`` and the original's weights (``base.safetensors``): what
    the other commands of ``timm-knapsack`` need to do the same step by step.

    Args:
        model_args: arguments of ``timm.create_model``; 10 classes by default.
        sweep: also measure other budgets and the original on smaller images, for the report's curve.
        say: gets the line of each stage.

    Returns:
        Accuracies in percent, the table, the files, and the two lines of Python that use the result.

    Example:
        >>> tiny = {"model_args": {"channels": (4, 4, 4)}, "base_epochs": 1, "tune_epochs": 1, "sweep": False}
        >>> result = quickstart("quickstart", **tiny)
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
    tune = {
        "epochs": tune_epochs, "weight_decay": 5e-4, "log_interval": 5, "progress": False,
        "distillation": {"kd_weight": 1.0, "ikd_weight": 20.0},
    }  # fmt: skip
    settings = Settings(
        model=ModelPart(model_name, pretrained=False, args={"num_classes": 10, **(model_args or {})}),
        budget=Budget(macs=BUDGET),
        recover=RecoverPart(images=RECOVERY_IMAGES),
        finetune=tune,
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
    first, last = top1["original"], top1["fine-tuned"]
    before, after = times["original"], times["pruned"]
    rows = [["top-1", f"{first:.2f} %", f"{last:.2f} %", f"{last - first:+.2f}"]]
    for name, line in (("MACs", macs), ("parameters", params)):
        change = f"{line.counted / line.original - 1:+.1%}"
        rows.append([name, f"{line.original:,.0f}", f"{line.counted:,.0f}", change])
    rows.append(["latency, batch 16", f"{before * 1e3:.1f} ms", f"{after * 1e3:.1f} ms", f"{after / before - 1:+.1%}"])
    saved = str(job["saved"])
    return {
        "top1": top1,
        "macs": {"original": macs.original, "asked": macs.asked, "counted": macs.counted},
        "seconds": seconds,
        "table": rows,
        "model": saved,
        "report": str(job["report"]),
        "code": f'import timm, timm_knapsack\nmodel = timm.create_model("local-dir:{saved}", pretrained=True)',
    }
