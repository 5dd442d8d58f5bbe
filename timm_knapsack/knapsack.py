"""The 0/1 knapsack: choose the items of the largest total value whose total weight fits a capacity. Pure numpy.

How ``"exact"`` finds an optimum and proves it, in the order of the code:

1. Weights become whole numbers of one unit, without rounding (a float is a binary fraction), divided by their GCD.
2. Items are taken by efficiency (value / weight) until one no longer fits: the *break solution*. That item's efficiency
   is the *price* of a unit of weight. Break value + price × room left is the LP bound: nothing is worth more.
3. Every selection is the break solution with some items *toggled*. A toggle loses ``|value - price · weight|`` of the
   LP bound, its reduced cost. Thousands of items share a weight, and among these the best are toggled first: the k-th
   also loses what the k-1 before it lose. An item that loses all that lies between bound and best selection is fixed.
4. The few items left are the *core*. Core item by core item, a list of states (weight, value) is doubled; dominated
   states, and those whose own bound does not beat the best selection, are dropped. When none is left, it is proven.
5. Where that takes long, the problem is split in two, by the number of items kept, with a better bound for each.
"""

import math
import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .errors import BudgetError, KnapsackError

METHODS = ("exact", "dp", "greedy")
OPTIMALITY_TOLERANCE = 1e-12  # relative; far above the rounding of float64, far below what a choice of channels changes

_LONGEST_WEIGHT = 2**60  # two of them, and the room, can be added to a sum of up to twice this in int64
_FLOAT_BITS, _WIDEST_SPREAD = 512, 1500  # of whole numbers scaled to floats, which span 2**-1022 to 2**1024
_EASY_STATES = 2_000_000  # where so many prove nothing, splitting by count is worth its time
_FEE_TRIALS = 40  # to find the best fee: more than it takes
_SAME_EFFICIENCY = 1e-9  # relative; nearer ones count as equal where it only matters for the order of search
_PAIRED_ITEMS, _SINGLE_ITEMS = 96, 2048  # states are completed by pairs and single ones of so many core items
_COMPLETED_STATES = 65536  # of the longest lists, only so many of the best states


@dataclass(frozen=True, eq=False)
class Solution:
    """A selection of items and how good it is.

    Attributes:
        keep: bool array, True for each item that is kept.
        value: total value of the kept items, correctly rounded.
        weight: total weight of the kept items, never above the capacity: an int for integer weights, else a float.
        upper_bound: no selection that fits is worth more; equal to ``value`` where that is proven.
        method: the method that found it.
    """

    keep: np.ndarray
    value: float
    weight: int | float
    upper_bound: float
    method: str

    @property
    def is_optimal(self) -> bool:
        """Whether the bound proves that no selection is better, up to ``OPTIMALITY_TOLERANCE``."""
        return self.upper_bound <= self.value + OPTIMALITY_TOLERANCE * abs(self.value)


