"""The exact search behind ``solve_knapsack``: LP bound, reduced costs, and the core of items that they leave open.

How it finds an optimum and proves it, in the order of the code; weights are whole numbers, divided by their GCD:

1. Items are taken by efficiency (value / weight) until one no longer fits: the *break solution*. That item's efficiency
   is the *price* of a unit of weight. Break value + price × room left is the LP bound: nothing is worth more.
2. Every selection is the break solution with some items *toggled*. A toggle loses ``|value - price · weight|`` of the
   LP bound, its reduced cost. Thousands of items share a weight, and among these the best are toggled first: the k-th
   also loses what the k-1 before it lose. An item that loses all that lies between bound and best selection is fixed.
3. The few items left are the *core*. Core item by core item, a list of states (weight, value) is doubled; dominated
   states, and those whose own bound does not beat the best selection, are dropped. When none is left, it is proven.
4. Where that takes long, the problem is split in two, by the number of items kept, with a better bound for each.
"""

import math

import numpy as np

from .numbers import LONGEST_WEIGHT, break_solution, float_scale, how_many_fit, scale_values, to_float

OPTIMALITY_TOLERANCE = 1e-12  # relative; far above the rounding of float64, far below what a choice of channels changes

_EASY_STATES = 2_000_000  # where so many prove nothing, splitting by count is faster
_FEE_TRIALS = 40  # to find the best fee: more than it takes
_SAME_EFFICIENCY = 1e-9  # relative; nearer ones count as equal where it only matters for the order of search
_PAIRED_ITEMS, _SINGLE_ITEMS = 96, 2048  # states are completed by pairs and single ones of so many core items
_COMPLETED_STATES = 65536  # of the longest lists, only so many of the best states


def solve_exact(values, whole, capacity, max_states):
    """The mask of an optimal selection and None, or of the best one found and an upper bound."""
    scaled, exponent = scale_values(values)
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
        self.fee, (self.taken, self.room, self.broken) = fee, break_solution(values - fee, whole, capacity)
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
    if how_many_fit(np.sort(whole), capacity) > count:
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
        self.scale, self.room, self.gap = float_scale(whole), relaxation.room, relaxation.gap
        self.least_gain, self.tolerance = least_gain, tolerance
        self.known_gain = known_value - relaxation.break_value
        gap = self.gap - self.known_gain - least_gain
        self.fee, self.spare = relaxation.fee, relaxation.spare
        weights = to_float(whole, self.scale)
        efficiency = (values - self.fee) / weights
        self.price = float(efficiency[relaxation.broken])
        loss = np.abs(values - self.fee - self.price * weights)
        items = np.flatnonzero(loss < gap)
        items = items[np.argsort(np.abs(efficiency[items] - self.price), kind="stable")]
        self.items, self.taken = items, relaxation.taken[items]
        self.efficiency, self.loss = np.maximum(efficiency[items], 0.0), loss[items]
        self.count_step = np.where(self.taken, -1, 1)
        self.weight_step, self.value_step = self.count_step * whole[items], self.count_step * values[items]
        if self.scale == 1 and whole[items].max(initial=self.room) < LONGEST_WEIGHT:
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
        room = to_float(self.room - weights, self.scale)
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
        if weights.dtype != object and max(-weights[0], weights[-1]) > LONGEST_WEIGHT:
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
