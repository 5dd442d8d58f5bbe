"""The search over widths against brute force: always within the limits, and how near it comes to the true optimum.

With one unit at a time and true costs that are products, the search is a heuristic with no proof. What is tested is
that its value is within ``GAP`` of the optimum for tiny networks of at most 4 groups × 6 units, where one unit is a
large part of everything, and much nearer on average; for real networks `benchmarks/objective.py` gives the bound.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from timm_knapsack.costs.counted import ProductCost
from timm_knapsack.pruning import width_search
from timm_knapsack.pruning.width_search import search_widths
from timm_knapsack.slim.channel_groups import ChannelGroup, CostTerm, Count
from timm_knapsack.values.group_values import Ladder
from timm_knapsack.values.scores import Scores

GAP = {1: 0.03, 2: 0.05}  # by number of costs
MEAN_GAP = {1: 0.0005, 2: 0.001}  # which problems hypothesis draws, and how often one, depends on what else is loaded


def ladder(values, least, most, step):
    """What a group with these scores offers."""
    whole = Scores({"g": torch.as_tensor(values)}).ladder(ChannelGroup("g", len(values), ()))
    return width_search.ladder(whole, least, most, step)


def chain(name, sizes, constants, fixed=0):
    """The MACs of a chain of convs: image → group 0 → group 1 → … → classes, each term width × width × constant."""
    terms = [CostTerm("first", 3 * constants[0], (Count(0, ((0, 1),)),))]
    for i in range(1, len(sizes)):
        terms.append(CostTerm(f"conv{i}", constants[i], (Count(0, ((i - 1, 1),)), Count(0, ((i, 1),)))))
    terms.append(CostTerm("last", 4, (Count(0, ((len(sizes) - 1, 1),)),)))
    terms.append(CostTerm("fixed", fixed, ()))
    return ProductCost(name, name, terms, len(sizes))


def brute_force(ladders, costs, limits):
    """The largest value over all counts that fit."""
    best = None
    for rungs in itertools.product(*(range(len(rung.counts)) for rung in ladders)):
        counts = [rung.counts[i] for rung, i in zip(ladders, rungs, strict=True)]
        if all(cost.at(counts) <= limits[cost.name] for cost in costs):
            value = sum(rung.value[i] for rung, i in zip(ladders, rungs, strict=True))
            best = value if best is None else max(best, value)
    return best


def check(solution, ladders, costs, limits):
    """Fail unless the counts are offered, fit, are worth what they say, and leave no room for one more."""
    assert all(n in rung.counts for n, rung in zip(solution.counts, ladders, strict=True)), (
        "a count that is not offered"
    )
    assert all(cost.at(solution.counts) <= limits[cost.name] for cost in costs), "above the limit"
    value = sum(rung.value[list(rung.counts).index(n)] for n, rung in zip(solution.counts, ladders, strict=True))
    assert solution.value == pytest.approx(value), "not worth what it says"
    assert solution.upper_bound >= solution.value
    for g, rung in enumerate(ladders):
        more = [*solution.counts]
        higher = [n for n in rung.counts if n > more[g]]
        if higher and rung.value[-1] > rung.value[list(rung.counts).index(more[g])]:
            more[g] = higher[0]
            assert not all(cost.at(more) <= limits[cost.name] for cost in costs), "room for one more was left"


@st.composite
def problems(draw, costs=1):
    sizes = draw(st.lists(st.integers(2, 6), min_size=2, max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    values = [rng.lognormal(rng.normal(0, 0.7), draw(st.sampled_from([0.1, 0.5, 1.5])), n) for n in sizes]
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in sizes]
    ladders = [ladder(v, min(step, len(v)), len(v), step) for v, step in zip(values, steps, strict=True)]
    networks = [
        chain(name, sizes, [int(c) for c in rng.integers(1, 50, len(sizes))], int(rng.integers(0, 100)))
        for name in ("macs", "params")[:costs]
    ]
    limits = {cost.name: cost.at(sizes) * draw(st.floats(0.15, 0.95)) for cost in networks}
    return ladders, networks, limits


def gap_of(problem):
    """How much of the best value is missing; None where nothing fits."""
    ladders, costs, limits = problem
    optimum, solution = brute_force(ladders, costs, limits), search_widths(ladders, costs, limits)
    assert (solution is None) == (optimum is None), "reachable or not?"
    if solution is None:
        return None
    check(solution, ladders, costs, limits)
    assert solution.value <= optimum * (1 + 1e-9)
    return 1 - solution.value / optimum


@pytest.mark.parametrize("costs", [1, 2])
def test_near_the_optimum_of_brute_force(costs):
    gaps = []

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(problems(costs))
    def search(problem):
        gap = gap_of(problem)
        if gap is not None:
            gaps.append(gap)
            assert gap <= GAP[costs]

    search()
    assert len(gaps) > 50
    assert np.mean(gaps) <= MEAN_GAP[costs], f"mean gap {np.mean(gaps):.4f}, largest {max(gaps):.4f}"


def test_a_linear_cost_is_solved_nearly_exactly():
    """Without products nothing is lost but what one knapsack of bundles loses."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(2, 6, 3)
        ladders = [ladder(rng.random(n), 1, int(n), 1) for n in sizes]
        weights = rng.integers(1, 30, 3)
        terms = [CostTerm(str(i), int(w), (Count(0, ((i, 1),)),)) for i, w in enumerate(weights)]
        cost = ProductCost("macs", "MACs", terms, 3)
        limits = {"macs": cost.at(sizes) * 0.6}
        solution = search_widths(ladders, [cost], limits)
        assert solution.value == pytest.approx(brute_force(ladders, [cost], limits), rel=1e-9)


