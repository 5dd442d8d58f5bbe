"""The knapsack solver against brute force, against Algorithm 1, and against properties that any optimum has."""

import itertools
import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timm_knapsack.errors import BudgetError, KnapsackError
from timm_knapsack.knapsack import exact as knapsack_exact
from timm_knapsack.knapsack import solve as knapsack
from timm_knapsack.knapsack.solve import OPTIMALITY_TOLERANCE, solve_knapsack


def brute_force(values, weights, capacity):
    """The optimum by trying every subset; weights are added as exact numbers."""
    subsets = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1
    exact = np.array([Fraction(weight) for weight in np.asarray(weights).tolist()], dtype=object)
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = np.array([int(weight * common) for weight in exact], dtype=object)
    if sum(whole) < 2**62:
        whole = whole.astype(np.int64)
    fits = subsets @ whole <= math.floor(Fraction(capacity) * common)
    return float((subsets[fits] @ np.asarray(values, dtype=float)).max())


def check(solution, values, weights, capacity, optimum):
    """Fail unless the solution fits, says the truth about itself, and is worth the optimum, proven."""
    kept = np.flatnonzero(solution.keep).tolist()
    values, weights = np.asarray(values).tolist(), np.asarray(weights).tolist()
    assert solution.keep.dtype == bool and len(solution.keep) == len(values)
    total = sum(Fraction(weights[item]) for item in kept)
    assert total <= Fraction(capacity), "too heavy"
    assert solution.weight == (total if isinstance(solution.weight, int) else float(total))
    assert solution.value == math.fsum(values[item] for item in kept), "the value is not that of the kept items"
    assert solution.value == pytest.approx(optimum, rel=OPTIMALITY_TOLERANCE, abs=0), "not the optimum"
    assert solution.upper_bound >= optimum * (1 - OPTIMALITY_TOLERANCE), "the bound is below the optimum"
    assert solution.is_optimal, "not proven"


def uncorrelated(rng, n):
    return rng.random(n), rng.integers(1, 100, n)


def tied_values(rng, n):
    return rng.integers(1, 4, n).astype(float), rng.integers(1, 20, n)


def few_weights(rng, n):
    return rng.lognormal(0, 1, n), rng.choice([12, 20, 32, 45], n)


def equal_weights(rng, n):
    return rng.random(n), np.full(n, 7)


def near_constant(rng, n):
    return 1 + 0.01 * rng.standard_normal(n), rng.choice([44, 45, 48, 57, 64], n)


def equal_items(rng, n):
    return np.full(n, 0.37), rng.choice([1000, 1501], n)


def weakly_correlated(rng, n):
    weights = rng.integers(100, 1000, n)
    return weights + rng.uniform(-50, 50, n), weights


def strongly_correlated(rng, n):
    weights = rng.integers(1, 1000, n)
    return weights + 100.0, weights


def subset_sum(rng, n):
    weights = rng.integers(1, 10**6, n)
    return weights.astype(float), weights


def float_subset_sum(rng, n):
    weights = rng.integers(1, 1000, n)
    return weights * 0.1, weights


def zero_weights(rng, n):
    return rng.normal(0.5, 1, n), rng.integers(0, 4, n)


def signs_and_zeros(rng, n):
    return rng.integers(-2, 4, n).astype(float), rng.integers(0, 10, n)


def huge_weights(rng, n):
    return rng.lognormal(0, 2, n), rng.integers(1, 10**12, n)


def heavy_tailed(rng, n):
    return rng.pareto(0.5, n), rng.integers(1, 1000, n)


def dyadic_weights(rng, n):
    return rng.random(n), rng.integers(0, 64, n) / 16


SMALL_KINDS = [
    uncorrelated, tied_values, few_weights, equal_weights, near_constant, equal_items, weakly_correlated,
    strongly_correlated, subset_sum, float_subset_sum, zero_weights, signs_and_zeros, huge_weights, heavy_tailed,
    dyadic_weights,
]  # fmt: skip


def float_weights(rng, n):
    return rng.random(n), rng.random(n) * 10.0 ** rng.integers(-6, 3, n)


