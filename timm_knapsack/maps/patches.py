"""What a conv or linear layer sees and gives at chosen output positions, as matrices.

A layer is then a matrix product: ``outputs = patches @ flat_weight (+ bias)``, group by group. Positions are drawn at
random where a map has more of them than are needed.
"""

import torch
from timm.layers import pad_same
from torch import Tensor, nn
from torch.nn import functional as F


def patches(layer: nn.Module, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """What output positions of the layer see: [groups, images × positions, inputs]; all positions by default.

    Example:
        >>> conv = nn.Conv2d(4, 8, 3, padding=1)
        >>> patches(conv, torch.zeros(2, 4, 5, 5), torch.tensor([0, 7, 24])).shape
        torch.Size([1, 6, 36])
    """
    if isinstance(layer, nn.Linear):
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x if positions is None else x[:, positions]
        return x.reshape(1, -1, x.shape[-1])
    kernel, stride, dilation = layer.weight.shape[2:], layer.stride, layer.dilation
    x = _padded(layer, x)
    if positions is None:
        seen = x.flatten(2) if kernel.numel() == 1 and stride == (1, 1) else F.unfold(x, kernel, dilation, 0, stride)
        seen = seen.reshape(x.shape[0], layer.groups, -1, seen.shape[2])  # [images, groups, inputs, positions]
        return seen.permute(1, 0, 3, 2).reshape(layer.groups, -1, seen.shape[2])
    columns = (x.shape[3] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    corner = positions // columns * stride[0] * x.shape[3] + positions % columns * stride[1]
    tap_y = torch.arange(kernel[0], device=x.device).repeat_interleave(kernel[1]) * dilation[0]
    tap_x = torch.arange(kernel[1], device=x.device).repeat(kernel[0]) * dilation[1]
    at = corner[:, None] + (tap_y * x.shape[3] + tap_x)[None]  # [positions, taps]
    seen = x.flatten(2).index_select(2, at.reshape(-1))
    seen = seen.reshape(x.shape[0], layer.groups, -1, *at.shape)  # [images, groups, channels, positions, taps]
    return seen.permute(1, 0, 3, 2, 4).reshape(layer.groups, x.shape[0] * len(at), -1)


def _padded(layer: nn.Module, x: Tensor) -> Tensor:
    if type(layer).__name__ == "Conv2dSame":  # timm pads these while they run
        return pad_same(x, layer.weight.shape[-2:], layer.stride, layer.dilation)
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        raise ValueError(f"its padding ({layer.padding}, {layer.padding_mode}) has no closed form here")
    if not any(layer.padding):
        return x
    return F.pad(x, (layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]))


def outputs(layer: nn.Module, y: Tensor, positions: Tensor | None = None) -> Tensor:
    """The layer's output in the order of `patches`: [groups, images × positions, outputs].

    Example:
        >>> outputs(nn.Conv2d(4, 8, 3, padding=1), torch.zeros(2, 8, 5, 5), torch.tensor([0, 7, 24])).shape
        torch.Size([1, 6, 8])
    """
    if isinstance(layer, nn.Linear):
        y = y.reshape(y.shape[0], -1, y.shape[-1])
        y = y if positions is None else y[:, positions]
        return y.reshape(1, -1, y.shape[-1])
    y = y.flatten(2)
    y = y if positions is None else y.index_select(2, positions)
    images, channels, count = y.shape
    y = y.reshape(images, layer.groups, channels // layer.groups, count)
    return y.permute(1, 0, 3, 2).reshape(layer.groups, images * count, -1)


def count_positions(layer: nn.Module, y: Tensor) -> int:
    """Output positions of one image, from the layer's output for any number of images.

    Example:
        >>> count_positions(nn.Conv2d(4, 8, 3, padding=1), torch.zeros(2, 8, 5, 5))
        25
    """
    return y[0].numel() // (y.shape[-1] if isinstance(layer, nn.Linear) else y.shape[1])


def draw_positions(layer: nn.Module, y: Tensor, most: int, seed: int) -> Tensor | None:
    """A random choice of output positions, the same in each image, ``most`` in all of them; None for all.

    Example:
        >>> len(draw_positions(nn.Conv2d(4, 8, 3, padding=1), torch.zeros(2, 8, 5, 5), most=20, seed=0))
        10
    """
    count = count_positions(layer, y)
    wanted = max(1, most // y.shape[0])
    if wanted >= count:
        return None
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:wanted].to(y.device)


def flat_weight(layer: nn.Module) -> Tensor:
    """The layer's weight as [groups, inputs, outputs].

    Example:
        >>> flat_weight(nn.Conv2d(4, 8, 3, groups=2)).shape
        torch.Size([2, 18, 4])
    """
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    weight = layer.weight.detach()
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)