def stream_gaps():
    """Residual networks in steps of a third, where a step of the stream that all convs share is a large part."""
    rng = np.random.default_rng(0)
    blocks, size, step, gaps = 5, 24, 8, []
    for _ in range(60):
        share = rng.integers(1, 30, blocks).tolist()
        terms = [CostTerm(f"block{i}", c, (Count(0, ((0, 1),)), Count(0, ((i, 1),)))) for i, c in enumerate(share, 1)]
        cost = ProductCost("macs", "macs", terms, blocks + 1)
        scales = [rng.uniform(1, 2 * blocks), *rng.uniform(0.3, 1, blocks)]
        ladders = [ladder(scale * rng.lognormal(0, 0.3, size), step, size, step) for scale in scales]
        limits = {"macs": cost.at([size] * (blocks + 1)) * rng.uniform(0.3, 0.95)}
        gaps.append(1 - search_widths(ladders, [cost], limits).value / brute_force(ladders, [cost], limits))
    return np.array(gaps)


def test_steps_that_are_a_large_part_of_the_budget(monkeypatch):
    assert stream_gaps().max() < 1e-3
    monkeypatch.setattr(width_search, "_exchanged", lambda ladders, costs, limits, counts: counts)
    assert stream_gaps().max() > 0.02  # what slopes alone come to


def test_a_larger_network_ends_within_a_unit_of_the_budget():
    rng = np.random.default_rng(1)
    sizes = [64, 128, 128, 256, 256]
    ladders = [ladder(rng.lognormal(0, 1, n), 1, n, 1) for n in sizes]
    cost = chain("macs", sizes, [900, 400, 400, 100, 100])
    for fraction in (0.8, 0.5, 0.2, 0.05):
        limits = {"macs": cost.at(sizes) * fraction}
        solution = search_widths(ladders, [cost], limits)
        check(solution, ladders, [cost], limits)
        assert cost.at(solution.counts) >= 0.995 * limits["macs"]


def test_more_room_is_never_worth_much_less():
    rng = np.random.default_rng(2)
    sizes = [32, 48, 64]
    ladders = [ladder(rng.lognormal(0, 1, n), 1, n, 1) for n in sizes]
    cost = chain("macs", sizes, [9, 5, 2])
    values = [search_widths(ladders, [cost], {"macs": cost.at(sizes) * f}).value for f in np.linspace(0.1, 1, 19)]
    assert all(b >= a * 0.999 for a, b in itertools.pairwise(values))


def test_a_budget_above_the_whole_network_keeps_everything():
    sizes = [4, 5]
    ladders = [ladder(np.arange(n, dtype=float), 1, n, 1) for n in sizes]
    cost = chain("macs", sizes, [2, 3])
    solution = search_widths(ladders, [cost], {"macs": cost.at(sizes)})
    assert solution.counts == sizes and solution.value == solution.upper_bound == 6 + 10


def test_a_budget_below_the_least_widths_is_none():
    sizes = [4, 5]
    ladders = [ladder(np.ones(n), 2, n, 1) for n in sizes]
    cost = chain("macs", sizes, [2, 3])
    least = cost.at([2, 2])
    assert search_widths(ladders, [cost], {"macs": least}).counts == [2, 2]
    assert search_widths(ladders, [cost], {"macs": least - 1}) is None


def test_of_several_costs_the_tightest_decides():
    sizes = [16, 16, 16]
    rng = np.random.default_rng(3)
    ladders = [ladder(rng.random(n), 1, n, 1) for n in sizes]
    macs, params = chain("macs", sizes, [50, 10, 1]), chain("params", sizes, [1, 2, 30])
    limits = {"macs": macs.at(sizes) * 0.5, "params": params.at(sizes) * 0.5}
    both = search_widths(ladders, [macs, params], limits)
    check(both, ladders, [macs, params], limits)
    for cost in (macs, params):
        assert both.value <= search_widths(ladders, [cost], limits).value * 1.005
    loose = {"macs": limits["macs"], "params": params.at(sizes)}
    alone = search_widths(ladders, [macs], limits)
    assert search_widths(ladders, [macs, params], loose).value == pytest.approx(alone.value, rel=0.01)


