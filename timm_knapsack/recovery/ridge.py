"""Ridge regression of a conv or linear layer's weights, from sums over positions that are added up batch by batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import KnapsackError
from ..maps.gram import add_gram, cross_products, mirrored
from ..maps.patches import flat_weight

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SINGLE_INPUTS = 256  # from so many on, penalties are compared in float32
FEW_PENALTIES = (1e-3, 1e-1)  # for layers with inputs so many that a solve takes seconds; one half alone is fitted
MANY_INPUTS = 1500


def check_ridge(ridge: float | None) -> None:
    """Refuse a penalty with which there is no single best fit, as with none where inputs depend on each other.

    Example:
        >>> check_ridge(-1)
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.KnapsackError: ridge=-1: expected a number above 0, such as 1e-3, or None for ...
    """
    number = isinstance(ridge, (int, float)) and not isinstance(ridge, bool)
    if ridge is not None and not (number and 0 < ridge < math.inf):
        raise KnapsackError(
            f"ridge={ridge!r}: expected a number above 0, such as 1e-3, or None for each layer's own; where inputs "
            "depend on each other, 0 has no solution (1e-9 is as good as none)"
        )


@dataclass(frozen=True)
class Fit:
    """New weights of a layer, and how well they match the target.

    Attributes:
        weight: in the layer's own shape.
        flat: the same as [groups, inputs, outputs], float64.
        shift: one number for each output channel, to be added to the layer's output.
        error_before: share of the target's variance that is missed with the weights as they were.
        error_after: the same with the new weights.
        ridge: the penalty; infinite where no change does better on images that were not fitted.
    """

    weight: Tensor
    flat: Tensor
    shift: Tensor
    error_before: float
    error_after: float
    ridge: float


class RidgeSums:
    """Sums over positions of inputs × inputs and inputs × targets; products in float32, sums in float64.

    The regression is of the residual (target − what the layer gives now) on the inputs, and the penalty is on the
    change of the weights: with little data the layer stays as it is. Two halves of the images are summed apart, so
    that the penalty can be chosen by what a fit on one half is worth on the other.
    """

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.now = flat_weight(layer).double()
        self.halves = (_Sums(self.now), _Sums(self.now))
        self._factors: dict[float, Tensor] = {}  # of the whole Gram matrix, which other targets leave as it is
        self._whole: _Normal | None = None  # likewise
        self._half_normals: dict[int, _Normal] = {}  # of `fit_of_half`

    def add(self, x: Tensor, target: Tensor) -> None:
        """Inputs and targets (the layer's output without its bias), both [groups, positions, …], image by image."""
        middle = (x.shape[1] + 1) // 2
        for half, part in zip(self.halves, (slice(None, middle), slice(middle, None)), strict=True):
            half.add(x[:, part], target[:, part])

    def forget_targets(self) -> None:
        """Start again with other targets for the same inputs, given in the same order to `add_targets`."""
        for half in self.halves:
            half.cross.zero_()
            half.target_sum.zero_()
            half.target_square.zero_()

    def add_targets(self, x: Tensor, target: Tensor) -> None:
        middle = (x.shape[1] + 1) // 2
        for half, part in zip(self.halves, (slice(None, middle), slice(middle, None)), strict=True):
            half.add_target(x[:, part], target[:, part])

    def reduce_targets(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """As `reduce`, after `add_targets`."""
        for half in self.halves:
            for name in ("cross", "target_sum", "target_square"):
                setattr(half, name, add_up(getattr(half, name)))

    def reduce(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Add up what several processes have seen; ``add_up`` returns the sum of a tensor over all of them."""
        for half in self.halves:
            for name, value in vars(half).items():
                setattr(half, name, add_up(value))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means of x xᵀ [groups, inputs, inputs] and of x [groups, inputs] over all positions."""
        both = self.halves[0] + self.halves[1]
        count = both.count.clamp_min(1)
        return mirrored(both.gram) / count, both.input_sum / count

    @property
    def positions(self) -> int:
        return int(self.halves[0].count + self.halves[1].count)

    def fit(self, ridge: float | None, shifts: bool, fixed: Tensor | None = None) -> Fit:
        """The weights for a given penalty, or for the one that does best across the halves.

        Args:
            shifts: can the layer shift its output, by a bias or the norm behind it?
            fixed: [outputs], True for output channels that stay as they are.
        """
        whole = self._whole = _Normal(self.halves[0] + self.halves[1], self.now, shifts, known=self._whole)
        if ridge is None:
            ridge = self._best_penalty(shifts)
        change = whole.solve(ridge, self._factors)
        if fixed is not None:
            change = change.masked_fill(fixed.reshape(change.shape[0], 1, -1), 0)
        shift = whole.shift(change)
        if fixed is not None:
            shift = shift.masked_fill(fixed.reshape(shift.shape), 0)
        weight = (self.now + change).transpose(1, 2).reshape(self.layer.weight.shape)
        total = max(whole.target_variance, 1e-30)
        error = max(whole.residual + whole.gain(change), 0.0)
        before = max(whole.residual + (whole.mean_residual.square().sum().item() if shifts else 0.0), 0.0)
        flat = self.now + change
        dtype = self.layer.weight.dtype
        return Fit(weight.to(dtype), flat, shift.reshape(-1), before / total, error / total, ridge)

    def fit_of_half(self, half: int, ridge: float, shifts: bool) -> tuple[Tensor, Tensor]:
        """Weights [groups, inputs, outputs] and shift [outputs] of a fit on one half of the images, to be compared.

        Wide layers are solved in float32. What all penalties share is made once, so the sums must be complete.
        """
        if half not in self._half_normals:
            normal = _Normal(self.halves[half], self.now, shifts)
            self._half_normals[half] = normal.single() if self.now.shape[1] >= SINGLE_INPUTS else normal
        normal = self._half_normals[half]
        change = normal.solve(ridge).double()
        return self.now + change, normal.shift(change).reshape(-1)

    def _best_penalty(self, shifts: bool) -> float:
        if not self.halves[0].count or not self.halves[1].count:
            return math.inf
        many = self.now.shape[1] > MANY_INPUTS
        a, b = (_Normal(half, self.now, shifts) for half in self.halves)
        if self.now.shape[1] >= SINGLE_INPUTS:
            a, b = a.single(), b.single()
        best, least = math.inf, 0.0  # no change at all
        for ridge in FEW_PENALTIES if many else PENALTIES:
            error = b.gain(a.solve(ridge))
            if not many:
                error += a.gain(b.solve(ridge))
            if error < least:
                best, least = ridge, error
        return best


class _Sums:
    """All tensors, so that they can be added up over processes."""

    def __init__(self, now: Tensor):
        groups, inputs, outs = now.shape
        self.count = now.new_zeros(())
        self.gram = now.new_zeros(groups, inputs, inputs)
        self.cross = now.new_zeros(groups, inputs, outs)
        self.input_sum = now.new_zeros(groups, inputs)
        self.target_sum = now.new_zeros(groups, outs)
        self.target_square = now.new_zeros(())

    def __add__(self, other: "_Sums") -> "_Sums":
        result = object.__new__(_Sums)
        for name in vars(self):
            setattr(result, name, getattr(self, name) + getattr(other, name))
        return result

    def add(self, x: Tensor, target: Tensor) -> None:
        self.count += x.shape[1]
        add_gram(self.gram, x)
        self.input_sum += x.sum(1)
        self.add_target(x, target)

    def add_target(self, x: Tensor, target: Tensor) -> None:
        self.cross += cross_products(x, target)
        self.target_sum += target.sum(1)
        self.target_square += target.square().sum()


class _Normal:
    """The normal equations of the residual, as means over positions; centred where the layer can shift its output."""

    def __init__(self, sums: _Sums, now: Tensor, shifts: bool, known: "_Normal | None" = None):
        """``known``: of the same inputs and other targets; what the inputs alone decide is taken from it."""
        n = sums.count.clamp_min(1)
        cross, mean_target = sums.cross / n, sums.target_sum / n
        if known is None:
            self.mean_input = sums.input_sum / n
            self.gram = mirrored(sums.gram).div_(n)
            self.made = self.gram @ now
            if shifts:
                self.gram.sub_(self.mean_input.unsqueeze(2) * self.mean_input.unsqueeze(1))
        else:
            self.mean_input, self.gram, self.made = known.mean_input, known.gram, known.made
        self.residual = float(sums.target_square / n - 2 * (now * cross).sum() + (now * self.made).sum())
        self.cross = cross - self.made
        self.mean_residual = mean_target - (self.mean_input.unsqueeze(1) @ now).squeeze(1)
        self.target_variance = float(sums.target_square / n - mean_target.square().sum())
        self.shifts = shifts
        if shifts:
            self.cross = self.cross - self.mean_input.unsqueeze(2) * self.mean_residual.unsqueeze(1)
            self.residual -= float(self.mean_residual.square().sum())

    def single(self) -> "_Normal":
        """The same in float32, to compare penalties with."""
        self.gram, self.cross = self.gram.float(), self.cross.float()
        return self

    def solve(self, ridge: float, factors: dict[float, Tensor] | None = None) -> Tensor:
        """The change of the weights.

        Args:
            factors: Cholesky factors by penalty; looked up here, and added to.
        """
        if math.isinf(ridge):
            return torch.zeros_like(self.cross)
        factors = {} if factors is None else factors
        if ridge not in factors:
            diagonal = self.gram.diagonal(dim1=1, dim2=2)
            penalty = ridge * diagonal.mean(1, keepdim=True).clamp_min(1e-12)
            damped = self.gram + torch.diag_embed(penalty.expand_as(diagonal))
            factor, failed = torch.linalg.cholesky_ex(damped)
            if failed.any():  # a singular Gram matrix and next to no penalty: the least change of those that do as well
                return torch.linalg.pinv(damped, hermitian=True) @ self.cross
            factors[ridge] = factor
        return torch.cholesky_solve(self.cross, factors[ridge])

    def gain(self, change: Tensor) -> float:
        """By how much a change of the weights changes the mean squared residual; below 0 where it helps."""
        return float((change * (self.gram @ change)).sum() - 2 * (change * self.cross).sum())

    def shift(self, change: Tensor) -> Tensor:
        if not self.shifts:
            return torch.zeros_like(self.mean_residual)
        return self.mean_residual - (self.mean_input.unsqueeze(1) @ change).squeeze(1)