def tenths(rng, n):
    return rng.random(n), rng.integers(1, 10, n) * 0.1


def beyond_int64(rng, n):
    return rng.random(n), rng.integers(2**57, 2**59, n).astype(object) * 2 + 1


def beyond_float64(rng, n):
    return rng.random(n), rng.integers(0, 3, n).astype(object) * 2**1400 + rng.integers(1, 50, n)


EXACT_WEIGHT_KINDS = [float_weights, tenths, beyond_int64, beyond_float64]


def some_capacity(rng, weights):
    """Often the exact weight of some subset, where an error of one unit shows; else anything up to the total."""
    weights = weights.tolist()
    if rng.random() < 0.5:
        return sum(weight for weight in weights if rng.random() < 0.5)
    total = sum(weights)
    return total * int(rng.integers(0, 1001)) // 1000 if isinstance(total, int) else total * rng.random()


def small_instances(kind, count, largest):
    rng = np.random.default_rng([*kind.__name__.encode()])
    for _ in range(count):
        values, weights = kind(rng, int(rng.integers(1, largest + 1)))
        yield values, weights, some_capacity(rng, weights)


@pytest.mark.parametrize("kind", SMALL_KINDS, ids=lambda kind: kind.__name__)
def test_exact_equals_brute_force(kind):
    for values, weights, capacity in small_instances(kind, 130, largest=12):  # 15 kinds: 1950, and 200 in the next test
        optimum = brute_force(values, weights, capacity)
        check(solve_knapsack(values, weights, capacity), values, weights, capacity, optimum)


@pytest.mark.parametrize("kind", EXACT_WEIGHT_KINDS, ids=lambda kind: kind.__name__)
def test_exact_equals_brute_force_where_weights_need_more_than_int64(kind):
    for values, weights, capacity in small_instances(kind, 50, largest=8):
        optimum = brute_force(values, weights, capacity)
        check(solve_knapsack(values, weights, capacity), values, weights, capacity, optimum)