@pytest.mark.parametrize(
    ("size", "least", "most", "step", "counts"),
    [
        (6, 1, 6, 1, [1, 2, 3, 4, 5, 6]),
        (6, 2, 5, 1, [2, 3, 4, 5]),
        (16, 8, 16, 8, [8, 16]),
        (20, 8, 20, 8, [8, 20]),  # 16 → 20 would be a small step: 20 stands for it
        (5, 5, 5, 8, [5]),
        (6, 6, 6, 4, [6]),
    ],
)
def test_ladders(size, least, most, step, counts):
    values = np.arange(size, dtype=float)
    rung = ladder(values, least, most, step)
    assert rung.counts.tolist() == counts
    assert rung.value.tolist() == [sum(sorted(values)[::-1][:n]) for n in counts]


def test_the_checks_can_fail():
    ladders = [Ladder(np.array([1, 2, 3]), np.array([1.0, 3.0, 4.0]), np.arange(3))] * 2
    cost = chain("macs", [3, 3], [1, 1])
    limits = {"macs": cost.at([2, 3])}
    good = search_widths(ladders, [cost], limits)
    check(good, ladders, [cost], limits)
    for wrong in ({"counts": [3, 3]}, {"counts": [1, 1], "value": 2.0}, {"value": good.value - 1}, {"counts": [4, 1]}):
        with pytest.raises(AssertionError):
            check(replace(good, **wrong), ladders, [cost], limits)


def test_going_half_of_the_way_finds_better_widths_than_going_all_of_it(monkeypatch):
    """The slopes hold near the widths that they were taken at: in a deep chain, whole steps jump past the good ones."""

    def values():
        found = []
        for seed in range(8):
            rng = np.random.default_rng(seed)
            ladders = [ladder(rng.lognormal(rng.normal(0, 0.5), 0.3, 32), 1, 32, 1) for _ in range(6)]
            cost = chain("macs", [32] * 6, [50] * 6)
            for fraction in (0.5, 0.2, 0.05):
                found.append(search_widths(ladders, [cost], {"macs": cost.at([32] * 6) * fraction}).value)
        return np.array(found)

    damped = values()
    monkeypatch.setattr(width_search, "_moved", lambda here, there: there)
    whole_steps = values()
    assert (whole_steps <= damped * (1 + 1e-9)).all() and (whole_steps / damped).min() < 0.98


# ---- the steps of the search


def alone(constants):
    """A cost that is a sum over groups, each unit ``constants[g]``."""
    terms = [CostTerm(f"conv{g}", constant, (Count(0, ((g, 1),)),)) for g, constant in enumerate(constants)]
    return ProductCost("macs", "macs", terms, len(constants))


def test_a_budget_of_exactly_everything_needs_no_search():
    ladders = [ladder([3.0, 2.0, 1.0], 1, 3, 1) for _ in range(2)]
    cost = chain("macs", [3, 3], [1, 5])
    solution = search_widths(ladders, [cost], {"macs": cost.at([3, 3])})
    assert solution.counts == [3, 3] and solution.rounds == 0
    assert solution.value == solution.upper_bound == 12


def test_near_the_budget_one_unit_goes_at_a_time():
    """The one that is worth least for its cost; far from it, several groups at once."""
    cost, ladders = alone([10] * 6), [ladder([9.0, 5.0, 1.0 + g], 1, 3, 1) for g in range(6)]
    counts = np.full(6, 3.0)
    shrunk = width_search._shrunk_to_fit(ladders, [cost], {"macs": 175}, counts)
    assert shrunk.tolist() == [2, 3, 3, 3, 3, 3] and counts.tolist() == [3] * 6
    assert width_search._shrunk_to_fit(ladders, [cost], {"macs": 60}, counts).tolist() == [1] * 6


def test_room_is_filled_by_value_for_its_cost():
    cost = alone([1, 10])
    ladders = [ladder([9.0, 2.0, 2.0], 1, 3, 1), ladder([9.0, 3.0], 1, 2, 1)]
    filled = width_search._filled(ladders, [cost], {"macs": 13 + 8}, np.array([1.0, 1.0]))
    assert filled.tolist() == [3, 1]
    assert width_search._filled(ladders, [cost], {"macs": 21}, np.array([1.0, 1.0]), held=0).tolist() == [1, 2]
    assert width_search._filled(ladders, [cost], {"macs": 22}, np.array([1.0, 1.0])).tolist() == [3, 1]


def linear(name, *constants):
    """So much for each unit of each group."""
    terms = [CostTerm(f"layer{i}", constant, (Count(0, ((i, 1),)),)) for i, constant in enumerate(constants)]
    return ProductCost(name, name, terms, len(constants))


def test_of_two_costs_the_relaxation_is_taken_where_it_is_whole():
    ladders = [ladder([19.0, 18, 17, 16, 15], 1, 5, 1), ladder([5.0, 4, 3, 2, 1], 1, 5, 1)]
    costs, limits = [linear("a", 1, 1), linear("b", 1, 2)], {"a": 8, "b": 11}
    there, bound = width_search._solve_linearised(ladders, costs, limits, np.array([5.0, 5.0]))
    assert there.tolist() == [5, 3] and bound == pytest.approx(19 + 18 + 17 + 16 + 15 + 5 + 4 + 3)
