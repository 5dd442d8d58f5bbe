"""Time that was measured, missed, and aimed at again: the loop around a solver that knows predicted times only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from ..cost import Candidate
from .network_timing import Comparison

MAX_CORRECTIONS = 4
MISS = (0.975, 1.015)  # measured ÷ asked that needs no correction
PREDICTION_ERROR = 0.015  # of the time at widths near those that were measured, one standard deviation


@dataclass(frozen=True)
class Choice:
    """A candidate, and what it takes on the device."""

    candidate: Candidate
    comparison: Comparison
    predicted: float  # ÷ asked
    bias: float  # log(measured ÷ predicted)

    def miss(self, all_choices: "Sequence[Choice]") -> float:
        """Measured ÷ asked, as far as all that was measured tells: where noise is large, the others count too."""
        return self.predicted * math.exp(bias_of(all_choices, self))

    def badness(self, all_choices: "Sequence[Choice]") -> float:
        """How far from the budget; a result that is too slow counts double."""
        miss = math.log(self.miss(all_choices))
        return abs(miss) * (2 if miss > 0 else 1)


def bias_of(choices: Sequence[Choice], own: Choice | None) -> float:
    """What to multiply predictions with, as a logarithm: each measurement counts by how certain it is.

    A measurement of other widths is at best as certain as the prediction that links them.
    """
    weights = []
    for choice in choices:
        noise = choice.comparison.uncertainty[1] / 1.96
        weights.append(1 / (noise**2 + (0 if choice is own else PREDICTION_ERROR**2) + 1e-12))
    return float(np.average([choice.bias for choice in choices], weights=weights))


def settle(
    cost,
    solve: Callable[[float], Candidate | None],
    limit: float,
    model: nn.Module,
    whole: float,
    absolute: bool,
) -> Candidate | None:
    """Solve, measure the result, correct what the search aims at, and solve again; the best choice wins.

    Args:
        cost: predicts times with ``at`` and measures them with ``compare``.
        whole: what the original takes, as predicted.
        absolute: whether the budget is a time, and not a fraction of the original's.
    """
    aim = limit
    choices: list[Choice] = []
    while len(choices) <= MAX_CORRECTIONS:
        candidate = solve(aim)
        if candidate is None:
            break
        comparison = cost.compare(model, candidate.slim)
        if comparison is None:
            return candidate
        predicted = cost.at(candidate.counts)
        measured = comparison.latencies[1].median if absolute else comparison.ratios[1] * whole
        choices.append(Choice(candidate, comparison, predicted / limit, math.log(measured / predicted)))
        miss = choices[-1].miss(choices)
        idle = predicted < aim * 0.97  # another budget, or nothing left to keep, decides
        if MISS[0] <= miss <= MISS[1] or (miss < 1 and idle):
            break
        aim = limit / math.exp(bias_of(choices, None))
    if not choices:
        return None
    best = min(choices, key=lambda choice: choice.badness(choices))
    original, slim = (latency.median for latency in best.comparison.latencies)
    return replace(
        best.candidate,
        measured={**best.candidate.measured, cost.name: (original, slim)},
        corrections=best.candidate.corrections + len(choices) - 1,
    )
