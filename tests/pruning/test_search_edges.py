"""Each step of the search over widths by its definition: moves, fills, exchanges, and when it ends."""

import itertools

import numpy as np
import pytest
from test_width_search import alone, chain, check, ladder, linear

from timm_knapsack.costs.counted import ProductCost
from timm_knapsack.pruning import width_search
from timm_knapsack.pruning.width_search import search_widths
from timm_knapsack.slim.channel_groups import CostTerm, Count
from timm_knapsack.values.group_values import Ladder


def rungs(counts, values) -> Ladder:
    return Ladder(np.array(counts), np.array(values, dtype=float), np.arange(max(counts)))


# ---- what a group offers


@pytest.mark.parametrize(
    "size, least, most, step, counts",
    [
        (8, 1, 8, 3, [3, 8]),  # 6 → 8 would be a small step
        (8, 1, 7, 3, [3, 6]),
        (9, 1, 9, 3, [3, 6, 9]),
        (8, 3, 8, 1, [3, 4, 5, 6, 7, 8]),
        (8, 8, 8, 3, [8]),
        (8, 4, 5, 3, [5]),  # none of its counts lies there: the largest that is allowed
        (8, 7, 8, 4, [8]),
        (5, 2, 5, 4, [5]),
        (7, 1, 7, 6, [7]),
        (2, 1, 2, 1, [1, 2]),
        (2, 1, 2, 2, [2]),
        (3, 1, 3, 2, [3]),
        (5, 1, 5, 2, [2, 5]),
    ],
)
def test_counts_that_are_offered(size, least, most, step, counts):
    rung = ladder(np.arange(size, dtype=float), least, most, step)
    assert rung.counts.tolist() == counts and len(rung.value) == len(counts) and len(rung.order) == size
    assert all(rung.value[i] == sum(range(size)[::-1][:n]) for i, n in enumerate(counts))


def test_a_ladder_of_two_steps_keeps_both_where_the_last_is_whole():
    whole = rungs([2, 4, 5], [1, 2, 3])
    whole = Ladder(whole.counts, whole.value, np.arange(5))
    assert width_search.ladder(whole, 1, 5, 2).counts.tolist() == [2, 5]
    assert width_search.ladder(whole, 1, 5, 1).counts.tolist() == [2, 4, 5]
    assert width_search.ladder(Ladder(np.array([5]), np.array([3.0]), np.arange(5)), 1, 5, 2).counts.tolist() == [5]


# ---- steps


@pytest.mark.parametrize(
    "here, there, moved",
    [([8, 8], [4, 8], [6, 8]), ([8, 8], [7, 7], [7, 7]), ([8, 8], [9, 7], [9, 7]), ([8, 8], [6.9, 8], [7.45, 8]),
     ([4, 4], [8, 1], [6, 2.5])],
)  # fmt: skip
def test_half_of_the_way_and_the_last_step_whole(here, there, moved):
    assert width_search._moved(np.array(here, float), np.array(there, float)).tolist() == moved


def test_down_to_the_next_count_that_is_offered():
    rung = rungs([2, 4, 8], [1, 2, 3])
    asked = (2, 3.9, 4, 4 - 1e-10, 4 - 1e-8, 7.9, 8, 100)
    assert [width_search._down(rung, n) for n in asked] == [2, 2, 4, 4, 2, 4, 8, 8]
    assert width_search._value([rung, rung], [2, 8]) == 4.0


def test_what_fits_fits_to_the_last_unit():
    cost = alone([3, 5])
    assert width_search._fits([cost], {"macs": 8}, [1, 1]) and not width_search._fits([cost], {"macs": 7.999}, [1, 1])


def slow_shrunk(ladders, costs, limits, counts, held):
    """One rung at a time, that of least value for its cost; only where the excess is small enough for that."""
    counts = [int(n) for n in counts]
    while not all(cost.at(counts) <= limits[cost.name] for cost in costs):
        slopes = sum(cost.marginal(counts) / limits[cost.name] for cost in costs
                     if cost.at(counts) > limits[cost.name])  # fmt: skip
        best = None
        for g, rung in enumerate(ladders):
            at = list(rung.counts).index(counts[g])
            if at and g != held and slopes[g] > 0:
                rate = (rung.value[at] - rung.value[at - 1]) / (slopes[g] * (rung.counts[at] - rung.counts[at - 1]))
                best = min(best, (rate, g, at)) if best else (rate, g, at)
        if best is None:
            return None
        counts[best[1]] = ladders[best[1]].counts[best[2] - 1]
    return counts


