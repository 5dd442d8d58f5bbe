"""How losses of single groups add up in this network, found out by trial.

Each group's curve says what is lost when that group alone is cut. Cut together, groups lose more than the sum: blocks
that make up for each other one at a time do not when all of them are cut. How much more differs from network to
network and can't be read off the curves. So the network is cut by several ways of adding up, from "all of a few groups"
to "a little of each", each is quickly refitted, and what is lost in fact, on images that no fit has seen, decides.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..maps.batches import image_batches
from ..maps.views import random_views
from ..pruning.budget import Budget
from ..pruning.choose import sweep
from ..pruning.result import PruneReport, PruneResult
from ..recovery.closed_form import recover_layers
from ..slim.channel_groups import ChannelGroups
from ..values.curves import ValueCurves
from ..values.measured_curves import split_held_out
from .measured_loss import Yardstick

log = logging.getLogger(__name__)

POWERS = (0.6, 0.8, 1.0, 1.3, 1.7, 2.3)
IMAGES = 384  # at most: the candidates see the same ones, so differences show
LEAST_IMAGES = 16


class Tryout:
    """What a network loses that is quickly refitted, on images that no fit has seen; the same ones for all networks.

    Args:
        loader: images; at most 384 are used, and with fewer than 16 there is nothing to try (``enough``).

    Example:
        >>> tryout = Tryout(model, [torch.randn(16, 3, 32, 32)])
        >>> tryout.enough, len(tryout.fitted[0]), sum(map(len, tryout.held))     # of those held out, views as well
        (True, 12, 8)
    """

    def __init__(self, model: nn.Module, loader: Iterable):
        self.model = model
        batches = image_batches(loader, IMAGES, next(model.parameters()).device)
        self.enough = sum(map(len, batches)) >= LEAST_IMAGES
        self.fitted, self.seen = split_held_out(batches) if self.enough else ([], [])
        self.held = self.seen + [random_views(x, seed=number, share=1.0) for number, x in enumerate(self.seen)]

    @cached_property
    def yardstick(self) -> Yardstick:
        return Yardstick(self.model, self.held)

    def loss(self, result: PruneResult) -> float:
        """Refits the result's network, in place."""
        recover_layers(result.model, self.model, self.fitted, kept=result.kept_channels, joint=0, views=False)
        return self.yardstick.loss_of(result.model, recovered=True).measured


@dataclass(frozen=True)
class Trial:
    """One way of adding up, and what the network lost that was chosen by it."""

    power: float
    loss: float


def choose_power(
    model: nn.Module, curves: ValueCurves, budget: Budget, loader: Iterable, *, groups: ChannelGroups, **options: Any
) -> tuple[ValueCurves, tuple[Trial, ...]]:
    """The curves with the power by which a network of this budget loses least, and what was tried.

    Other budgets than MACs are tried at the MACs that they lead to, so that nothing is timed but the result.

    Args:
        loader: images; with fewer than 16 the curves stay as they are.
        options: of `sweep`: limits of widths, ``shorter`` for a network without some blocks.

    Example:
        >>> curves = value_curves(model, groups, loader)
        >>> more = [torch.randn(16, 3, 64, 64)]
        >>> curves, trials = choose_power(model, curves, Budget(macs=0.5), more, groups=groups)
        >>> min(trials, key=lambda trial: trial.loss).power == curves.power
        True
    """
    tryout = Tryout(model, loader)
    if not tryout.enough:
        return curves, ()
    if set(budget.asked) != {"macs"}:
        macs = sweep(model, curves, [budget], groups=groups, **options)[0].report.line("macs")
        budget = Budget(macs=macs.counted / macs.original)
    tried: dict[float, float] = {}
    known: dict[tuple, float] = {}  # widths that were tried already

    def loss(power: float) -> float:
        if power not in tried:
            result = sweep(model, curves.with_power(power), [budget], groups=groups, **options)[0]
            key = tuple(tuple(units.tolist()) for units in result.keep.values())
            if key not in known:
                known[key] = tryout.loss(result)
            tried[power] = known[key]
            log.info("losses added up by their power %.1f: the network loses %.4g", power, tried[power])
        return tried[power]

    best = POWERS.index(curves.power) if curves.power in POWERS else len(POWERS) // 2
    while True:  # downhill among the powers
        near = [place for place in (best - 1, best, best + 1) if 0 <= place < len(POWERS)]
        least = min(near, key=lambda place: loss(POWERS[place]))
        if least == best:
            break
        best = least
    trials = tuple(Trial(power, lost) for power, lost in sorted(tried.items()))
    return curves.with_power(POWERS[best]), trials


def with_trials(report: PruneReport, trials: Sequence[Trial]) -> PruneReport:
    """The report with what was tried; what it predicts is in the scale of the trial that won."""
    if not trials:
        return report
    tried = {f"{trial.power:g}": trial.loss for trial in trials}
    scale = min(tried.values()) / report.predicted_loss if report.predicted_loss else 1.0
    scaled = {
        name: value * scale
        for name in ("predicted_loss", "loss_gap", "loss_with_more")
        if (value := getattr(report, name)) is not None
    }
    return replace(report, trials=tried, **scaled)
