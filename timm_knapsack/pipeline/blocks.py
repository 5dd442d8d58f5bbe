"""What is chosen by trial: how losses of groups add up, and which residual branches go as a whole.

The knapsack over widths knows nothing of blocks. So branches are put in order, by what the network loses without each
of them for what that saves; without the first 0, 1, 2, 4 … of them the widths of what is left are solved for, to the
same budget; each network is quickly refitted; and what it loses on images that no fit has seen decides how many go.
None is always one of the candidates: on those images, blocks are never removed where thinner layers lose less.
"""

import fnmatch
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..errors import KnapsackError
from ..maps.branches import Branch, find_branches
from ..pruning.budget import Budget
from ..pruning.choose import sweep
from ..pruning.result import PruneReport
from ..pruning.shortening import Shorter, shorten
from ..slim.channel_groups import ChannelGroups
from ..values.branch_losses import branch_losses
from ..values.curves import ValueCurves
from ..values.group_values import GroupValues
from .trials import LEAST_IMAGES, Trial, Tryout, choose_power, with_trials

log = logging.getLogger(__name__)

WORSE = 1.5  # times the least loss so far; ResNet-56 at half of its time lost 1.47 without 4 blocks, 0.75 without 8
MORE_TRIALS = 4  # between the numbers that were tried first


@dataclass(frozen=True)
class Choice:
    """What is to be cut: values of the groups of a network, which may lack some blocks.

    Attributes:
        values: of ``shorter``'s groups.
        shorter: the network to cut, and the original.
        trials: of powers.
        block_losses: of each branch that could go, alone.
        block_trials: ``{number of branches removed: what the network lost}``.
    """

    values: GroupValues | Mapping[str, Tensor]
    shorter: Shorter
    trials: tuple[Trial, ...] = ()
    block_losses: Mapping[str, float] = field(default_factory=dict)
    block_trials: Mapping[int, float] = field(default_factory=dict)

    @property
    def groups(self) -> ChannelGroups:
        return self.shorter.groups

    def noted(self, report: PruneReport) -> PruneReport:
        """The report with what was tried."""
        tried = {str(count): loss for count, loss in sorted(self.block_trials.items())}
        return replace(with_trials(report, self.trials), block_losses=dict(self.block_losses), block_trials=tried)


def choose_by_trial(
    model: nn.Module,
    values: GroupValues | Mapping[str, Tensor],
    budget: Budget,
    loader: Iterable | None,
    *,
    groups: ChannelGroups,
    blocks: bool = False,
    **options: Any,
) -> Choice:
    """Find out by trial how losses add up and, if wanted, which blocks go; without curves or images, nothing is tried.

    Args:
        loader: images that the network will be refitted with; None where it will not.
        options: of `sweep`: limits of widths.

    Example:
        >>> curves = value_curves(model, groups, loader)
        >>> images = [torch.randn(16, 3, 32, 32)]
        >>> choice = choose_by_trial(model, curves, Budget(macs=0.4), images, groups=groups, blocks=True)
        >>> len(choice.shorter.blocks) == min(choice.block_trials, key=choice.block_trials.get)
        True
    """
    whole = Shorter.of_whole(model, groups)
    if loader is None or not isinstance(values, ValueCurves):
        if blocks:
            raise KnapsackError(
                "blocks=True tries networks with and without blocks: it needs images, value curves (not scores), and "
                "recovery: prune(model, loader, budget=…, blocks=True)"
            )
        return Choice(values, whole)
    values, trials = choose_power(model, values, budget, loader, groups=groups, **options)
    choice = Choice(values, whole, trials)
    return _BlockSearch(choice, budget, loader, options).run() if blocks else choice


