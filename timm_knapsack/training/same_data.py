"""What a checkpoint remembers of its training data, and whether all processes have as much of it."""

import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError
from .epoch_batches import EpochBatches

FIRST_BATCHES = 2  # of epoch 0: pixels and labels in the order in which they come


def batches_on_all(loader: Any, accelerator: Any, seed: int, length: int | None) -> EpochBatches:
    """`EpochBatches`, with an error on every process where the processes have different numbers of batches.

    Without it the one with fewer would stop, and the others wait for it for good.
    """
    batches, problem = None, None
    try:
        batches = EpochBatches(loader, accelerator, seed, length)
    except TrainingError as error:
        problem = error
    lengths = _from_all([len(batches) if batches is not None else 0], accelerator)[:, 0].tolist()
    if len(set(lengths)) > 1:
        raise TrainingError(
            "the processes have training loaders of different length: "
            + ", ".join(f"process {process} has {n} batches" for process, n in enumerate(lengths))
            + "; give each the same loader (it is divided by itself), or FinetuneConfig(steps_per_epoch=…)"
        )
    if problem is not None:
        raise problem
    return batches


def first_batches(batches: EpochBatches) -> list[tuple[Tensor, Tensor]]:
    """Those that `describe_data` looks at."""
    return list(islice(batches.epoch(0), FIRST_BATCHES))


def describe_data(batches: EpochBatches, first: Sequence[tuple[Tensor, Tensor]], accelerator: Any) -> dict[str, Any]:
    """What tells this data, in this order, from other data; the same on every process.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> batches = EpochBatches([(torch.zeros(2, 1), torch.tensor([0, 1]))] * 3, accelerator, seed=0)
        >>> list(describe_data(batches, first_batches(batches), accelerator))
        ['images', 'order', 'first_labels', 'first_pixels']
    """
    sums = _from_all([crc32(part[kind] for part in first) for kind in (1, 0)], accelerator)
    labels, pixels = (zlib.crc32(str(column.tolist()).encode()) for column in sums.T)
    order = getattr(batches.original, "seed", None)
    return {
        "images": _image_count(batches.original),
        "order": order if isinstance(order, int) else None,
        "first_labels": labels,
        "first_pixels": pixels,
    }


def _image_count(loader: Any) -> int | None:
    """How many images there are, where it can be told without reading them."""
    dataset = getattr(loader, "dataset", None)
    if hasattr(dataset, "__len__"):
        return len(dataset)
    if type(loader) in (list, tuple):  # of batches; what inherits from these may make them when it is asked
        return sum(len(images) for images, *_ in loader)
    return None


def with_unknown_count(saved: Any, now: dict[str, Any]) -> dict[str, Any]:
    """This run, with the checkpoint's number of images where it can't be told on either side: no difference then.

    Example:
        >>> with_unknown_count({"data": {"images": None}}, {"data": {"images": 20}})
        {'data': {'images': None}}
    """
    data = saved.get("data") if isinstance(saved, dict) else None
    if isinstance(data, dict) and None in (data.get("images"), now["data"]["images"]):
        return {**now, "data": {**now["data"], "images": data.get("images")}}
    return now


def crc32(tensors) -> int:
    """Of the bits of tensors, one after the other."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def _from_all(numbers: Sequence[int], accelerator: Any) -> Tensor:
    """[processes, numbers]."""
    return accelerator.gather(torch.tensor([numbers], dtype=torch.int64, device=accelerator.device)).cpu()
