"""The whole way on real data in a few minutes: handwritten digits, a small ResNet, 40 % of its MACs.

It reads from top to bottom as a tutorial; `timm-knapsack quickstart` runs it. Everything happens offline, on the CPU.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KnapsackError
from ..slim.tensor_files import write_tensors

MODEL = "cifar_resnet20"  # 32 × 32 images in, 41 MMACs; registered in timm by `import timm_knapsack`
BUDGET = 0.4
TEST_IMAGES = 450  # of 1797, held out
RECOVERY_IMAGES = 384


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Scikit-learn's 1797 handwritten digits as (images, labels), for training and held out; uint8 [n, 32, 32, 3].

    Example:
        >>> (images, labels), held_out = load_digits()
        >>> images.shape
        (1347, 32, 32, 3)
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise KnapsackError("the quickstart needs scikit-learn: pip install 'timm-knapsack[quickstart]'") from None
    digits = datasets.load_digits()
    images = (digits.images * (255 / 16)).round().astype(np.uint8)
    images = images.repeat(4, axis=1).repeat(4, axis=2)  # 8 × 8 → 32 × 32
    images = np.repeat(images[..., None], 3, axis=3)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order]
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), (images[:TEST_IMAGES], labels[:TEST_IMAGES])


def write_images(folder: str | Path) -> Path:
    """The digits as PNG files, ``train`` and ``test`` with a folder for each class: data for the command line.

    Example:
        >>> sorted(path.name for path in write_images("images").iterdir())
        ['test', 'train']
    """
    from PIL import Image

    folder = Path(folder)
    for split, (images, labels) in zip(("train", "test"), load_digits(), strict=True):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / split / str(label) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return folder


def quickstart(
    folder: str | Path = "quickstart",
    *,
    model_name: str = MODEL,
    model_args: dict[str, Any] | None = None,
    base_epochs: int = 8,
    tune_epochs: int = 8,
    sweep: bool = True,
    say: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Train, score, prune, recover, fine-tune, evaluate, save, load back, report.

    Besides the pruned ``model``, the folder gets the ``images`` and the original's weights (``base.safetensors``): what
    the other commands of ``timm-knapsack`` need to do the same step by step.

    Args:
        model_args: arguments of ``timm.create_model``; 10 classes by default.
        sweep: also measure other budgets and the original on smaller images, for the report's curve.

    Returns:
        Accuracies in percent, the table, the files, and the two lines of Python that use the result.

    Example:
        >>> result = quickstart("quickstart")
        >>> result["top1"]["fine-tuned"] > result["top1"]["original"] - 0.5
        True
    """
    import timm
    import torch

    import timm_knapsack as tk

    from ..costs.latency.network_timing import compare_latency
    from ..images.loaders import create_loader
    from ..reports.page import write_report
    from ..reports.run_record import RunRecord
    from .saving import save_run

    start = time.monotonic()
    folder = Path(folder)
    train, test = load_digits()
    torch.manual_seed(0)
    arguments = {"num_classes": 10, **(model_args or {})}
    base = timm.create_model(model_name, **arguments)
    augmentation = {"crop": "pad", "pad": 3, "hflip": 0}  # a mirrored digit is another digit
    train_loader = create_loader(train, base, training=True, batch_size=64, augmentation=augmentation)
    some = create_loader(train, base, batch_size=64)
    test_loader = create_loader(test, base, batch_size=150)

    say(f"1  train {model_name} for {base_epochs} epochs on {len(train[0])} handwritten digits")
    plain = tk.DistillationConfig(kd_weight=0, ikd_weight=0, label_smoothing=0.1)
    config = tk.FinetuneConfig(
        epochs=base_epochs,
        lr=0.1,
        weight_decay=5e-4,
        warmup_epochs=min(1, base_epochs / 2),
        distillation=plain,
        eval_every=99,
    )
    tk.finetune(base, None, train_loader, None, config)
    write_images(folder / "images")
    write_tensors(folder / "base.safetensors", base.state_dict())
    top1 = {"original": tk.evaluate(base, test_loader)["top1"]}
    say(f"   top-1 on {len(test[0])} held-out images: {top1['original']:.2f} %")

    say("2  find channel groups, score every channel in one pass")
    groups = tk.find_channel_groups(base)
    scores = tk.taylor_scores(base, groups, some, data="digits", progress=False)

    say(f"3  prune to {BUDGET:.0%} of the MACs")
    result = tk.prune(base, scores=scores, budget=tk.Budget(macs=BUDGET), groups=groups, base_args=model_args)
    top1["pruned"] = tk.evaluate(result.model, test_loader)["top1"]
    macs, params = result.report.line("macs"), result.report.line("params")
    say(f"   asked {macs.asked:.0f} MACs, counted {macs.counted:.0f}; top-1 {top1['pruned']:.2f} %")

    say("4  recover in closed form, without gradients")
    tk.recover(result.model, base, some, kept=result.kept_channels, images=RECOVERY_IMAGES)
    top1["recovered"] = tk.evaluate(result.model, test_loader)["top1"]
    say(f"   top-1 {top1['recovered']:.2f} %")

    say(f"5  fine-tune for {tune_epochs} epochs with KD and inner KD")
    distillation = tk.DistillationConfig(kd_weight=1.0, ikd_weight=20.0, label_smoothing=0.0)
    config = tk.FinetuneConfig(
        epochs=tune_epochs, lr=0.02, weight_decay=5e-4, distillation=distillation, log_interval=5, progress=False
    )
    tuned = tk.finetune(result.model, base, train_loader, test_loader, config, kept=result.kept_channels)
    final = tk.evaluate(tuned.model, test_loader)
    top1["fine-tuned"] = final["top1"]
    say(f"   top-1 {top1['fine-tuned']:.2f} %")

    say("6  measure, save, load back through timm.create_model")
    times = compare_latency([base, tuned.model], batch_size=16, max_seconds=5).latencies
    before, after = times[0].median, times[1].median
    record = RunRecord.of_pruning(result, command="timm-knapsack quickstart")
    for what, value in top1.items():
        record.add_evaluation(what, {"top1": value, "samples": len(test[0])}, "scikit-learn digits, held out")
    record.add_finetuning(config, tuned)
    record.latency = {
        "original": before,
        "pruned": after,
        "batch_size": 16,
        "threads": torch.get_num_threads(),
        "device": "cpu",
    }
    if sweep:
        record.sweep = _sweep(base, scores, groups, some, test, test_loader, top1, macs)
    evaluation = {
        "dataset": "scikit-learn digits", "split": "held out", "top1": final["top1"], "samples": len(test[0]),
        "original_top1": top1["original"],
    }  # fmt: skip
    saved, _ = save_run(result, folder / "model", record=record, evaluation=evaluation, base_model="")
    loaded = timm.create_model(f"local-dir:{saved}", pretrained=True).eval()
    again = tk.evaluate(loaded, test_loader)["top1"]
    if again != final["top1"]:
        raise KnapsackError(
            f"loaded back, the model has {again:.2f} % top-1, saved {final['top1']:.2f} %; please report this"
        )
    report = write_report(saved)[0]
    say(f"   done in {time.monotonic() - start:.0f} s")
    return {
        "top1": top1,
        "macs": {"original": macs.original, "asked": macs.asked, "counted": macs.counted},
        "seconds": time.monotonic() - start,
        "table": [
            [
                "top-1",
                f"{top1['original']:.2f} %",
                f"{final['top1']:.2f} %",
                f"{final['top1'] - top1['original']:+.2f}",
            ],
            ["MACs", f"{macs.original:,.0f}", f"{macs.counted:,.0f}", f"{macs.counted / macs.original - 1:+.1%}"],
            [
                "parameters",
                f"{params.original:,}",
                f"{params.counted:,}",
                f"{params.counted / params.original - 1:+.1%}",
            ],
            ["latency, batch 16", f"{before * 1e3:.1f} ms", f"{after * 1e3:.1f} ms", f"{after / before - 1:+.1%}"],
        ],
        "model": str(saved),
        "report": str(report),
        "code": f'import timm, timm_knapsack\nmodel = timm.create_model("local-dir:{saved}", pretrained=True)',
    }