def solve_knapsack(
    values: ArrayLike,
    weights: ArrayLike,
    capacity: float,
    method: str = "exact",
    *,
    max_states: int = 50_000_000,
    max_table_bytes: int = 4 * 2**30,
) -> Solution:
    """Choose the items of the largest total value with a total weight of at most ``capacity``.

    Items of negative value are never kept, items of weight 0 and value >= 0 always; ``"exact"`` and ``"dp"`` also keep
    items of value 0 where they still fit, the lightest first. Float weights are compared without rounding: 0.1 + 0.2
    does not fit 0.3, as in Python. Measured weights are best rounded to whole units (nanoseconds) before: sums that
    are equal then count as equal, and the search is faster. Inputs are never modified; equal inputs, equal answers.

    Args:
        values: what each item is worth; finite numbers.
        weights: what each item costs; finite numbers >= 0, integers or floats.
        capacity: the largest total weight; finite, >= 0.
        method: ``"exact"``: optimal and proven, up to a relative ``OPTIMALITY_TOLERANCE`` of 1e-12 (without tolerance
            where values are whole numbers that sum to less than 1e11). Milliseconds for the channels of a network.
            ``"dp"``: Algorithm 1 of the paper, a dynamic program over items × capacity / GCD. Optimal as well; time and
            memory grow with the capacity.
            ``"greedy"``: as published with the paper: drop the least efficient item until the rest fits. Nothing is
            filled up afterwards with items that would fit; an efficient item above the capacity empties the knapsack.
        max_states: limit of ``"exact"``: how many states its search may store (4 bytes each; 50 million take about
            10 s). Only adversarial instances need as many. Then the best selection found is returned with the bound
            known so far: ``upper_bound > value``, so that ``is_optimal`` is False, says that it is not proven.
        max_table_bytes: limit of ``"dp"``: its table holds one bit for each item and unit of capacity, in bytes
            n × (C/g + 1) / 8, beside two rows of 8 × (C/g + 1). More raises ``BudgetError`` with the size needed.

    Returns:
        The ``Solution``.

    Example:
        >>> solution = solve_knapsack([6.0, 10.0, 12.0], [1, 2, 3], 5)
        >>> solution.keep.tolist(), solution.value, solution.weight, solution.upper_bound
        ([False, True, True], 22.0, 5, 22.0)
        >>> solve_knapsack([6.0, 10.0, 12.0], [1, 2, 3], 5, method="greedy").keep.tolist()
        [True, True, False]
    """
    if method not in METHODS:
        raise KnapsackError(f"method={method!r} is unknown; use one of {', '.join(map(repr, METHODS))}")
    if max_states < 1:
        raise KnapsackError(f"max_states={max_states!r} leaves no room to search; give a positive number")
    values, weights = _read_items(values, weights)
    whole, whole_capacity = _as_whole_numbers(weights, _read_capacity(capacity))

    keep = (whole == 0) & (values >= 0)
    free_value = math.fsum(values[keep].tolist())
    priced = (whole > 0) & (values > 0)
    fitting = np.flatnonzero(priced & (whole <= whole_capacity))
    reduced, reduced_capacity = _divide_by_gcd(whole[fitting], whole_capacity)
    bound = None  # of what the priced items can be worth; None where their optimum is found
    if method == "greedy":
        order = np.flatnonzero(priced)
        order = order[_by_efficiency(values[order], whole[order])]
        keep[order[: _how_many_fit(whole[order], whole_capacity)]] = True
        bound = _lp_bound(values[fitting], reduced, reduced_capacity)
    else:
        if _how_many_fit(reduced, reduced_capacity) == len(fitting):
            bought = np.ones(len(fitting), dtype=bool)
        elif method == "dp":
            bought = _solve_dp(values[fitting], reduced, reduced_capacity, max_table_bytes)
        else:
            bought, bound = _solve_exact(values[fitting], reduced, reduced_capacity, max_states)
        keep[fitting[bought]] = True
        worthless = np.flatnonzero((values == 0) & ~keep)
        worthless = worthless[np.argsort(whole[worthless], kind="stable")]
        keep[worthless[: _how_many_fit(whole[worthless], whole_capacity - int(whole[keep].sum()))]] = True

    value = math.fsum(values[keep].tolist())
    weight = math.fsum(weights[keep].tolist()) if weights.dtype.kind == "f" else sum(weights[keep].tolist())
    return Solution(keep, value, weight, value if bound is None else max(value, free_value + bound), method)


def _read_items(values, weights):
    """Checked float64 values, and weights as they are: integers of any kind, or float64."""
    values, weights = _read_numbers(values, "values", dtype=np.float64), _read_numbers(weights, "weights")
    if len(values) != len(weights):
        raise KnapsackError(f"{len(values)} values for {len(weights)} weights; give one of each for every item")
    for name, array in (("values", values), ("weights", weights)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            at = int(np.isfinite(array).argmin())
            raise KnapsackError(f"{name}[{at}] is {array[at]}; only finite numbers can be compared: mend or drop it")
    if len(weights) and weights.min() < 0:
        at = int(weights.argmin())
        raise KnapsackError(f"weights[{at}] is {weights[at]}; an item can't free capacity: give weights >= 0")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.abs(values).sum()):
            raise KnapsackError(f"values up to {np.abs(values).max():.3g} sum to more than float64 holds: scale them")
    return values, weights