def slow_filled(ladders, costs, limits, counts, held):
    """The rung of most value for its cost that fits, again and again; one that did not fit is not asked again."""
    counts, blocked = [int(n) for n in counts], {held}
    while True:
        slopes = sum(cost.marginal(counts) / limits[cost.name] for cost in costs)
        best = None
        for g, rung in enumerate(ladders):
            at = list(rung.counts).index(counts[g])
            if g in blocked or at + 1 == len(rung.counts):
                continue
            rate = (rung.value[at + 1] - rung.value[at]) / max(
                slopes[g] * (rung.counts[at + 1] - rung.counts[at]), 1e-300
            )
            if best is None or rate > best[0]:
                best = rate, g, at
        if best is None:
            return counts
        _, g, at = best
        counts[g] = ladders[g].counts[at + 1]
        if not all(cost.at(counts) <= limits[cost.name] for cost in costs):
            counts[g] = ladders[g].counts[at]
            blocked.add(g)


def random_problems(count, seed=0, groups=4, size=7):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ladders = []
        for _ in range(groups):
            offered = np.sort(rng.choice(np.arange(1, size + 1), rng.integers(1, size), replace=False))
            ladders.append(rungs(offered, np.cumsum(rng.lognormal(0, 1, len(offered)))))
        costs = [chain(name, [size] * groups, rng.integers(1, 30, groups).tolist(), int(rng.integers(0, 20)))
                 for name in ("macs", "params")[: rng.integers(1, 3)]]  # fmt: skip
        most = [rung.counts[-1] for rung in ladders]
        counts = np.array([rng.choice(rung.counts) for rung in ladders], dtype=float)
        yield rng, ladders, costs, most, counts


def test_near_the_budget_it_shrinks_by_the_least_valuable_rung():
    for rng, ladders, costs, _, counts in random_problems(300):
        limits = {cost.name: cost.at(counts) / rng.uniform(1.001, 1.1) for cost in costs}
        held = rng.choice([None, 0, 1])
        before = counts.copy()
        found = width_search._shrunk_to_fit(ladders, costs, limits, counts, held)
        expected = slow_shrunk(ladders, costs, limits, counts, held)
        assert (found is None) == (expected is None) and (found is None or found.tolist() == expected)
        assert (counts == before).all()  # the caller's stay


