"""What a conv or linear layer sees and gives at chosen output positions, as matrices.

A layer is then a matrix product: ``outputs = patches @ flat_weight (+ bias)``, group by group. Positions are drawn at
random where a map has more of them than are needed.
"""

import torch
from torch import Tensor, nn


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
    top, left, rows, columns = _grid(layer, x)
    if positions is None:
        positions = torch.arange(rows * columns, device=x.device)
    y = (positions // columns * stride[0] - top)[:, None]
    y = y + (torch.arange(kernel[0], device=x.device) * dilation[0]).repeat_interleave(kernel[1])
    z = (positions % columns * stride[1] - left)[:, None]
    z = z + (torch.arange(kernel[1], device=x.device) * dilation[1]).repeat(kernel[0])  # both [positions, taps]
    height, width = x.shape[2:]
    inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
    at = y.clamp(0, height - 1) * width + z.clamp(0, width - 1)
    if layer.groups == 1:
        return _rows_of_taps(x, at, inside)
    return _taps_of_channels(x, at, inside).reshape(layer.groups, -1, len(x) * len(at)).transpose(1, 2)


def _rows_of_taps(x: Tensor, at: Tensor, inside: Tensor) -> Tensor:
    """[1, images × positions, channels × taps]; one row of memory is read for each tap.

    No copy of the map is made where its channels lie side by side.
    """
    images, channels = x.shape[:2]
    seen = x.permute(0, 2, 3, 1).reshape(images, -1, channels).index_select(1, at.reshape(-1))
    seen = seen.reshape(images, *at.shape, channels)
    if not inside.all():
        seen = seen * inside[None, :, :, None]  # padding
    return seen.transpose(2, 3).reshape(1, images * len(at), -1)


def _taps_of_channels(x: Tensor, at: Tensor, inside: Tensor) -> Tensor:
    """[channels, taps, images × positions], positions side by side.

    A depthwise conv has as many small products as channels. With the positions of a channel far apart in memory each
    of them takes ten to fifty times as long.
    """
    images, channels = x.shape[:2]
    pixels = x.shape[2] * x.shape[3]
    first = torch.arange(images, device=x.device)[:, None] * pixels
    taps = (first + at.t()[:, None]).reshape(-1)  # of [taps, images, positions]
    seen = x.permute(1, 0, 2, 3).reshape(channels, images * pixels)[:, taps].reshape(channels, at.shape[1], images, -1)
    if not inside.all():
        seen = seen.mul_(inside.t()[:, None])  # padding
    return seen.reshape(channels, at.shape[1], -1)


def _grid(layer: nn.Module, x: Tensor) -> tuple[int, int, int, int]:
    """How far the first output position reaches beyond the map, above and left, and the rows and columns of these."""
    reach = [d * (k - 1) + 1 for k, d in zip(layer.weight.shape[2:], layer.dilation, strict=True)]
    size = tuple(x.shape[2:])
    if type(layer).__name__ == "Conv2dSame":  # timm pads these while they run
        counts = [-(-n // s) for n, s in zip(size, layer.stride, strict=True)]
        steps = zip(counts, layer.stride, reach, size, strict=True)
        before = [max((c - 1) * s + r - n, 0) // 2 for c, s, r, n in steps]
        return before[0], before[1], counts[0], counts[1]
    if layer.padding_mode != "zeros":
        raise ValueError(f"its padding ({layer.padding}, {layer.padding_mode}) has no closed form here")
    if layer.padding == "same":  # the stride is 1; an odd row more goes below
        return (reach[0] - 1) // 2, (reach[1] - 1) // 2, *size
    top, left = padding = (0, 0) if layer.padding == "valid" else layer.padding
    rows, columns = ((n + 2 * p - r) // s + 1 for n, p, r, s in zip(size, padding, reach, layer.stride, strict=True))
    return top, left, rows, columns


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
    images, channels = y.shape[:2]
    y = y.permute(0, 2, 3, 1).reshape(images, -1, channels)  # no copy where channels lie side by side
    y = y if positions is None else y.index_select(1, positions)
    y = y.reshape(images * y.shape[1], layer.groups, channels // layer.groups)
    return y.transpose(0, 1).contiguous()


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
    groups = groups_of(layer)
    weight = layer.weight.detach()
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)


def groups_of(layer: nn.Module) -> int:
    return 1 if isinstance(layer, nn.Linear) else layer.groups