def _read_numbers(numbers, name, dtype=None):
    try:
        array = np.asarray(numbers)
        if array.size == 0 or array.dtype.kind == "f":
            array = array.astype(np.float64, copy=False)
        elif array.dtype.kind == "O":  # whole numbers beyond int64 come as Python ints
            array = np.array([operator.index(number) for number in array], dtype=object)
        elif array.dtype.kind not in "biu":
            raise TypeError(f"type {array.dtype}")
        array = array if dtype is None else array.astype(dtype, copy=False)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise KnapsackError(f"{name} can't be read as numbers: {error}; give integers or floats") from error
    if array.ndim != 1:
        raise KnapsackError(f"{name} has shape {array.shape}; give one dimension with one number for every item")
    return array


def _read_capacity(capacity):
    try:
        try:
            number = operator.index(capacity)
        except TypeError:
            number = float(capacity)
    except (TypeError, ValueError) as error:
        raise BudgetError(f"capacity={capacity!r} is not a number; give the largest total weight") from error
    if isinstance(number, float) and not math.isfinite(number):
        raise BudgetError(f"capacity={number} is not finite; to keep everything give the sum of the weights")
    if number < 0:
        raise BudgetError(f"capacity={number} is negative: not even the empty selection fits; give a number >= 0")
    return number