def test_far_from_the_budget_several_go_at_once():
    """Of six that are all as dear: at twice the budget half of them, at 1.21 times the two of least value."""
    fits = width_search._fits
    for excess, gone in ((2.0, 3), (1.5, 3), (1.34, 3), (1.21, 2), (1.1, 1), (1.01, 1)):
        ladders, fitted = [rungs([1, 2], [0, 1 + g]) for g in range(6)], []

        def noted(costs, limits, counts, fitted=fitted):
            fitted.append(counts.copy())
            return fits(costs, limits, counts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(width_search, "_fits", noted)
            width_search._shrunk_to_fit(ladders, [alone([1] * 6)], {"macs": 12 / excess}, np.full(6, 2.0))
        assert (fitted[1] == 1).sum() == gone and (fitted[1][:gone] == 1).all(), excess


def test_it_fills_by_value_for_cost_and_asks_none_twice():
    for rng, ladders, costs, most, _ in random_problems(300, seed=1):
        least = np.array([rung.counts[0] for rung in ladders], dtype=float)
        limits = {cost.name: rng.uniform(cost.at(least), cost.at(most)) + 1 for cost in costs}
        held = rng.choice([None, 0, 1])
        found = width_search._filled(ladders, costs, limits, least, held)
        assert found.tolist() == slow_filled(ladders, costs, limits, least, held)
        assert held is None or found[held] == least[held]


def test_rungs_that_cost_nothing_are_taken_and_tiny_costs_are_no_zeros():
    ladders = [rungs([1, 2], [0, 1]), rungs([1, 2], [0, 1])]
    free = linear("macs", 0, 1)
    assert width_search._filled(ladders, [free], {"macs": 1}, np.ones(2)).tolist() == [2, 1]
    tiny = linear("macs", 1e-9, 2e-9)  # which of the two is dearer still counts
    assert width_search._filled(ladders, [tiny], {"macs": 4.1e-9}, np.ones(2)).tolist() == [2, 1]
    worthless = [rungs([1, 2], [0, 0]), rungs([1, 2], [0, 0])]
    assert width_search._filled(worthless, [linear("macs", 1, 1)], {"macs": 4}, np.ones(2)).tolist() == [2, 2]


def test_exchanges_try_every_wide_step_both_ways_and_end_where_none_gains():
    gained = 0
    for rng, ladders, costs, most, _ in random_problems(60, seed=2, groups=3, size=5):
        least = np.array([rung.counts[0] for rung in ladders], dtype=float)
        limits = {cost.name: rng.uniform(cost.at(least), cost.at(most)) + 1 for cost in costs}
        start = width_search._filled(ladders, costs, limits, least)
        found = width_search._exchanged(ladders, costs, limits, start)
        assert all(cost.at(found) <= limits[cost.name] for cost in costs)
        value = width_search._value(ladders, found)
        assert value >= width_search._value(ladders, start) - 1e-9
        gained += value > width_search._value(ladders, start) + 1e-9
        slopes = sum(cost.marginal(found) / limits[cost.name] for cost in costs)
        for g, rung in enumerate(ladders):  # no single step, up or down, with the others making room, is worth more
            at = list(rung.counts).index(found[g])
            for to in (at - 1, at + 1):
                if not 0 <= to < len(rung.counts) or slopes[g] * abs(rung.counts[to] - rung.counts[at]) < 0.005:
                    continue
                moved = found.copy()
                moved[g] = rung.counts[to]
                moved = width_search._shrunk_to_fit(ladders, costs, limits, moved, held=g)
                if moved is not None:
                    moved = width_search._filled(ladders, costs, limits, moved, held=g)
                    assert width_search._value(ladders, moved) <= value * (1 + 1e-9)
    assert gained > 3


def test_a_step_that_is_a_small_part_of_the_budget_is_not_exchanged(monkeypatch):
    tried = []
    shrunk = width_search._shrunk_to_fit
    monkeypatch.setattr(width_search, "_shrunk_to_fit", lambda *a, **k: tried.append(k["held"]) or shrunk(*a, **k))
    ladders = [rungs([1, 2, 3], [0, 1, 2]) for _ in range(3)]
    cost = linear("macs", 6, 5, 4.99)  # of 1000: 0.6 %, 0.5 % and a little less
    width_search._exchanged(ladders, [cost], {"macs": 1000}, np.full(3, 2.0))
    assert set(tried) == {0, 1}


# ---- the linearised problem


def test_the_linearised_problem_is_a_knapsack_of_rungs_at_the_slopes_of_here():
    for rng, ladders, costs, most, here in random_problems(80, seed=3, groups=3, size=4):
        cost = costs[0]
        least = np.array([rung.counts[0] for rung in ladders], dtype=float)
        limit = rng.uniform(cost.at(least), cost.at(most)) + 1
        slope = cost.marginal(here)
        there, bound = width_search._solve_linearised(ladders, [cost], {"macs": limit}, here)
        room = limit - (cost.at(here) + slope @ (least - here))
        base = sum(rung.value[0] for rung in ladders)
        if room < 0:
            assert (there == least).all() and bound == np.inf
            continue
        steps = [(g, rung.counts[i + 1] - rung.counts[i], rung.value[i + 1] - rung.value[i])
                 for g, rung in enumerate(ladders) for i in range(len(rung.counts) - 1)]  # fmt: skip
        best = 0.0
        for chosen in itertools.product((0, 1), repeat=len(steps)):
            if sum(slope[g] * h for (g, h, _), c in zip(steps, chosen, strict=True) if c) <= room:
                best = max(best, sum(v for (_, _, v), c in zip(steps, chosen, strict=True) if c))
        assert bound == pytest.approx(base + best)
        assert all(n in rung.counts for n, rung in zip(there, ladders, strict=True))


def test_no_room_at_all_is_room_for_the_least():
    ladders = [rungs([1, 2], [1, 2])]
    there, bound = width_search._solve_linearised(ladders, [linear("macs", 3)], {"macs": 3}, np.array([2.0]))
    assert there.tolist() == [1] and bound == 1
    there, bound = width_search._solve_linearised(ladders, [linear("macs", 3)], {"macs": 3.5}, np.array([2.0]))
    assert there.tolist() == [1] and bound == 1


# ---- the whole search


def test_everything_or_nothing():
    ladders = [rungs([1, 2], [1, 2])]
    cost = linear("macs", 3)
    whole = search_widths(ladders, [cost], {"macs": 6})
    assert (whole.counts, whole.value, whole.upper_bound, whole.rounds) == ([2], 2.0, 2.0, 0)
    least = search_widths(ladders, [cost], {"macs": 3})
    assert (least.counts, least.value) == ([1], 1.0) and least.upper_bound >= 1
    assert search_widths(ladders, [cost], {"macs": 2.999}) is None


def test_values_that_are_all_zero_end_soon_and_leave_no_room():
    ladders = [rungs([1, 2, 3, 4], [0, 0, 0, 0]) for _ in range(4)]
    cost = chain("macs", [4] * 4, [5] * 4)
    limits = {"macs": cost.at([4] * 4) * 0.5}
    solution = search_widths(ladders, [cost], limits)
    assert solution.value == 0 and cost.at(solution.counts) <= limits["macs"] and solution.rounds <= 5


def test_a_search_that_gains_nothing_for_four_rounds_ends(monkeypatch):
    """Each round goes half of the way; the widths that it offers may circle for ever."""
    ladders = [rungs([1, 2, 3, 4], [1, 2, 3, 4]) for _ in range(2)]
    cost = linear("macs", 1, 1)
    turns = itertools.cycle([np.array([1.0, 4.0]), np.array([4.0, 1.0])])
    seen = []
    monkeypatch.setattr(width_search, "_solve_linearised", lambda *a: (seen.append(a[3]) or next(turns), 99.0))
    solution = search_widths(ladders, [cost], {"macs": 5})
    assert solution.rounds == len(seen) == 5 and solution.value == 5 and solution.upper_bound == 99
    assert seen[0].tolist() == [4, 4] and seen[1].tolist() == [2.5, 4]


def test_a_solution_far_above_the_budget_only_shows_the_way(monkeypatch):
    ladders = [rungs([1, 2, 3, 4], [1, 2, 3, 4]) for _ in range(2)]
    cost = linear("macs", 1, 1)
    for there, tried in (([3, 3], True), ([4, 3], True), ([4, 4], False)):
        shrunk = []
        with monkeypatch.context() as patch:
            patch.setattr(width_search, "_solve_linearised", lambda *a, t=there: (np.array(t, dtype=float), 8.0))
            patch.setattr(width_search, "_shrunk_to_fit", lambda *a, s=shrunk, **k: s.append(a[3].tolist()) or a[3])
            patch.setattr(width_search, "_exchanged", lambda *a: np.array([3.0, 3.0]))
            search_widths(ladders, [cost], {"macs": 6.5})
        assert (there in shrunk) == tried, there  # 6, 7 and 8 of 6.5: up to 1.1 times


def test_the_widths_for_one_cost_are_taken_where_they_meet_the_others_and_are_worth_more(monkeypatch):
    ladders = [rungs([1, 2, 3], [0, 1, 2]) for _ in range(2)]
    a, b = linear("a", 2, 1), linear("b", 1, 2)
    limits = {"a": 6, "b": 6}
    least = np.array([1.0, 1.0])
    for name in ("_filled", "_exchanged"):
        monkeypatch.setattr(width_search, name, lambda *args, **_: least)
    monkeypatch.setattr(width_search, "_solve_linearised", lambda *args: (least, 0.0))
    real = width_search.search_widths

    def answer(counts, value):
        found = width_search.WidthSolution(counts, value, value, 1)
        monkeypatch.setattr(width_search, "search_widths", lambda ladders, costs, limits: found)
        return real(ladders, [a, b], limits)

    better = answer([2, 2], 2.0)  # 6 and 6: it meets both
    assert better.counts == [2, 2] and better.value == better.upper_bound == 2
    assert answer([3, 2], 3.0).counts == [1, 1] and answer([1, 1], -1.0).counts == [1, 1]


def test_random_networks_with_one_and_two_costs_hold_all_that_a_solution_says():
    for rng, ladders, costs, most, _ in random_problems(150, seed=4):
        least = [rung.counts[0] for rung in ladders]
        limits = {cost.name: rng.uniform(cost.at(least), cost.at(most)) for cost in costs}
        solution = search_widths(ladders, costs, limits)
        check(solution, ladders, costs, limits)
        assert all(type(n) is int for n in solution.counts)
        assert (solution.rounds == 0) == (solution.counts == most) or solution.rounds <= width_search.MAX_ROUNDS


def test_what_is_fixed_counts_against_the_budget():
    terms = [CostTerm("fixed", 100, ()), CostTerm("a", 1, (Count(0, ((0, 1),)),))]
    cost = ProductCost("macs", "macs", terms, 1)
    assert search_widths([rungs([1, 2, 3], [1, 2, 3])], [cost], {"macs": 102}).counts == [2]
