"""Accuracy of a model on any number of processes, every sample counted once."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..errors import DataError, TrainingError
from ..maps.batches import labelled
from ..slim.modes import eval_mode


def evaluate(model: nn.Module, loader: Any, accelerator: Any = None) -> dict[str, float]:
    """Top-1 and top-5 in percent, mean cross-entropy and the number of samples, each counted once on any number of
    processes. Runs on the model's device, under the accelerator's mixed precision, and leaves the model's modes alone.

    Example:
        >>> perfect = nn.Flatten()  # its input is its output
        >>> perfect.weight = nn.Parameter(torch.ones(1))
        >>> evaluate(perfect, [(torch.eye(3) * 99, torch.tensor([0, 1, 2]))])
        {'top1': 100.0, 'top5': 100.0, 'loss': 0.0, 'samples': 3}
    """
    accelerator = accelerator or start_accelerator()
    if getattr(getattr(loader, "dataset", None), "has_labels", True) is False:
        raise DataError("the evaluation data has no labels; name the label column, or leave the evaluation out")
    sharded = isinstance(loader, DataLoader)
    if sharded:
        loader = accelerator.prepare(loader, device_placement=[False])
    if hasattr(loader, "set_epoch"):  # Accelerate moves on by itself, and each evaluation must see the same images
        loader.set_epoch(0)
    device = next(model.parameters()).device
    sums, samples = [torch.zeros(3, device=device)], 0
    with eval_mode(model), torch.no_grad():
        for index, batch in enumerate(loader):
            if not sharded and index % accelerator.num_processes != accelerator.process_index:
                continue
            images, targets = (part.to(device) for part in labelled(batch))
            with accelerator.autocast():
                logits = model(images)
            logits = logits.float()
            hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
            loss = F.cross_entropy(logits, targets, reduction="none")
            rows = torch.stack([loss, hits[:, 0].float(), hits.any(dim=1).float()], dim=1)
            if sharded:
                rows = accelerator.gather_for_metrics(rows)  # without the samples that even_batches repeats
            sums.append(rows.sum(dim=0))
            samples += len(rows)
    totals = torch.stack(sums).cpu().double().sum(dim=0)
    if not sharded and accelerator.num_processes > 1:
        totals = torch.cat([totals, torch.tensor([samples], dtype=torch.float64)])
        totals = accelerator.reduce(totals.to(accelerator.device), "sum").cpu()
        samples = int(totals[3])
    if not samples:
        raise DataError("the evaluation loader is empty; check the dataset")
    loss, top1, top5 = (totals[:3] / samples).tolist()
    return {"top1": 100 * top1, "top5": 100 * top5, "loss": loss, "samples": samples}


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
        return Accelerator(mixed_precision=precision, log_with=list(trackers) or None, project_dir=output_dir)
    except ValueError as error:
        settings = f"mixed_precision={precision!r}, trackers={list(trackers)}"
        raise TrainingError(f"Accelerate can't start with {settings}: {error}") from error


def check_labels(student: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> int:
    """The number of classes; an error where the labels do not fit it, instead of an index error deep down."""
    with eval_mode(student), torch.no_grad():
        classes = student(images).shape[-1]
    if targets.is_floating_point():
        if targets.shape[1:] != (classes,):
            raise TrainingError(f"soft labels of shape {tuple(targets.shape)} do not fit {classes} classes")
    elif targets.ndim != 1 or targets.min() < 0 or targets.max() >= classes:
        found = f"{tuple(targets.shape)} from {targets.min().item()} to {targets.max().item()}"
        raise TrainingError(f"labels must be [batch] from 0 to {classes - 1}, got {found}")
    return classes