@pytest.mark.parametrize(
    "kind", [uncorrelated, tied_values, few_weights, equal_items, weakly_correlated, strongly_correlated, zero_weights,
             heavy_tailed, float_subset_sum, dyadic_weights],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_exact_equals_algorithm_1_on_mid_size_instances(kind):
    rng = np.random.default_rng(3)
    for _ in range(20):  # 10 kinds: 200 instances
        values, weights = kind(rng, int(rng.integers(40, 160)))
        capacity = weights.sum().item() * rng.random()
        table = solve_knapsack(values, weights, capacity, method="dp")
        check(solve_knapsack(values, weights, capacity), values, weights, capacity, table.value)
        assert table.weight <= capacity and table.is_optimal


@pytest.mark.parametrize(
    "kind", [tied_values, few_weights, equal_items, strongly_correlated, near_constant, signs_and_zeros, subset_sum],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
@pytest.mark.parametrize("completing", [True, False])
def test_splitting_by_count_is_exact_too(monkeypatch, kind, completing):
    """Forced on instances that do without; also without the shortcut that finds good selections before the search."""
    monkeypatch.setattr(knapsack_exact, "_EASY_STATES", 0)
    if not completing:
        monkeypatch.setattr(knapsack_exact._Core, "complete", lambda *args: (-math.inf, 0, []))
    for values, weights, capacity in small_instances(kind, 60, largest=11):
        optimum = brute_force(values, weights, capacity)
        check(solve_knapsack(values, weights, capacity), values, weights, capacity, optimum)
    rng = np.random.default_rng(4)
    for _ in range(5 if kind is not subset_sum else 0):
        values, weights = kind(rng, int(rng.integers(40, 100)))
        capacity = weights.sum().item() * rng.random()
        table = solve_knapsack(values, weights, capacity, method="dp")
        check(solve_knapsack(values, weights, capacity), values, weights, capacity, table.value)


def test_alike_values_are_proven_only_by_splitting(monkeypatch):
    """An instance like EfficientNet-B4's with nearly constant values: the plain bound is most of an item too high."""
    rng = np.random.default_rng(1)
    weights = rng.choice([10_028, 27_268, 44_828, 57_608, 64_028, 64_040, 66_500, 93_200], 2000)
    values = 1 + 1e-3 * rng.standard_normal(2000)
    capacity = int(np.sort(weights)[:1200].sum()) + 39_000
    assert solve_knapsack(values, weights, capacity, max_states=5_000_000).is_optimal
    monkeypatch.setattr(knapsack_exact, "_split_by_count", lambda plain, *args: [plain])
    assert not solve_knapsack(values, weights, capacity, max_states=5_000_000).is_optimal


@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
def test_exact_equals_algorithm_1_where_thousands_share_a_weight(spread):
    rng = np.random.default_rng(5)
    layer = np.repeat(np.arange(6), [800, 1600, 400, 900, 300, 100])
    weights = np.array([16, 18, 36, 64, 72, 144])[layer] * 12544
    values = rng.lognormal(0, 1, 6)[layer] * (1 + spread * rng.random(len(layer)))
    for share in (0.03, 0.5, 0.9):
        capacity = int(weights.sum() * share)
        table = solve_knapsack(values, weights, capacity, method="dp")
        check(solve_knapsack(values, weights, capacity), values, weights, capacity, table.value)


def network_like(rng, items=50_000):
    layer_weights = rng.integers(1, 3000, 60) * 49
    layer = rng.integers(0, 60, items)
    return rng.lognormal(rng.normal(0, 1, 60)[layer], 0.5), layer_weights[layer]


def test_a_networks_instance_is_proven_and_beats_greedy():
    values, weights = network_like(np.random.default_rng(0))
    capacity = int(weights.sum()) // 2
    exact, greedy = (solve_knapsack(values, weights, capacity, method=method) for method in ("exact", "greedy"))
    assert exact.is_optimal and exact.value == exact.upper_bound
    assert greedy.value < exact.value <= greedy.upper_bound and not greedy.is_optimal


# The checkers can fail.


def test_check_rejects_what_is_wrong():
    values, weights, capacity = [6.0, 10.0, 12.0], [1, 2, 3], 5
    good = solve_knapsack(values, weights, capacity)
    check(good, values, weights, capacity, 22)
    wrong = {
        "too heavy": replace(good, keep=np.array([True, True, True])),
        "not that of the kept": replace(good, value=23.0),
        "not the optimum": solve_knapsack(values, weights, capacity, method="greedy"),
        "not proven": replace(good, upper_bound=22.5),
        "below the optimum": replace(good, upper_bound=21.0),
    }
    for reason, solution in wrong.items():
        with pytest.raises(AssertionError, match=reason):
            check(solution, values, weights, capacity, 22)


@pytest.mark.parametrize("mistake", ["fixes too much", "bounds too low", "loses a unit"])
def test_brute_force_finds_a_wrong_solver(monkeypatch, mistake):
    """A mistake of each kind that this algorithm invites shows among the same instances."""
    core = knapsack_exact._Core
    if mistake == "fixes too much":
        losses = core._losses_within_classes
        monkeypatch.setattr(core, "_losses_within_classes", lambda *args: (losses(*args)[0], 2 * losses(*args)[1]))
    elif mistake == "bounds too low":
        bounds = core.upper_bounds
        monkeypatch.setattr(core, "upper_bounds", lambda *args: bounds(*args) - 0.2)
        monkeypatch.setattr(core, "complete", lambda *args: (-1.0, 0, []))  # it would find most optima all the same
    else:
        as_whole = knapsack.as_whole_numbers
        monkeypatch.setattr(knapsack, "as_whole_numbers", lambda *args: (as_whole(*args)[0], as_whole(*args)[1] - 1))
    found = 0
    for values, weights, capacity in small_instances(few_weights, 130, largest=12):
        solution = solve_knapsack(values, weights, capacity)
        found += not math.isclose(solution.value, brute_force(values, weights, capacity), rel_tol=1e-12)
    assert found >= 3


# Limits.


def test_beyond_max_states_the_bound_says_that_nothing_is_proven():
    rng = np.random.default_rng(1)
    values, weights = weakly_correlated(rng, 60)
    capacity = int(weights.sum()) // 2
    optimum = solve_knapsack(values, weights, capacity)
    assert optimum.is_optimal
    unproven = 0
    for max_states in (1, 10, 100, 1000):
        limited = solve_knapsack(values, weights, capacity, max_states=max_states)
        assert limited.weight <= capacity and limited.value <= optimum.value <= limited.upper_bound
        assert limited.is_optimal or limited.upper_bound > limited.value
        unproven += not limited.is_optimal
    assert unproven >= 2


def test_a_bound_that_is_reached_is_not_below_the_optimum():
    """A subset that fills the capacity to the last unit is worth all that the LP bound allows, and no rounding more."""
    tight = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        weights = rng.integers(10, 10_000, 40)
        values, capacity = weights / 7, int(weights[rng.random(40) < 0.5].sum())
        optimum = solve_knapsack(values, weights, capacity)
        limited = solve_knapsack(values, weights, capacity, max_states=1)
        assert optimum.value <= limited.upper_bound
        tight += limited.value < optimum.value == pytest.approx(limited.upper_bound, rel=1e-11)
    assert tight >= 10


@pytest.mark.parametrize("limit", ["at most so many", "at least so many"])
def test_the_fee_is_about_the_best_and_soon_found(limit, monkeypatch):
    """Any fee gives a bound; the search for it must come near to the least of those on a fine grid, and then stop."""
    relaxation, trials = knapsack_exact._Relaxation, []
    monkeypatch.setattr(knapsack_exact, "_Relaxation", lambda *args: trials.append(args) or relaxation(*args))
    for seed in range(10):
        rng = np.random.default_rng(seed)
        values, weights = rng.uniform(1, 2, 50), rng.integers(50, 100, 50)
        capacity = int(weights.sum()) // 3
        count = int(knapsack_exact._Relaxation(values, weights, capacity).taken.sum())
        most = limit == "at most so many"
        count, end = (count, float(values.max())) if most else (count + 1, -math.inf)
        trials.clear()
        found = knapsack_exact._with_best_fee(values, weights, capacity, count, end)
        assert len(trials) <= 20
        fees = np.linspace(0, end if most else -20.0, 4001)
        grid = [knapsack_exact._Relaxation(values, weights, capacity, fee, count) for fee in fees.tolist()]
        least = min(relaxation.bound for relaxation in grid if relaxation.is_sound)
        assert found.bound <= least + 1e-5 * grid[0].gap


def test_dp_says_how_much_memory_it_would_need():
    with pytest.raises(BudgetError, match=r"needs 1\.17 GiB for 2 items × 77000001 capacities, above max_table_bytes"):
        solve_knapsack([1.0, 2.0], [76_999_999, 77_000_000], 77_000_000, method="dp", max_table_bytes=2**30)
    assert solve_knapsack([1.0, 2.0], [76 * 10**9, 10**9], 76 * 10**9, method="dp").value == 2  # the GCD makes it small


# Edges.


@pytest.mark.parametrize("method", knapsack.METHODS)
def test_edges(method):
    def keep(values, weights, capacity):
        solution = solve_knapsack(values, weights, capacity, method=method)
        assert solution.method == method and solution.upper_bound >= solution.value
        return solution.keep.tolist()

    assert keep([], [], 0) == []
    assert keep([1.0, 2.0], [3, 4], 0) == [False, False]
    assert keep([1.0, 2.0], [3, 4], 7) == [True, True]
    assert keep([1.0, 2.0], [3, 4], 10**30) == [True, True]
    assert keep([1.0, 0.0, -1.0], [0, 0, 0], 0) == [True, True, False]
    assert keep([-1.0, 5.0], [1, 1], 2) == [False, True]
    assert keep([5.0], [3], 2.999) == [False]
    assert keep([5.0], [3], 3.5) == [True]
    assert keep([True, False], np.array([1, 1], dtype=np.uint8), np.int64(1))[0]
    assert sum(keep([1, 1, 1], [2, 2, 2], 4)) == 2


def test_items_of_value_0_are_kept_where_they_fit():
    for method in ("exact", "dp"):
        assert solve_knapsack([0.0, 0.0, 3.0], [4, 1, 5], 7, method=method).keep.tolist() == [False, True, True]
        assert solve_knapsack([0.0, 0.0, 3.0], [4, 1, 5], 10, method=method).keep.all()


def test_greedy_is_the_published_one():
    """Drop the least efficient until the rest fits: no skipping, so the last item stays out though it would fit."""
    greedy = solve_knapsack([10.0, 9.0, 1.0], [5, 6, 1], 10, method="greedy")
    assert greedy.keep.tolist() == [True, False, False]
    assert greedy.upper_bound == pytest.approx(10 + 9 * 5 / 6, rel=1e-12)
    assert not solve_knapsack([100.0, 1.0], [11, 1], 10, method="greedy").keep.any()


def test_types_of_the_totals():
    assert isinstance(solve_knapsack([1.0], [2], 5).weight, int)
    assert solve_knapsack([1.0, 1.0], [2**62, 2**62], 2**64).weight == 2**63
    assert isinstance(solve_knapsack([1.0], [2.0], 5).weight, float)
    assert isinstance(solve_knapsack([1], [2], 5).value, float)
    with pytest.raises(FrozenInstanceError):
        solve_knapsack([1.0], [2], 5).value = 3.0


def test_float_weights_are_not_rounded():
    assert solve_knapsack([1.0, 1.0], [0.1, 0.2], 0.3).value == 1.0  # 0.1 + 0.2 > 0.3, as in Python
    assert solve_knapsack([1.0, 1.0], [0.25, 0.5], 0.75).value == 2.0
    assert solve_knapsack([1.0, 1.0], [1e16, 1.0], 1e16).value == 1.0  # a float sum would be 1e16 and fit


def test_inputs_stay_and_answers_repeat():
    values, weights = network_like(np.random.default_rng(2), items=3000)
    before = values.copy(), weights.copy()
    values.flags.writeable = weights.flags.writeable = False
    for method in knapsack.METHODS:
        capacity = int(weights.sum()) // 2 if method != "dp" else 49 * 3000
        first, again = (solve_knapsack(values, weights, capacity, method=method) for _ in range(2))
        assert (first.keep == again.keep).all() and first.upper_bound == again.upper_bound
    assert (values == before[0]).all() and (weights == before[1]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [1], 3), "2 values for 1 weights"),
        (([1.0, math.nan], [1, 1], 3), r"values\[1\] is nan"),
        (([1.0, 2.0], [1.0, math.inf], 3), r"weights\[1\] is inf"),
        (([1.0, 2.0], [1, -4], 3), r"weights\[1\] is -4"),
        (([[1.0]], [[1]], 3), r"values has shape \(1, 1\)"),
        ((["a"], [1], 3), "values can't be read as numbers"),
        (([1.0], [None], 3), "weights can't be read as numbers"),
        (([1.0], [1], -1), "capacity=-1 is negative"),
        (([1.0], [1], math.nan), "capacity=nan is not finite"),
        (([1.0], [1], math.inf), "capacity=inf is not finite"),
        (([1.0], [1], "many"), "capacity='many' is not a number"),
        (([1.0], [1], 3, "magic"), "method='magic' is unknown; use one of 'exact', 'dp', 'greedy'"),
        (([1e308, 1e308], [1, 1], 3), "scale them"),
        (([1.0, 1.0, 1.0], [5e-324, 1e300, 1e300], 1e300), r"weights differ by a factor of 2\*\*20\d\d"),
    ],
)
def test_errors_say_what_and_where(arguments, message):
    with pytest.raises(KnapsackError, match=message):
        solve_knapsack(*arguments)
    if isinstance(arguments[2], str) or not 0 <= arguments[2] < math.inf:
        with pytest.raises(BudgetError):
            solve_knapsack(*arguments)