def _as_whole_numbers(weights, capacity):
    """Weights and capacity as whole numbers of one unit, without rounding; Python ints where int64 could overflow."""
    unit = 1
    if weights.dtype.kind == "f":
        distinct, class_of = np.unique(weights, return_inverse=True)
        ratios = [weight.as_integer_ratio() for weight in distinct.tolist()]
        unit = max((bottom for _, bottom in ratios), default=1)  # all are powers of two
        weights = np.array([top * (unit // bottom) for top, bottom in ratios], dtype=object)[class_of.reshape(-1)]
    elif weights.dtype != object:
        weights = weights.astype(np.int64 if weights.sum(dtype=np.float64) < _LONGEST_WEIGHT else object)
    top, bottom = capacity.as_integer_ratio()
    return weights, top * unit // bottom  # a part of a unit can't hold anything


def _divide_by_gcd(whole, capacity):
    """Positive weights in their largest common unit: smaller numbers, and no capacity that nothing can use."""
    divisor = int(np.gcd.reduce(whole)) if len(whole) else 1
    whole = whole // divisor
    return whole.astype(np.int64) if whole.sum() < _LONGEST_WEIGHT else whole, capacity // divisor


def _how_many_fit(whole, capacity):
    """How many items fit when they are taken in this order, up to the first that does not."""
    return int(np.searchsorted(np.cumsum(whole), min(capacity, int(whole.sum())), side="right"))


def _float_scale(whole):
    """What to divide whole numbers by before they become floats: 1, or a power of two for very long ones."""
    if whole.dtype != object or not len(whole):
        return 1
    longest, shortest = int(whole.max()).bit_length(), int(whole.min()).bit_length()
    if longest - shortest > _WIDEST_SPREAD:
        raise KnapsackError(f"weights differ by a factor of 2**{longest - shortest}; give the tiny ones as 0")
    return 2 ** max(0, longest - _FLOAT_BITS)


def _to_float(whole, scale):
    return (whole / scale if scale > 1 else whole).astype(np.float64)


def _scale_values(values):
    """Values scaled exactly to at most 1, so that nothing made of them overflows or vanishes; and the exponent."""
    exponent = math.frexp(values.max(initial=0.0))[1]
    return np.ldexp(values, -exponent), exponent


def _by_efficiency(values, whole):
    efficiency = _scale_values(values)[0] / _to_float(whole, _float_scale(whole))
    return np.argsort(-efficiency, kind="stable")


def _break_solution(values, whole, capacity):
    """The mask of the items taken, the room left, and the break item; for items that don't all fit together."""
    order = _by_efficiency(values, whole)
    count = _how_many_fit(whole[order], capacity)
    taken = np.zeros(len(values), dtype=bool)
    taken[order[:count]] = True
    return taken, capacity - int(whole[taken].sum()), int(order[count])


def _lp_bound(values, whole, capacity):
    """The best value if items could be taken in part (Dantzig's bound), rounded up."""
    if _how_many_fit(whole, capacity) == len(whole):
        return math.fsum(values.tolist())
    taken, room, broken = _break_solution(values, whole, capacity)
    return (math.fsum(values[taken].tolist()) + values[broken] * (room / int(whole[broken]))) * (1 + 1e-15)


def _solve_dp(values, whole, capacity, max_table_bytes):
    """Algorithm 1 of the paper: ``best[f]`` for every capacity f, item by item, and one bit for every choice."""
    cells, row_bytes = capacity + 1, capacity // 8 + 1
    needed = len(values) * row_bytes + 16 * cells
    if needed > max_table_bytes:
        raise BudgetError(
            f"method='dp' needs {needed / 2**30:.3g} GiB for {len(values)} items × {cells} capacities, above "
            f"max_table_bytes={max_table_bytes / 2**30:.3g} GiB; use method='exact', which needs no table"
        )
    best, buffer = np.zeros(cells), np.empty(cells)
    chosen = np.empty((len(values), row_bytes), dtype=np.uint8)
    weight_of = whole.tolist()
    for item, value in enumerate(values.tolist()):
        without_item, with_item = best[weight_of[item] :], buffer[: cells - weight_of[item]]
        np.add(best[: len(with_item)], value, out=with_item)
        bits = np.packbits(with_item >= without_item)  # the first is for a capacity of the item's weight
        chosen[item, : len(bits)] = bits
        np.maximum(with_item, without_item, out=without_item)
    bought, room = np.zeros(len(values), dtype=bool), capacity
    for item in range(len(values) - 1, -1, -1):
        rest = room - weight_of[item]
        if rest >= 0 and chosen[item, rest // 8] >> (7 - rest % 8) & 1:
            bought[item], room = True, rest
    return bought


def _solve_exact(values, whole, capacity, max_states):
    """The mask of an optimal selection and None, or of the best one found and an upper bound."""
    scaled, exponent = _scale_values(values)
    plain = _Relaxation(scaled, whole, capacity)
    least_gain = tolerance = OPTIMALITY_TOLERANCE * plain.bound
    if values.max() < 2**53 and (values == np.rint(values)).all():  # then sums can't differ by less than the GCD
        step = math.ldexp(float(np.gcd.reduce(values.astype(np.int64))), -exponent)
        least_gain = max(step - tolerance, tolerance)
    selection, value, bound, stored = plain.taken, plain.break_value, plain.bound, 0
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float64 losses and bounds are infinite, as they may be
        split = _split_by_count(plain, scaled, whole, capacity)  # made only when it is needed
        for cases, limit in (((plain,), _EASY_STATES), (split, max_states)):
            unproven = []
            for relaxation in cases:
                if relaxation.break_value > value:
                    selection, value = relaxation.taken, relaxation.break_value
                core = _Core(scaled, whole, relaxation, value, least_gain, tolerance)
                toggled, case_bound, case_states = _search_core(core, min(limit, max_states) - stored)
                stored += case_states
                if toggled is not None:
                    selection = relaxation.taken.copy()
                    selection[toggled] ^= True
                    value = math.fsum(scaled[selection].tolist())
                if case_bound is not None:
                    unproven.append(relaxation.break_value + case_bound)
            if not unproven:
                return selection, None
            bound = min(bound, max(unproven))
    return selection, math.ldexp(bound + tolerance, exponent)


class _Relaxation:
    """The break solution and the LP bound if every item is charged a fee besides its weight, and ``count`` are repaid.

    With a fee above 0 it bounds what selections of at most ``count`` items are worth, below 0 of at least ``count``.
    Where values are all alike, an LP bound that counts on half an item more than fits is half an item too high. Split
    into these two cases, each with its best fee, the problem is bounded far better.
    """

    def __init__(self, values, whole, capacity, fee=0.0, count=0):
        self.fee, (self.taken, self.room, self.broken) = fee, _break_solution(values - fee, whole, capacity)
        self.break_value = math.fsum(values[self.taken].tolist())
        self.spare = count - int(self.taken.sum())
        part, worth = self.room / int(whole[self.broken]), float(values[self.broken]) - fee
        self.gap = worth * part + fee * self.spare  # between the bound and the break solution
        self.bound = self.break_value + self.gap
        self.slope = self.spare - part  # of the bound over the fee
        self.is_sound = worth > 0  # else the room is filled with items that are not worth their fee


def _split_by_count(plain, values, whole, capacity):
    """Relaxations for selections of at most the break solution's number of items, and for those of more, if any fit."""
    count = int(plain.taken.sum())
    yield _with_best_fee(values, whole, capacity, count, float(values.max()))
    if _how_many_fit(np.sort(whole), capacity) > count:
        yield _with_best_fee(values, whole, capacity, count + 1, -math.inf)


def _with_best_fee(values, whole, capacity, count, limit):
    """The relaxation with about the least bound of those with a fee between 0 and the limit."""
    trials = [_Relaxation(values, whole, capacity, 0.0, count)]
    near, far, precision = trials[0], None, 1e-6 * trials[0].gap
    towards = math.copysign(1.0, limit)
    for _ in range(_FEE_TRIALS):
        if near.slope * towards >= 0:
            break
        if far is not None:  # where the two lines meet that bound the bound from below
            fee = (far.bound - near.bound + near.slope * near.fee - far.slope * far.fee) / (near.slope - far.slope)
            if min(near.bound, far.bound) - (near.bound + near.slope * (fee - near.fee)) <= precision:
                break
        else:
            fee = (near.fee + limit) / 2 if math.isfinite(limit) else 2 * near.fee - 0.01
        trial = _Relaxation(values, whole, capacity, fee, count)
        if not trial.is_sound:
            limit = fee
            continue
        trials.append(trial)
        near, far = (trial, far) if trial.slope * towards < 0 else (near, trial)
    least = min(trial.bound for trial in trials) + precision
    return min((trial for trial in trials if trial.bound <= least), key=lambda trial: trial.gap)


class _Core:
    """The items whose toggling may pay, in the order of the search, with bounds on what the items ahead can do.

    ``weight_step`` and ``value_step`` are what toggling an item adds to a state. Of the items from position k on,
    ``add_rate[k]`` is the best efficiency that can be added, ``remove_rate[k]`` the least that can be removed, and
    ``next_loss[k]`` the least that a toggle loses of the LP bound.
    """

    def __init__(self, values, whole, relaxation, known_value, least_gain, tolerance):
        self.scale, self.room, self.gap = _float_scale(whole), relaxation.room, relaxation.gap
        self.least_gain, self.tolerance = least_gain, tolerance
        self.known_gain = known_value - relaxation.break_value
        gap = self.gap - self.known_gain - least_gain
        self.fee, self.spare = relaxation.fee, relaxation.spare
        weights = _to_float(whole, self.scale)
        efficiency = (values - self.fee) / weights
        self.price = float(efficiency[relaxation.broken])
        loss = np.abs(values - self.fee - self.price * weights)
        items = np.flatnonzero(loss < gap)
        items = items[np.argsort(np.abs(efficiency[items] - self.price), kind="stable")]
        self.items, self.taken = items, relaxation.taken[items]
        self.efficiency, self.loss = np.maximum(efficiency[items], 0.0), loss[items]
        self.count_step = np.where(self.taken, -1, 1)
        self.weight_step, self.value_step = self.count_step * whole[items], self.count_step * values[items]
        if self.scale == 1 and whole[items].max(initial=self.room) < _LONGEST_WEIGHT:
            self.weight_step = self.weight_step.astype(np.int64)
        class_of = np.unique(whole[items], return_inverse=True)[1].reshape(-1)
        rank, self.total_loss = self._losses_within_classes(class_of)
        self.total_loss += self._losses_outside_class(class_of, rank * weights[items])

        # Nearest efficiency first, and both sides in turn. Where efficiencies are equal the classes take turns: sums of
        # different weights come nearer to filling the room than multiples of one.
        order = np.lexsort((items, rank, np.floor(np.abs(efficiency[items] / self.price - 1) / _SAME_EFFICIENCY)))
        on_side = self.taken[order]
        turn = np.where(on_side, np.cumsum(on_side), np.cumsum(~on_side))
        self._select(order[np.argsort(turn, kind="stable")])
        self.fix_losers(0, gap)

    def _losses_within_classes(self, class_of):
        """Each item's rank in its class (one weight, one side), and the loss of all toggles up to that rank."""
        class_and_side = 2 * class_of + self.taken
        order = np.argsort(class_and_side, kind="stable")
        first = np.diff(class_and_side[order], prepend=-1) != 0
        start = np.flatnonzero(first)[np.cumsum(first) - 1]
        summed = np.cumsum(self.loss[order])
        rank, total = np.empty(len(order)), np.empty(len(order))
        rank[order] = np.arange(1, len(order) + 1) - start
        total[order] = summed - summed[start] + self.loss[order][start]
        return rank, total - len(order) * np.finfo(float).eps * self.loss.sum()  # minus what the sums may be off

    def _losses_outside_class(self, class_of, changed):
        """What items of other weights lose, at least, to even out the weight that their class has changed."""
        room = self.room / self.scale
        overfull = np.maximum(changed - room, 0.0)
        remove_loss = self._rate_of_other_weights(class_of, self.taken, np.inf) - self.price
        add_loss = self.price - self._rate_of_other_weights(class_of, ~self.taken, 0.0)
        removed = np.multiply(overfull, remove_loss, out=np.zeros(len(changed)), where=overfull > 0)
        return np.where(self.taken, (changed + room) * add_loss, removed)

    def _rate_of_other_weights(self, class_of, side, none):
        """For each item, the efficiency nearest to the price on that side among items of other weights."""
        rate, candidates = np.full(len(side), none), np.flatnonzero(side)
        if len(candidates):
            same = class_of == class_of[candidates[0]]
            rate[~same] = self.efficiency[candidates[0]]
            others = candidates[~same[candidates]]
            if len(others):
                rate[same] = self.efficiency[others[0]]
        return rate

    def _select(self, index):
        for name in ("items", "taken", "efficiency", "loss", "total_loss", "weight_step", "value_step", "count_step"):
            setattr(self, name, getattr(self, name)[index])

    def fix_losers(self, position, gap):
        """Drop the items from ``position`` on that lose the gap or more, and bound what the others can do."""
        stays = self.total_loss < gap
        stays[:position] = True
        self._select(stays)

        def ahead(best_of, numbers, at_the_end):
            return np.append(best_of.accumulate(numbers[::-1])[::-1], at_the_end)

        self.add_rate = ahead(np.maximum, np.where(self.taken, 0.0, self.efficiency), 0.0)
        self.remove_rate = ahead(np.minimum, np.where(self.taken, self.efficiency, np.inf), np.inf)
        self.next_loss = ahead(np.minimum, self.loss, np.inf)

    def upper_bounds(self, position, weights, values, counts):
        """What each state can become worth with the items from ``position`` on, if at least one of them is toggled."""
        room = _to_float(self.room - weights, self.scale)
        by_rate = room * np.where(room >= 0, self.add_rate[position], self.remove_rate[position])
        by_rate = np.minimum(by_rate, self.price * room - self.next_loss[position])
        return values + self.fee * (self.spare - counts) + by_rate

    def dominated(self, values, counts):
        """Which of the states, sorted by weight, are worth no more than one before them.

        In a case split by count, one that is worth about the same must also have the better count: else it could have
        left the case, and either case could drop its optimum for one that the other has dropped.
        """
        best = np.maximum.accumulate(values)
        dominated = np.zeros(len(values), dtype=bool)
        np.less_equal(values[1:], best[:-1], out=dominated[1:])
        if self.fee:
            holder = np.maximum.accumulate(np.where(dominated, 0, np.arange(len(values))))
            better_count = (counts - counts[holder]) * self.fee >= 0
            dominated &= (values < best - 0.1 * self.tolerance) | better_count
        return dominated

    def complete(self, position, weights, values, bounds):
        """The best value that one or two more toggles make of a state, that state, and the items toggled.

        It finds good selections early, so that bounds cut deep; the proof does not depend on it.
        """
        states = np.arange(len(weights))
        if len(states) > _COMPLETED_STATES:
            states = np.argpartition(-bounds, _COMPLETED_STATES)[:_COMPLETED_STATES]
        count = min(len(self.items) - position, _SINGLE_ITEMS)
        first, second = np.triu_indices(min(count, _PAIRED_ITEMS), k=1)
        first = position + np.append(first, np.arange(count))
        weight_step, value_step = self.weight_step[first], self.value_step[first]
        weight_step[: len(second)] += self.weight_step[position + second]
        value_step[: len(second)] += self.value_step[position + second]
        order = np.argsort(weight_step, kind="stable")
        best_gain = np.append(np.maximum.accumulate(value_step[order]), -np.inf)  # at -1: every step is too heavy
        fits = np.searchsorted(weight_step[order], self.room - weights[states], side="right") - 1
        completed = values[states] + best_gain[fits]
        best = int(completed.argmax())
        at = order[value_step[order[: fits[best] + 1]].argmax()] if fits[best] >= 0 else 0
        toggled = [first[at], position + second[at]] if at < len(second) else [first[at]]
        return float(completed[best]), int(states[best]), self.items[toggled].tolist()


def _search_core(core, max_states):
    """Items to toggle for a selection better than the known, or None; None if proven, else a bound; states stored."""
    weights, values, counts = np.zeros(1, dtype=core.weight_step.dtype), np.zeros(1), np.zeros(1, dtype=np.int32)
    bounds = np.array([core.gap])
    origins = []  # for each step and state: its index among the states before and, behind them, the same toggled
    best, best_path = core.known_gain, None  # the path: steps done, index as in origins, items toggled besides
    position = stored = completed_length = 0
    while len(weights) and position < len(core.items):
        if stored + 2 * len(weights) > max_states:
            return _items_on_path(core, origins, best_path), float(bounds.max()), stored
        best_before = best
        if len(weights) > 1.5 * completed_length:  # the list has grown: a better selection would cut it down
            completed_length = len(weights)
            value, state, toggled = core.complete(position, weights, values, bounds)
            if value > best:
                best, best_path = value, (position, int(origins[-1][state]) if origins else 0, toggled)
        if weights.dtype != object and max(-weights[0], weights[-1]) > _LONGEST_WEIGHT:
            weights, core.weight_step = weights.astype(object), core.weight_step.astype(object)
        weights = np.concatenate((weights, weights + core.weight_step[position]))
        values = np.concatenate((values, values + core.value_step[position]))
        counts = np.concatenate((counts, counts + core.count_step[position]))
        position += 1
        order = np.argsort(weights, kind="stable")  # merges two sorted runs, in linear time
        weights, values = weights[order], values[order]
        fitting = int(np.searchsorted(weights, core.room, side="right"))
        if fitting and values[state := int(values[:fitting].argmax())] > best:
            best, best_path = float(values[state]), (position, int(order[state]), [])
        if best > best_before:
            core.fix_losers(position, core.gap - best - core.least_gain)
        counts = counts[order]
        bounds = core.upper_bounds(position, weights, values, counts)
        stays = (bounds > best + core.least_gain) & ~core.dominated(values, counts)
        order, weights, values, counts, bounds = (a[stays] for a in (order, weights, values, counts, bounds))
        origins.append(order.astype(np.int32))
        stored += len(order)
    return _items_on_path(core, origins, best_path), None, stored


def _items_on_path(core, origins, path):
    """Walk a path back to the break solution and collect the items toggled."""
    if path is None:
        return None
    position, index, toggled = path
    while position:
        position -= 1
        states_before = len(origins[position - 1]) if position else 1
        if index >= states_before:
            toggled.append(int(core.items[position]))
            index -= states_before
        if position:
            index = int(origins[position - 1][index])
    return toggled
