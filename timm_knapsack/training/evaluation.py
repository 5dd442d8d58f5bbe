"""Accuracy of a model on any number of processes, every sample counted once."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..errors import DataError, TrainingError
from ..maps.batches import split_batch
from ..maps.distance import class_scores, output_distance
from ..maps.precision import CURE, bfloat16_kills
from ..slim.example_inputs import example_dtype
from ..slim.modes import eval_mode


def evaluate(
    model: nn.Module, loader: Any, accelerator: Any = None, *, teacher: nn.Module | None = None
) -> dict[str, float]:
    """Top-1 and top-5 in percent, mean cross-entropy and the number of samples, each counted once on any number of
    processes. Runs on the model's device, under the accelerator's mixed precision, and leaves the model's modes alone.

    With a ``teacher``, images without labels are compared with what it says instead: ``agreement``, the percentage that
    gets the same class, and ``kl``, the mean KL divergence from its outputs.

    Example:
        >>> perfect = nn.Flatten()  # its input is its output
        >>> perfect.weight = nn.Parameter(torch.ones(1))
        >>> evaluate(perfect, [(torch.eye(3) * 99, torch.tensor([0, 1, 2]))])
        {'top1': 100.0, 'top5': 100.0, 'loss': 0.0, 'samples': 3}
        >>> evaluate(perfect, [torch.eye(3)], teacher=perfect)
        {'agreement': 100.0, 'kl': 0.0, 'samples': 3}
    """
    accelerator = accelerator or start_accelerator()
    sharded = isinstance(loader, DataLoader)
    if sharded:
        loader = accelerator.prepare(loader, device_placement=[False])
    if hasattr(loader, "set_epoch"):  # Accelerate moves on by itself, and each evaluation must see the same images
        loader.set_epoch(0)
    device, dtype = next(model.parameters()).device, example_dtype(model)
    sums, samples, labelled = [torch.zeros(3, device=device)], 0, True
    with eval_mode(model, *([teacher] if teacher is not None else [])), torch.no_grad():
        for index, batch in enumerate(loader):
            if not sharded and index % accelerator.num_processes != accelerator.process_index:
                continue
            images, targets = (part.to(device) for part in split_batch(batch))
            images = images.to(dtype)
            labelled = not has_no_labels(targets)
            if not labelled and teacher is None:
                raise DataError("the evaluation data has no labels; name the label column, or leave the evaluation out")
            with accelerator.autocast():
                logits = class_scores(model(images))
                reference = None if labelled else class_scores(teacher(images))
            if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
                raise TrainingError(f"{type(model).__name__} gives no class scores [images, classes] to be counted")
            logits = logits.float()
            if labelled:
                check_targets(targets, logits.shape[1], f"batch {index} of the evaluation data", images=len(images))
            rows = _right(logits, targets) if labelled else _alike(logits, reference.float())
            if sharded:
                rows = accelerator.gather_for_metrics(rows)  # without the samples that even_batches repeats
            sums.append(rows.sum(dim=0))
            samples += len(rows)
    totals = torch.stack(sums).cpu().double().sum(dim=0)
    if not sharded and accelerator.num_processes > 1:
        totals = torch.cat([totals, torch.tensor([samples, not labelled], dtype=torch.float64)])
        totals = accelerator.reduce(totals.to(accelerator.device), "sum").cpu()
        samples, labelled = int(totals[3]), not totals[4]  # a process without a batch does not know
    if not samples:
        raise DataError("the evaluation loader is empty; check the dataset")
    loss, first, second = (totals[:3] / samples).tolist()
    if labelled:
        return {"top1": 100 * first, "top5": 100 * second, "loss": loss, "samples": samples}
    return {"agreement": 100 * first, "kl": loss, "samples": samples}


def is_better(row: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Is this evaluation better than the other: in top-1, or without labels closer to the teacher?

    Example:
        >>> is_better({"top1": 91.0}, {"top1": 90.0}), is_better({"kl": 0.2}, {"kl": 0.1})
        (True, False)
    """
    if "top1" in row:
        return row["top1"] > other["top1"]
    return (math.inf if row["kl"] is None else row["kl"]) < (math.inf if other["kl"] is None else other["kl"])