# Properties.

numbers = st.one_of(st.integers(-3, 12), st.floats(-2, 50, allow_subnormal=False))
costs = st.one_of(st.integers(0, 12), st.floats(0, 50, allow_subnormal=False), st.sampled_from([0.1, 0.2, 0.7]))
whole_items = st.lists(st.tuples(st.integers(-3, 30), st.integers(0, 40)), max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(numbers, costs), min_size=1, max_size=8), st.one_of(st.integers(0, 60), st.floats(0, 60)))
def test_any_small_instance_equals_brute_force(items, capacity):
    values, weights = [value for value, _ in items], [weight for _, weight in items]
    optimum = brute_force(values, weights, capacity)
    for method in ("exact", "greedy"):
        solution = solve_knapsack(values, weights, capacity, method=method)
        assert solution.weight <= capacity
        assert solution.value <= optimum + 1e-12 * optimum and solution.upper_bound >= optimum - 1e-12 * optimum
    check(solve_knapsack(values, weights, capacity), values, np.array(weights), capacity, optimum)


@settings(max_examples=150, deadline=None)
@given(whole_items, st.integers(0, 500), st.randoms(use_true_random=False))
def test_what_does_not_change_the_optimum(items, capacity, random):
    values, weights = [value for value, _ in items], [weight for _, weight in items]
    optimum = solve_knapsack(values, weights, capacity)
    assert optimum.is_optimal and optimum.value == solve_knapsack(values, weights, capacity, method="dp").value
    shuffled = random.sample(items, len(items))
    assert solve_knapsack([v for v, _ in shuffled], [w for _, w in shuffled], capacity).value == optimum.value
    assert solve_knapsack(values, [7 * weight for weight in weights], 7 * capacity + 6).value == optimum.value
    assert solve_knapsack(values, [weight / 8 for weight in weights], capacity / 8).value == optimum.value
    assert solve_knapsack([value / 1024 for value in values], weights, capacity).value == optimum.value / 1024
    assert solve_knapsack([*values, -1, 5], [*weights, 0, capacity + 1], capacity).value == optimum.value


