"""Criteria: what makes a channel worth keeping, as a registry that `register_criterion` adds to.

``"abs"``   E_x Σ |w|·|∂L/∂w|   over the filter's weights: the paper's best
``"sum"``   E_x |Σ w·∂L/∂w|     Molchanov's
``"taylor_bn"``  E_x |γ·∂L/∂γ + β·∂L/∂β| of the norms behind the filters
``"magnitude"``  ‖w‖₂ of the filter; no data
``"random"``     for comparison; no data

A group's value is the sum over the convs and linears that make its channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ScoreError
from ..registry import Registry
from ..slim.channel_groups import ChannelGroups


@dataclass(frozen=True)
class Piece:
    """One slice of one group, in a parameter whose weight and gradient make its value.

    Pieces of a group that share a ``key`` are summed before the criterion's ``reduction``, others after it.
    """

    group: str
    param: str
    dim: int
    index: Tensor
    key: str


def filters(model: nn.Module, groups: ChannelGroups) -> list[Piece]:
    """The weights of the convs and linears that make the channels."""
    parameters = dict(model.named_parameters())
    pieces = [
        Piece(group.name, s.param, s.dim, s.index, s.param)
        for group in groups
        for s in group.slices
        if s.param in parameters and s.role == "out"
    ]
    return _one_for_each(groups, pieces, "conv or linear")


def norms(model: nn.Module, groups: ChannelGroups) -> list[Piece]:
    """Weight and bias of the norms behind the channels, summed together."""
    parameters = dict(model.named_parameters())
    pieces = []
    for group in groups:
        for s in group.slices:
            owner, _, leaf = s.param.rpartition(".")
            if s.param in parameters and parameters[s.param].dim() == 1 and leaf in ("weight", "bias"):
                if any("norm" in cls.__name__.lower() for cls in type(model.get_submodule(owner)).__mro__):
                    pieces.append(Piece(group.name, s.param, s.dim, s.index, owner))
    return _one_for_each(groups, pieces, "norm with weight and bias")


def _one_for_each(groups: ChannelGroups, pieces: list[Piece], what: str) -> list[Piece]:
    found = {piece.group for piece in pieces}
    empty = [group.name for group in groups if group.name not in found]
    if empty:
        raise ScoreError(f"criterion needs a {what} in every group; {empty[0]!r} has none (and {len(empty) - 1} more)")
    return pieces


@dataclass(frozen=True)
class Criterion:
    """A way to value channels: either ``measure`` of weights and gradients, or a ``compute`` of its own.

    Attributes:
        name: as in ``taylor_scores(criterion=…)``, ``--criterion`` and recipes.
        description: one line for people.
        needs_data: whether images must be given.
        needs_gradients: whether ``measure`` takes the gradient of the loss; without, it gets None.
        measure: ``measure(weight, gradient)``, element by element; it is summed over the weights of each unit.
        pieces: which weights count: ``pieces(model, groups) -> [Piece]``; `filters` or `norms`, or your own.
        reduction: applied to each of these sums, before those of different pieces are added and averaged over the data.
        compute: instead of ``measure``: ``compute(model, groups, loader, seed) -> {group name: values}``.
        curves: instead of both: ``curves(model, groups, loader, accelerator=…, data=…, progress=…)`` gives
            `GroupValues` that say what whole widths are worth, as `value_curves` does.

    Example:
        >>> squares = Criterion("squares", "E_x Σ (w·∂L/∂w)²", measure=lambda w, gradient: (w * gradient) ** 2)
        >>> squares.needs_data, squares.needs_gradients
        (True, True)
    """

    name: str
    description: str
    needs_data: bool = True
    needs_gradients: bool = True
    measure: Callable[[Tensor, Tensor | None], Tensor] | None = None
    pieces: Callable[[nn.Module, ChannelGroups], list[Piece]] = filters
    reduction: Callable[[Tensor], Tensor] = torch.abs
    compute: Callable[..., Mapping[str, Tensor]] | None = None
    curves: Callable[..., Any] | None = None

    def __post_init__(self):
        if sum(way is not None for way in (self.measure, self.compute, self.curves)) != 1:
            raise ScoreError(f"criterion {self.name!r}: give one of measure, compute and curves")
        if self.measure is not None and self.needs_gradients != self.needs_data:
            raise ScoreError(
                f"criterion {self.name!r}: a measure needs data for its gradients, or neither; for data without "
                "gradients give a compute"
            )


CRITERIA: Registry[Criterion] = Registry("criterion", ScoreError)


def register_criterion(criterion: Criterion, *, replace: bool = False) -> Criterion:
    """Add a criterion: `taylor_scores`, `prune`, the command line and recipes know it from then on, by its name.

    Args:
        replace: whether it may take the place of one with the same name.

    Example:
        >>> largest = Criterion(
        ...     "squares", "Σ w², no data", needs_data=False, needs_gradients=False, measure=lambda w, _: w.square()
        ... )
        >>> register_criterion(largest).name
        'squares'
        >>> CRITERIA.remove("squares").needs_data
        False
    """
    if not isinstance(criterion, Criterion):
        raise ScoreError(f"register_criterion takes a Criterion, got {criterion!r:.80}")
    return CRITERIA.add(criterion, replace)


# ---- the built-in ones ----------------------------------------------------------------------------------------------


def _abs(weight: Tensor, gradient: Tensor) -> Tensor:
    return (weight * gradient).abs()


def _sum(weight: Tensor, gradient: Tensor) -> Tensor:
    return weight * gradient


def _square(weight: Tensor, _) -> Tensor:
    return weight.square()


def _random(model: nn.Module, groups: ChannelGroups, loader, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {g.name: torch.rand(g.size, generator=generator, dtype=torch.float64) for g in groups}


_NO_DATA = {"needs_data": False, "needs_gradients": False}
for _criterion in (
    Criterion("abs", "E Σ|w·∂L/∂w| over the filter's weights: the paper's best", measure=_abs),
    Criterion("sum", "E |Σ w·∂L/∂w| over the filter's weights: Molchanov's", measure=_sum),
    Criterion("taylor_bn", "E |γ·∂L/∂γ + β·∂L/∂β| of the norms behind the filters", measure=_sum, pieces=norms),
    Criterion("magnitude", "‖w‖₂ of the filter; no data", measure=_square, reduction=torch.sqrt, **_NO_DATA),
    Criterion("random", "random numbers, for comparison; no data", compute=_random, **_NO_DATA),
):
    register_criterion(_criterion)
