"""Images out of whatever a loader gives: tensors, ``(images, labels)``, or the dicts of transformers and datasets."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import KnapsackError

IMAGE_KEYS = ("pixel_values", "image", "images", "img")
LABEL_KEYS = ("labels", "label")


def images_of(batch: Any) -> Tensor:
    """The images of one batch.

    Example:
        >>> import torch
        >>> images_of({"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2)}).shape
        torch.Size([2, 3, 8, 8])
    """
    if isinstance(batch, Mapping):
        x = next((batch[key] for key in IMAGE_KEYS if key in batch), None)
        found = f"a dict with the keys {', '.join(map(str, batch))}"
    else:
        x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        found = f"a {type(batch).__name__}"
    if not isinstance(x, Tensor):
        raise KnapsackError(
            f"a batch is {found}, expected images, (images, labels), or a dict with pixel_values as a tensor"
        )
    return x


def labels_of(batch: Any) -> Tensor | None:
    """The class indices of one batch, or None where it has none.

    Soft targets and other things do not count, nor does -1, which `create_loader` gives images without a label.

    Example:
        >>> import torch
        >>> labels_of((torch.zeros(2, 3, 8, 8), torch.tensor([1, 0])))
        tensor([1, 0])
        >>> labels_of((torch.zeros(2, 3, 8, 8), torch.tensor([-1, -1]))) is None
        True
    """
    if isinstance(batch, Mapping):
        y = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    else:
        y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    whole = isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool
    return y if whole and not (y < 0).any() else None


def image_batches(loader: Iterable | None, limit: int | None = None, device: Any = None) -> list[Tensor]:
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
        x = images_of(batch).to(device)
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