@settings(max_examples=100, deadline=None)
@given(whole_items, st.integers(0, 500), st.integers(0, 50))
def test_more_room_is_never_worse(items, capacity, more):
    values, weights = [value for value, _ in items], [weight for _, weight in items]
    assert solve_knapsack(values, weights, capacity).value <= solve_knapsack(values, weights, capacity + more).value


def test_brute_force_itself():
    for values, weights, capacity in itertools.islice(small_instances(zero_weights, 50, largest=6), 50):
        sums = [
            sum(values[item] for item in subset)
            for size in range(len(values) + 1)
            for subset in itertools.combinations(range(len(values)), size)
            if sum(weights[item] for item in subset) <= capacity
        ]
        assert brute_force(values, weights, capacity) == pytest.approx(max(sums), rel=1e-12)


@pytest.mark.parametrize("fee", [-3.0, -0.5, 0.0, 0.5, 3.0])
def test_a_relaxation_bounds_all_selections_of_its_count(fee):
    """With a fee above 0 those of at most ``count`` items, below 0 those of at least ``count``; and not by far."""
    rng = np.random.default_rng(0)
    subsets = ((np.arange(2**8)[:, None] >> np.arange(8)) & 1).astype(bool)
    looseness = []
    for _ in range(40):
        values, weights = rng.uniform(5, 20, 8), rng.integers(1, 30, 8)
        capacity = int(weights.sum() * 0.6)
        totals, fits = subsets @ values, subsets @ weights <= capacity
        for count in range(1, 8):
            relaxation = knapsack_exact._Relaxation(values, weights, capacity, fee, count)
            number = subsets.sum(axis=1)
            meant = fits & ((number <= count) if fee > 0 else (number >= count) if fee < 0 else fits)
            if relaxation.is_sound and meant.any():
                assert relaxation.bound >= totals[meant].max() - 1e-9
                looseness.append(relaxation.bound / totals[meant].max())
    assert len(looseness) > 100 and min(looseness) < 1.05  # it says something
