"""THE adapter of batches: tensors, ``(images, labels)``, or the dicts that transformers and datasets give.

Scoring, recovery, fine-tuning and evaluation all read batches through it, so that what works in one works in all.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, KnapsackError

IMAGE_KEYS = ("pixel_values", "image", "images", "img")
LABEL_KEYS = ("labels", "label")


def images_of(batch: Any) -> Tensor:
    """The images of one batch.

    Example:
        >>> import torch
        >>> images_of({"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2)}).shape
        torch.Size([2, 3, 8, 8])
    """
    x = _images(batch)
    if x is None:
        raise DataError(
            f"a batch is {_kind(batch)}, expected images, (images, labels), or a dict with pixel_values as a tensor"
        )
    return x


def targets_of(batch: Any) -> Tensor | None:
    """The labels of one batch as they are, class indices or soft targets; None where it has none.

    Example:
        >>> import torch
        >>> targets_of({"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.tensor([1, 0])})
        tensor([1, 0])
    """
    y = _part(batch, 1, LABEL_KEYS)
    return y if isinstance(y, Tensor) else None


def labels_of(batch: Any) -> Tensor | None:
    """The class indices of one batch, or None where it has none.

    Soft targets and other things do not count, nor does -1, which `image_loader` gives images without a label.

    Example:
        >>> import torch
        >>> labels_of((torch.zeros(2, 3, 8, 8), torch.tensor([1, 0])))
        tensor([1, 0])
        >>> labels_of((torch.zeros(2, 3, 8, 8), torch.tensor([-1, -1]))) is None
        True
    """
    y = targets_of(batch)
    whole = y is not None and y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool
    return y if whole and not (y < 0).any() else None


def labelled(batch: Any) -> tuple[Tensor, Tensor]:
    """``(images, targets)`` of one batch, for whoever can't do without labels.

    Example:
        >>> import torch
        >>> labelled(torch.zeros(2, 3, 8, 8))
        Traceback (most recent call last):
        timm_knapsack.errors.DataError: a batch is a Tensor, expected (images, labels), or a dict with pixel_values ...
    """
    images, targets = _images(batch), targets_of(batch)
    if images is None or targets is None:
        raise DataError(
            f"a batch is {_kind(batch)}, expected (images, labels), or a dict with pixel_values and labels, as tensors"
        )
    return images, targets


def split_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """``(images, targets)`` of one batch, with targets of -1 where it has none.

    Example:
        >>> import torch
        >>> split_batch({"pixel_values": torch.zeros(2, 3, 8, 8)})[1]
        tensor([-1, -1])
    """
    images, given = images_of(batch), _part(batch, 1, LABEL_KEYS)
    if given is None:
        return images, torch.full((len(images),), -1)
    if not isinstance(given, Tensor):
        raise DataError(f"the labels of a batch must be a tensor, got {type(given).__name__}")
    return images, given


def _images(batch: Any) -> Tensor | None:
    x = _part(batch, 0, IMAGE_KEYS) if isinstance(batch, (Mapping, tuple, list)) else batch
    return x if isinstance(x, Tensor) else None


def _part(batch: Any, position: int, keys: Iterable[str]) -> Any:
    if isinstance(batch, Mapping):
        return next((batch[key] for key in keys if key in batch), None)
    return batch[position] if isinstance(batch, (tuple, list)) and len(batch) > position else None


def _kind(batch: Any) -> str:
    """What a batch is, in words."""
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    inside = f" of {', '.join(type(x).__name__ for x in batch[:3])}" if isinstance(batch, (tuple, list)) else ""
    return f"a {type(batch).__name__}{inside}"


def image_batches(
    loader: Iterable | None, limit: int | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """All images of a loader, batch by batch, at most ``limit`` of them.

    Example:
        >>> import torch
        >>> [len(x) for x in image_batches([torch.zeros(4, 3, 8, 8)] * 3, limit=10)]
        [4, 4, 2]
    """
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise KnapsackError(f"images={limit!r}: expected a whole number, at least one image is needed")
    batches, count = [], 0
    for batch in loader if loader is not None else ():
        x = images_of(batch).to(device=device, dtype=dtype)
        x = x if limit is None else x[: limit - count]
        if not torch.isfinite(x).all():
            raise KnapsackError("images hold values that are not finite (nan or infinite)")
        if len(x):
            batches.append(x)
        count += len(x)
        if limit is not None and count >= limit:
            break
    if not count:
        raise KnapsackError("the loader gave no images; a few hundred are needed")
    return batches


def example_of(model: Any, loader: Iterable | None) -> Tensor | None:
    """The first image of a loader, for a model that is not timm's and so does not say what it takes; else None.

    Example:
        >>> example_of(torch.nn.Conv2d(3, 1, 1), [torch.zeros(4, 3, 8, 8)]).shape
        torch.Size([1, 3, 8, 8])
    """
    if loader is None or getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None):
        return None
    return next((images_of(batch)[:1] for batch in loader), None)


def varied(batches: list[Tensor]) -> list[Tensor]:
    """The same batches, or an error where every image is one plain colour: nothing can be fitted to those.

    Example:
        >>> import torch
        >>> varied([torch.zeros(2, 3, 8, 8)])
        Traceback (most recent call last):
        timm_knapsack.errors.KnapsackError: every image is one plain colour; are they read and normalised as ...
    """
    if all(torch.equal(x.flatten(2).amax(2), x.flatten(2).amin(2)) for x in batches):
        raise KnapsackError(
            "every image is one plain colour; are they read and normalised as they should be? Real images are needed"
        )
    return batches