def ended_below_its_start(rows: Sequence[Mapping[str, float]], best: Mapping[str, float], folder: Path | None) -> str:
    """One line for a run whose last evaluation is worse than its first.

    Example:
        >>> rows = [{"epoch": 0, "top1": 98.4}, {"epoch": 1, "top1": 97.1}]
        >>> ended_below_its_start(rows, rows[0], Path("run/best"))
        'fine-tuning ended below its start: top-1 97.10 % after 98.40 %; the best, of epoch 0, is in run/best'
    """

    def words(row: Mapping[str, float]) -> str:
        return f"{row['top1']:.2f} %" if "top1" in row else f"{row['kl']}"

    what = "top-1" if "top1" in rows[0] else "KL from the teacher"
    where = f"is in {folder}" if folder is not None else "was not kept, for want of an output_dir"
    change = f"{what} {words(rows[-1])} after {words(rows[0])}"
    return f"fine-tuning ended below its start: {change}; the best, of epoch {best['epoch']}, {where}"


def _right(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """For each image its cross-entropy, and whether its label is the first, or among the first five."""
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="none")
    return torch.stack([loss, hits[:, 0].float(), hits.any(dim=1).float()], dim=1)


def _alike(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """For each image its divergence from the teacher's outputs, and whether both say the same class."""
    same = (logits.argmax(1) == reference.argmax(1)).float()
    return torch.stack([output_distance(reference, logits, logits=True), same, same], dim=1)


def start_accelerator(
    mixed_precision: str | None = None, trackers: Sequence[str] = (), output_dir: str | None = None
) -> Any:
    """A new Accelerator; without ``mixed_precision`` the one that ``accelerate launch`` was told, else none."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # Accelerate keeps the precision for the whole process: without this a second run can't have another
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(mixed_precision=precision, log_with=list(trackers) or None, project_dir=output_dir)
    except ValueError as error:
        settings = f"mixed_precision={precision!r}, trackers={list(trackers)}"
        raise TrainingError(f"Accelerate can't start with {settings}: {error}") from error
    if precision == "bf16" and accelerator.device.type == "cpu" and bfloat16_kills():
        raise TrainingError(
            "mixed_precision='bf16': this CPU announces bfloat16 products and ends the process at the first (a virtual "
            f"machine that holds AMX back does so); set {CURE} in the environment, or leave mixed_precision out"
        )
    return accelerator


def check_labels(student: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> int:
    """The number of classes; an error where the labels do not fit it, instead of an index error deep down."""
    with eval_mode(student), torch.no_grad():
        classes = class_scores(student(images)).shape[-1]
    check_targets(targets, classes, unlabelled=has_no_labels(targets))
    return classes


def has_no_labels(targets: torch.Tensor) -> bool:
    """Is every target -1, as loaders give them for images without a label?

    Example:
        >>> has_no_labels(torch.tensor([-1, -1])), has_no_labels(torch.tensor([-1, 3]))
        (True, False)
    """
    return not targets.is_floating_point() and bool((targets == -1).all())


def check_targets(
    targets: torch.Tensor, classes: int, where: str = "", unlabelled: bool = False, images: int | None = None
) -> None:
    """An error that names the first image whose label is not one of the classes.

    Args:
        where: which batch it is, for the error.
        unlabelled: the data has no labels, which -1 stands for.
        images: how many there are; a single label for all of them would be counted against each.

    Example:
        >>> check_targets(torch.tensor([0, 2, 9]), 3, "batch 5")
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.TrainingError: labels must be [batch] from 0 to 2; image 2 of batch 5 has 9
    """
    place = f" of {where}" if where else ""
    if images is not None and targets.shape[:1] != (images,):
        raise TrainingError(f"there must be a label for each of the {images} images{place}, got {len(targets)}")
    if targets.is_floating_point():
        if targets.shape[1:] != (classes,):
            raise TrainingError(f"soft labels of shape {tuple(targets.shape)}{place} do not fit {classes} classes")
        return
    expected = f"labels must be [batch] from 0 to {classes - 1}"
    if targets.ndim != 1:
        raise TrainingError(f"{expected}; got the shape {tuple(targets.shape)}{place and f' in {where}'}")
    wrong = (targets < (-1 if unlabelled else 0)) | (targets >= classes)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise TrainingError(f"{expected}; image {row}{place or ' of the first batch'} has {int(targets[row])}")
