"""Ridge regression of a conv or linear layer's weights, from Gram matrices that are added up batch by batch."""

import math
from dataclasses import dataclass

import torch
from timm.layers import pad_same
from torch import Tensor, nn
from torch.nn import functional as F


def patches(layer: nn.Module, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """What output positions of the layer see: [groups, images × positions, inputs]; all positions by default."""
    if isinstance(layer, nn.Linear):
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x if positions is None else x[:, positions]
        return x.reshape(1, -1, x.shape[-1])
    x = _padded(layer, x)
    (high, wide), (step_y, step_x), (apart_y, apart_x) = layer.weight.shape[2:], layer.stride, layer.dilation
    rows = (x.shape[2] - apart_y * (high - 1) - 1) // step_y + 1
    columns = (x.shape[3] - apart_x * (wide - 1) - 1) // step_x + 1
    at = torch.arange(rows * columns, device=x.device) if positions is None else positions
    top, left = at // columns * step_y, at % columns * step_x
    y = top[:, None] + torch.arange(high, device=x.device).repeat_interleave(wide) * apart_y  # [positions, taps]
    z = left[:, None] + torch.arange(wide, device=x.device).repeat(high) * apart_x
    seen = x.flatten(2)[:, :, y * x.shape[3] + z]  # [images, channels, positions, taps]
    images, channels, count, taps = seen.shape
    seen = seen.reshape(images, layer.groups, channels // layer.groups, count, taps)
    return seen.permute(1, 0, 3, 2, 4).reshape(layer.groups, images * count, -1)


def _padded(layer: nn.Module, x: Tensor) -> Tensor:
    if type(layer).__name__ == "Conv2dSame":  # timm pads these while they run
        return pad_same(x, layer.weight.shape[-2:], layer.stride, layer.dilation)
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        raise ValueError(f"its padding ({layer.padding}, {layer.padding_mode}) has no closed form here")
    return F.pad(x, (layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]))


def outputs(layer: nn.Module, y: Tensor, positions: Tensor | None = None) -> Tensor:
    """The layer's output in the order of `patches`: [groups, images × positions, outputs]."""
    if isinstance(layer, nn.Linear):
        y = y.reshape(y.shape[0], -1, y.shape[-1])
        y = y if positions is None else y[:, positions]
        return y.reshape(1, -1, y.shape[-1])
    y = y.flatten(2)
    y = y if positions is None else y[:, :, positions]
    images, channels, count = y.shape
    y = y.reshape(images, layer.groups, channels // layer.groups, count)
    return y.permute(1, 0, 3, 2).reshape(layer.groups, images * count, -1)


def draw_positions(layer: nn.Module, y: Tensor, most: int, seed: int) -> Tensor | None:
    """A random choice of output positions, the same in each image; None for all of them."""
    count = y.reshape(y.shape[0], -1, y.shape[-1]).shape[1] if isinstance(layer, nn.Linear) else y.shape[2] * y.shape[3]
    wanted = max(1, most // y.shape[0])
    if wanted >= count:
        return None
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:wanted].to(y.device)


def flat_weight(layer: nn.Module) -> Tensor:
    """The layer's weight as [groups, inputs, outputs]."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    weight = layer.weight.detach()
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)


PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FEW_PENALTIES = (1e-3, 1e-1)  # for layers with so many inputs that a solve takes seconds
MANY_INPUTS = 1500


@dataclass(frozen=True)
class Fit:
    weight: Tensor  # in the layer's own shape
    intercept: Tensor  # one number for each output channel
    error_before: float  # share of the target's variance that is missed
    error_after: float
    ridge: float  # the penalty; infinite where no change does better on images that were not fitted


class RidgeSums:
    """Sums over positions of inputs × inputs and inputs × residuals; float64.

    The regression is of the residual (target − what the layer gives now) on the inputs, and the penalty is on the
    change of the weights: with little data the layer stays as it is. Two halves of the images are summed apart, so
    that the penalty can be chosen by what a fit on one half is worth on the other.
    """

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.now = flat_weight(layer).double()
        self.halves = (_Sums(self.now), _Sums(self.now))

    def add(self, x: Tensor, residual: Tensor, target: Tensor) -> None:
        """All [groups, positions, …], image by image."""
        middle = (x.shape[1] + 1) // 2
        for half, part in zip(self.halves, (slice(None, middle), slice(middle, None)), strict=True):
            half.add(x[:, part], residual[:, part], target[:, part])

    def fit(self, ridge: float | None, intercept: bool) -> Fit:
        """The weights for a given penalty, or for the one that does best across the halves."""
        whole = self.halves[0] + self.halves[1]
        if ridge is None:
            ridge = self._best_penalty(intercept)
        change, shift = whole.solve(ridge, intercept)
        total = max(whole.target_square - (whole.target_sum.square() / max(whole.count, 1)).sum().item(), 1e-30)
        weight = (self.now + change).transpose(1, 2).reshape(self.layer.weight.shape)
        return Fit(
            weight.to(self.layer.weight.dtype),
            shift.reshape(-1),
            whole.residual_square / total,
            max(whole.error(change, shift), 0.0) / total,
            ridge,
        )

    def _best_penalty(self, intercept: bool) -> float:
        a, b = self.halves
        best, least = math.inf, a.residual_square + b.residual_square
        if not a.count or not b.count:
            return best
        for ridge in FEW_PENALTIES if self.now.shape[1] > MANY_INPUTS else PENALTIES:
            error = b.error(*a.solve(ridge, intercept)) + a.error(*b.solve(ridge, intercept))
            if error < least:
                best, least = ridge, error
        return best


class _Sums:
    def __init__(self, now: Tensor):
        groups, inputs, outs = now.shape
        self.count = 0
        self.gram = now.new_zeros(groups, inputs, inputs)
        self.cross = now.new_zeros(groups, inputs, outs)
        self.input_sum = now.new_zeros(groups, inputs)
        self.residual_sum = now.new_zeros(groups, outs)
        self.target_sum = now.new_zeros(groups, outs)
        self.residual_square = 0.0
        self.target_square = 0.0

    def __add__(self, other: "_Sums") -> "_Sums":
        result = _Sums(self.cross)
        for name in vars(result):
            setattr(result, name, getattr(self, name) + getattr(other, name))
        return result

    def add(self, x: Tensor, residual: Tensor, target: Tensor) -> None:
        """Products in float32, sums in float64."""
        self.count += x.shape[1]
        self.gram += (x.transpose(1, 2) @ x).double()
        self.cross += (x.transpose(1, 2) @ residual).double()
        self.input_sum += x.sum(1).double()
        self.residual_sum += residual.sum(1).double()
        self.target_sum += target.sum(1).double()
        self.residual_square += residual.double().square().sum().item()
        self.target_square += target.double().square().sum().item()

    def solve(self, ridge: float, intercept: bool) -> tuple[Tensor, Tensor]:
        """The change of the weights and the intercept."""
        if math.isinf(ridge):
            return torch.zeros_like(self.cross), torch.zeros_like(self.residual_sum)
        n = max(self.count, 1)
        gram, cross = self.gram, self.cross
        mean_x, mean_r = self.input_sum / n, self.residual_sum / n
        if intercept:
            gram = gram - n * mean_x.unsqueeze(2) * mean_x.unsqueeze(1)
            cross = cross - n * mean_x.unsqueeze(2) * mean_r.unsqueeze(1)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        penalty = ridge * diagonal.mean(1, keepdim=True).clamp_min(1e-12)
        change = torch.linalg.solve(gram + torch.diag_embed(penalty.expand_as(diagonal)), cross)
        shift = mean_r - (mean_x.unsqueeze(1) @ change).squeeze(1) if intercept else torch.zeros_like(mean_r)
        return change, shift

    def error(self, change: Tensor, shift: Tensor) -> float:
        """Sum of squares that a change leaves of the residual."""
        left = self.residual_square - 2 * (change * self.cross).sum() + (change * (self.gram @ change)).sum()
        left += self.count * shift.square().sum() - 2 * (shift * self.residual_sum).sum()
        left += 2 * (shift * (self.input_sum.unsqueeze(1) @ change).squeeze(1)).sum()
        return float(left)
