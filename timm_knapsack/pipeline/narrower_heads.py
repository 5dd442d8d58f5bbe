"""Attention heads that can become narrower: the network is turned on a few of the images before it is valued."""

from collections.abc import Iterable

from torch import nn

from ..maps.batches import image_batches
from ..slim.example_inputs import example_dtype
from ..slim.turned_heads import turned_copy
from ..slim.wrappers import for_images

IMAGES = 64  # each has a hundred tokens and more, and a head a few dozen widths


def turn_heads(model: nn.Module, loader: Iterable) -> nn.Module:
    """A copy whose attention heads can become narrower, and that computes the same; the model itself where none can.

    `prune` does it by itself. It is for those who call `find_channel_groups` and `value_curves` on their own, whom it
    serves as the original from then on.

    Args:
        loader: images, with labels or without; a few dozen are used.

    Example:
        >>> import timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> turned = turn_heads(vit, [torch.randn(8, 3, 32, 32)])
        >>> for each in (vit, turned):
        ...     print(find_channel_groups(each)["blocks.0.attn.qkv"].size)
        3
        64
    """
    model = for_images(model)
    return turned_copy(model, image_batches(loader, IMAGES, next(model.parameters()).device, example_dtype(model)))