class _BlockSearch:
    def __init__(self, choice: Choice, budget: Budget, loader: Iterable, options: Mapping[str, Any]):
        self.start, self.budget, self.loader, self.options = choice, budget, loader, options
        self.model, self.groups = choice.shorter.original, choice.groups
        self.tryout = Tryout(self.model, loader)
        if not self.tryout.enough:
            raise KnapsackError(f"blocks=True tries networks on images: it needs at least {LEAST_IMAGES} of them")
        self.tried: dict[int, float] = {}
        if choice.trials and set(budget.asked) == {"macs"}:  # that network was tried, refitted on the same images
            self.tried[0] = min(trial.loss for trial in choice.trials)
        self.most = 0  # branches that may go: with more gone, there would be room left in the budget

    def run(self) -> Choice:
        self.all, refused = find_branches(self.model, self.tryout.fitted[0])
        free = [branch for branch in self.all if not self._is_kept(branch)]
        if not free:
            why = "; ".join(f"{block}: {reason}" for block, reason in list(refused.items())[:3])
            warnings.warn(f"blocks=True: no block can go as a whole ({why or 'there is none'})", stacklevel=4)
            return self.start
        losses = branch_losses(self.model, free, self.tryout.seen)
        saved = self._savings(free)
        self.order = sorted(free, key=lambda branch: losses[branch.name] / max(saved[branch.name], 1e-12))
        self.most = len(self.order)
        count = self._best_count()
        choice = replace(self.start, block_losses=losses, block_trials=self.tried)
        if not count:
            return choice
        shorter = self._shorter(count, "auto")
        values, trials = choose_power(
            self.model, self._values(shorter), self.budget, self.loader, groups=shorter.groups, shorter=shorter,
            **self.options,
        )  # fmt: skip
        return replace(choice, values=values, shorter=shorter, trials=trials)

    def _is_kept(self, branch: Branch) -> bool:
        """Layers that a user wants left alone, or given a least width, stay where they are."""
        ignore = self.options.get("ignore") or ()
        patterns = [*((ignore,) if isinstance(ignore, str) else ignore), *(self.options.get("bounds") or {})]
        return any(
            fnmatch.fnmatchcase(layer, pattern) for layer in (*branch.layers, branch.name) for pattern in patterns
        )

    def _savings(self, branches: Sequence[Branch]) -> dict[str, float]:
        """The share of what is limited that goes with each branch: of time where a table tells, else of the MACs."""
        costs, whole = self.start.shorter.costs(self.budget)
        sizes, numbers = self.groups.sizes, range(len(self.groups))
        macs = self.groups.macs()
        result = {}
        for branch in branches:
            lost = sum(term.at(sizes) for term in self.groups.terms if _inside(term.module, branch.removed)) / macs
            shares = []
            for cost in costs:
                shorter = cost.shortened(branch.removed, numbers, sizes)
                shares.append(lost if shorter is None else 1 - shorter.at(sizes) / whole[cost.name])
            result[branch.name] = sum(shares) / len(shares)
        return result

    def _shorter(self, count: int, verify: str) -> Shorter:
        return shorten(self.model, self.groups, self.order[:count], self.all, verify=verify)

    def _values(self, shorter: Shorter) -> ValueCurves:
        curves = self.start.values
        left = shorter.values_of(curves)
        return ValueCurves(left, model=curves.model, data=curves.data, samples=curves.samples, power=curves.power)

    def _loss(self, count: int) -> float:
        """What the network loses without the first so many branches; infinite where it can't be had."""
        if count not in self.tried:
            try:
                shorter = self._shorter(count, "none")
                result = sweep(self.model, self._values(shorter), [self.budget], shorter=shorter, **self.options)[0]
                if all(len(result.keep[group.name]) == group.size for group in shorter.groups):
                    self.most = min(self.most, count)
                self.tried[count] = self.tryout.loss(result)
            except KnapsackError as error:
                log.info("without %d blocks: %s", count, error)
                self.tried[count] = float("inf")
            log.info("without %d blocks the network loses %.4g", count, self.tried[count])
        return self.tried[count]

    def _best_count(self) -> int:
        """0, 1, 2, 4 … until it has become clearly worse twice; then between the numbers around the best."""
        count = worse = 0
        while worse < 2:
            best = min(self.tried.values(), default=float("inf"))
            worse = worse + 1 if self._loss(count) > WORSE * best else 0
            if count >= self.most:
                break
            count = min(max(1, 2 * count), self.most)
        for _ in range(MORE_TRIALS):
            counts = sorted(self.tried)
            at = counts.index(self._best())
            around = [(counts[at] + counts[near]) // 2 for near in (at + 1, at - 1) if 0 <= near < len(counts)]
            new = next((n for n in around if n not in self.tried and n <= self.most), None)
            if new is None:
                break
            self._loss(new)
        return self._best()

    def _best(self) -> int:
        return min(self.tried, key=lambda count: (self.tried[count], count))


def _inside(module: str, removed: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{gone}.") for gone in removed)
