"""How many units of each group to keep: the knapsack, re-costed at the widths it leads to.

Units of one group cost the same, so which n of them stay is the values' affair: a choice is a vector of counts. The
true cost is a product of widths, not a sum over units. So: linearise it at the current widths, solve the knapsack
exactly, move the widths towards the solution, and again, until the true cost of the solution fits the budget. What room
is then left is filled with the best units that still fit. Where one step of a group is a good part of the budget
(half of a residual stream), the slope at the current widths says little about it: such steps are tried one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..costs.cost import Cost
from ..knapsack.solve import solve_knapsack
from ..values.group_values import Ladder

MAX_ROUNDS = 40
WIDE = 0.005  # of a budget: a step that takes more is tried both ways at the end
NEARLY = 1.1  # a solution this near to the budget is worth trimming to fit; one farther off only shows the way


@dataclass(frozen=True)
class WidthSolution:
    counts: list[int]
    value: float
    upper_bound: float  # of the knapsack as linearised in the last round
    rounds: int


def ladder(whole: Ladder, least: int, most: int, step: int) -> Ladder:
    """The counts from ``least`` to ``most`` in multiples of ``step``; the group's own size counts as a multiple."""
    size = len(whole.order)
    counts = [n for n in whole.counts.tolist() if least <= n <= most and (n % step == 0 or n == size)]
    if not counts:
        counts = [n for n in whole.counts.tolist() if n <= most][-1:]
    if len(counts) > 1 and counts[-1] == size and size % step and step > 1:
        del counts[-2]  # a last step smaller than the others would look cheap for its value
    return whole.only(np.array(counts))


def search_widths(
    ladders: Sequence[Ladder], costs: Sequence[Cost], limits: Mapping[str, float]
) -> WidthSolution | None:
    """The most valuable counts whose true costs are within the limits, or None if even the least do not fit."""
    least = np.array([rung.counts[0] for rung in ladders], dtype=float)
    most = np.array([rung.counts[-1] for rung in ladders], dtype=float)
    if any(cost.at(least) > limits[cost.name] for cost in costs):
        return None
    if all(cost.at(most) <= limits[cost.name] for cost in costs):
        value = float(sum(rung.value[-1] for rung in ladders))
        return WidthSolution([int(n) for n in most], value, value, 0)
    best, best_value, bound, stalled = least, _value(ladders, least), np.inf, 0
    here = most
    for rounds in range(1, MAX_ROUNDS + 1):  # noqa: B007
        there, bound = _solve_linearised(ladders, costs, limits, here)
        if max(cost.at(there) / limits[cost.name] for cost in costs) < NEARLY:
            fitting = _shrunk_to_fit(ladders, costs, limits, there)
            fitting = least if fitting is None else fitting  # slopes of zero where the true cost is too high
            value = _value(ladders, fitting)
            stalled = 0 if value > best_value * (1 + 1e-6) else stalled + 1
            if value > best_value:
                best, best_value = fitting, value
        if np.array_equal(there, here) or stalled >= 4:
            break
        here = _moved(here, there)
    best = _exchanged(ladders, costs, limits, _filled(ladders, costs, limits, best))
    value = _value(ladders, best)
    for cost in costs if len(costs) > 1 else ():  # the widths for one cost may meet the others as well
        alone = search_widths(ladders, [cost], limits)
        if alone.value > value and _fits(costs, limits, alone.counts):
            best, value = alone.counts, alone.value
    return WidthSolution([int(n) for n in best], value, float(max(bound, value)), rounds)


def _solve_linearised(ladders, costs, limits, here) -> tuple[np.ndarray, float]:
    """The knapsack at the marginal costs of the widths ``here``; with several costs, its LP relaxation rounded down."""
    owner, height, value = [], [], []
    for g, rung in enumerate(ladders):
        steps = len(rung.counts) - 1
        owner.append(np.full(steps, g))
        height.append(np.diff(rung.counts))
        value.append(np.diff(rung.value))
    owner, height, value = (np.concatenate(parts) for parts in (owner, height, value))
    least = np.array([rung.counts[0] for rung in ladders], dtype=float)
    weights, room = [], []
    for cost in costs:
        slope = cost.marginal(here)
        weights.append(slope[owner] * height)
        at_least = cost.at(here) + slope @ (least - here)
        room.append(limits[cost.name] - at_least)
    base = sum(rung.value[0] for rung in ladders)
    if min(room) < 0:  # the linearised cost overshoots even at the least widths; walk towards them
        return least, np.inf
    if len(costs) == 1:
        solution = solve_knapsack(value, weights[0], room[0])
        keep, bound = solution.keep, solution.upper_bound
    else:
        from scipy.optimize import linprog

        relaxed = linprog(-value, A_ub=np.stack(weights), b_ub=room, bounds=(0, 1), method="highs")
        keep, bound = relaxed.x > 1 - 1e-9, -relaxed.fun
    counts = least + np.bincount(owner[keep], weights=height[keep], minlength=len(ladders))
    return np.array([_down(rung, n) for rung, n in zip(ladders, counts, strict=True)], dtype=float), base + bound