def _sweep(base, scores, groups, some, test, test_loader, top1, macs) -> list[dict[str, Any]]:
    """Accuracy against MACs: other budgets after recovery alone, and the original on smaller images as a baseline."""
    import timm_knapsack as tk

    from ..images.loaders import create_loader

    rows = [{"what": "original", "kind": "original", "macs": macs.original, "top1": top1["original"]}]
    rows.append({"what": "fine-tuned", "kind": "fine-tuned", "macs": macs.counted, "top1": top1["fine-tuned"]})
    rows.append(
        {"what": f"{BUDGET:.0%}", "kind": "pruned and recovered", "macs": macs.counted, "top1": top1["recovered"]}
    )
    budgets = [tk.Budget(macs=share) for share in (0.6, 0.25, 0.15)]
    for result in tk.sweep(base, scores, budgets, groups=groups):
        tk.recover(result.model, base, some, kept=result.kept_channels, images=RECOVERY_IMAGES)
        share = result.report.options["budget"]["macs"]
        row = {"what": f"{share:.0%}", "kind": "pruned and recovered", "macs": result.report.line("macs").counted}
        rows.append({**row, "top1": tk.evaluate(result.model, test_loader)["top1"]})
    for side in (24, 16):
        loader = create_loader(test, base, batch_size=150, input_size=side)
        row = {"what": f"{side} px", "kind": "original, smaller images", "macs": tk.count_macs(base, (3, side, side))}
        rows.append({**row, "top1": tk.evaluate(base, loader)["top1"]})
    return rows
