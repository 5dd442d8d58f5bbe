"""The best widths within one budget: solved for, cut, measured where a cost can be, and compared with the mask."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..channels.verification import differing
from ..costs.cost import Candidate, Cost
from ..costs.kinds import COSTS
from ..errors import BudgetError
from ..human_numbers import human
from ..slim.channel_config import model_name
from ..slim.cutting import slice_model
from ..values.group_values import GroupValues, Ladder
from .budget import Budget
from .limits import Limits
from .shortening import Shorter
from .width_search import ladder, search_widths


class OneBudget:
    """The search for the best widths within one budget.

    Attributes:
        costs: of the network as functions of its widths, those that the budget limits.
        originals: ``{cost: what the original costs}``.
        allowed: ``{cost: what the budget allows}``.
        offered: the widths of each group that limits, costs and verification leave, with their values.
        frozen: what can't be cut, and why; the search adds to it.
    """

    def __init__(self, shorter: Shorter, values: GroupValues, limits: Limits, budget: Budget):
        self.shorter, self.values, self.limits, self.budget = shorter, values, limits, budget
        self.ladders = [values.ladder(group) for group in shorter.groups]
        self.original, self.model, self.groups = shorter.original, shorter.model, shorter.groups
        self.costs, self.originals = shorter.costs(budget)
        self.allowed = budget.limits(self.originals)
        self.frozen = dict(self.groups.frozen)
        self.offered = [self._offered(number) for number in range(len(self.groups))]

    def _offered(self, number: int) -> Ladder:
        """The widths that limits and costs leave to a group."""
        group = self.groups[number]
        wanted = (int(cost.steps[number]) for cost in self.costs if cost.steps is not None)
        step = math.lcm(self.limits.step(group), *wanted)
        return ladder(self.ladders[number], *self.limits.range(group, step), step)

    def best(self) -> Candidate:
        """The best widths at which the slim network computes what the masked one does."""
        while True:
            found = self._settled(self.allowed, self.costs)
            if found is None:
                least = [rung.counts[0] for rung in self.offered]
                raise unreachable(self.model, self.originals, self.frozen, least, self.costs, self.allowed)
            wrong = differing(self.groups, self.model, found.keep)
            if not wrong:
                return found
            self.frozen.update(wrong)
            for name, reason in wrong.items():  # it keeps all its units, and the rest is chosen again
                number, size = self.groups.by_name[name], self.groups[name].size
                if self.limits.range(self.groups[name], 1)[1] < size:
                    raise BudgetError(f"bounds do not leave {name} its {size} units, but {reason}")
                self.offered[number] = self.ladders[number].only(np.array([size]))

    def _settled(self, aims: Mapping[str, float], waiting: Sequence[Cost]) -> Candidate | None:
        """Each cost in turn may measure what the others have settled on, and aim elsewhere."""
        if not waiting:
            return self._solved(aims)
        cost, *others = waiting
        return cost.settle(
            lambda aim: self._settled({**aims, cost.name: aim}, others),
            aims[cost.name],
            self.original,
            self.originals[cost.name],
            absolute=not self.budget.amounts[cost.name].fraction,
        )

    def _solved(self, aims: Mapping[str, float]) -> Candidate | None:
        solution = search_widths(self.offered, self.costs, aims)
        if solution is None:
            return None
        rungs = zip(self.groups, self.offered, solution.counts, strict=True)
        keep = {group.name: torch.from_numpy(rung.units(count)).long() for group, rung, count in rungs}
        return Candidate(solution.counts, keep, slice_model(self.model, self.groups, keep), solution)


def unreachable(
    model, originals: Mapping[str, float], reasons: Mapping[str, str], least: Sequence[int], costs, limits
) -> BudgetError:
    """What to say where not even the least widths meet a budget."""
    cost = next(cost for cost in costs if cost.at(least) > limits[cost.name])
    frozen = "; ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:4])
    asked, smallest, original = (
        f"{human(n)} {cost.unit}" if cost.unit == COSTS[cost.name].label else human(n, cost.unit)
        for n in (limits[cost.name], cost.at(least), originals[cost.name])
    )
    return BudgetError(
        f"{model_name(model)} can't be pruned to {asked}: the smallest reachable is {smallest} of {original}. Frozen: "
        f"{frozen or 'nothing'}. Ask for more, or relax min_keep, round_to, bounds and ignore"
    )