def _moved(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Half of the way, as the slopes hold near ``here`` only; the last step whole."""
    return there if np.abs(there - here).max() <= 1 else (here + there) / 2


def _down(rung: Ladder, count: float) -> int:
    return int(rung.counts[np.searchsorted(rung.counts, count + 1e-9, side="right") - 1])


def _value(ladders, counts) -> float:
    return float(sum(rung.value[np.searchsorted(rung.counts, n)] for rung, n in zip(ladders, counts, strict=True)))


def _fits(costs, limits, counts) -> bool:
    return all(cost.at(counts) <= limits[cost.name] for cost in costs)


def _exchanged(ladders, costs, limits, counts) -> np.ndarray:
    """Take a wide step up or down in one group and let the others make room or use it, as long as that gains value."""
    while True:
        value = _value(ladders, counts)
        best, best_value = None, value + 1e-9 * abs(value)
        slopes = sum(cost.marginal(counts) / limits[cost.name] for cost in costs)
        for g, rung in enumerate(ladders):
            at = int(np.searchsorted(rung.counts, counts[g]))
            for to in (at - 1, at + 1):
                if not 0 <= to < len(rung.counts) or slopes[g] * abs(rung.counts[to] - rung.counts[at]) < WIDE:
                    continue
                moved = counts.copy()
                moved[g] = rung.counts[to]
                moved = _shrunk_to_fit(ladders, costs, limits, moved, held=g)
                if moved is None:
                    continue
                moved = _filled(ladders, costs, limits, moved, held=g)
                value = _value(ladders, moved)
                if value > best_value:
                    best, best_value = moved, value
        if best is None:
            return counts
        counts = _filled(ladders, costs, limits, best)  # the moved group may have room again


def _shrunk_to_fit(ladders, costs, limits, counts, held: int | None = None) -> np.ndarray | None:
    """Remove the units of least value for their cost, until the true costs fit; None if they never do."""
    counts = counts.copy()
    while not _fits(costs, limits, counts):
        excess = max(cost.at(counts) / limits[cost.name] for cost in costs)
        slopes = sum(cost.marginal(counts) / limits[cost.name] for cost in costs if cost.at(counts) > limits[cost.name])
        ranked = []
        for g, rung in enumerate(ladders):
            at = np.searchsorted(rung.counts, counts[g])
            if at > 0 and slopes[g] > 0 and g != held:
                loss = rung.value[at] - rung.value[at - 1]
                ranked.append((loss / (slopes[g] * (rung.counts[at] - rung.counts[at - 1])), g, at))
        if not ranked:
            return None
        ranked.sort()
        many = max(1, int(len(ranked) * min(0.5, (excess - 1) * 2)))  # far from fitting: several groups at once
        for _, g, at in ranked[:many]:
            counts[g] = ladders[g].counts[at - 1]
    return counts


def _filled(ladders, costs, limits, counts, held: int | None = None) -> np.ndarray:
    """Add the units that are worth most for what they cost, as long as one fits."""
    counts = counts.copy()
    blocked = set() if held is None else {held}
    while True:
        slopes = sum(cost.marginal(counts) / limits[cost.name] for cost in costs)
        best, best_rate = None, -1.0
        for g, rung in enumerate(ladders):
            if g in blocked:
                continue
            at = int(np.searchsorted(rung.counts, counts[g]))
            if at + 1 >= len(rung.counts):
                blocked.add(g)
                continue
            height = rung.counts[at + 1] - rung.counts[at]
            rate = (rung.value[at + 1] - rung.value[at]) / max(slopes[g] * height, 1e-300)
            if rate > best_rate:
                best, best_rate, best_count = g, rate, rung.counts[at + 1]
        if best is None:
            return counts
        before = counts[best]
        counts[best] = best_count
        if not _fits(costs, limits, counts):
            counts[best] = before
            blocked.add(best)
