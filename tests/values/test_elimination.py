"""Backward elimination against a slow reference: least squares on the rows that are left, tried for every unit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from timm_knapsack.values.elimination import Consumer, eliminate


def solved(consumer, units):
    """Ridge weights on the rows of these units for what the full weights give, and its error, penalty included.

    Least squares of the rows that are left, and of √penalty · weights towards the old ones, by `lstsq`: no inverses.
    """
    gram, weight = consumer.gram.double(), consumer.weight.double()
    penalty = consumer.ridge * float(gram.diagonal().mean().clamp_min(1e-30))
    values, vectors = torch.linalg.eigh(gram + penalty * torch.eye(len(gram), dtype=torch.float64))
    root = values.clamp_min(0).sqrt()[:, None] * vectors.T  # rootᵀ root = G + λI
    stay = consumer.rows[torch.as_tensor(units, dtype=torch.long)].reshape(-1)
    new = torch.zeros_like(weight)
    if len(stay):
        new[stay] = torch.linalg.lstsq(root[:, stay], root @ weight, driver="gelsd").solution
    return new, float((root @ (new - weight)).square().sum())


def slow(consumers):
    """One unit after another, all that are left tried: order, and error at each width."""
    left = list(range(len(consumers[0].rows)))
    order, error = [], [0.0]
    while left:
        costs = [sum(solved(c, [u for u in left if u != gone])[1] for c in consumers) for gone in left]
        best = int(np.argmin(costs))
        order.append(left.pop(best))
        error.append(costs[best])
    return order, error[::-1]


def consumer(units, k=1, outputs=4, positions=200, seed=0, shuffled=True, **options):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(positions, units * k, generator=random, dtype=torch.float64)
    x = x @ torch.randn(units * k, units * k, generator=random, dtype=torch.float64)  # correlated
    rows = torch.randperm(units * k, generator=random) if shuffled else torch.arange(units * k)
    weight = torch.randn(units * k, outputs, generator=random, dtype=torch.float64)
    return Consumer(x.T @ x / positions, weight, rows.reshape(units, k), **options)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("readers", [1, 3])
def test_one_at_a_time_is_the_slow_reference(k, readers):
    consumers = [consumer(9, k, seed=seed, outputs=2 + seed) for seed in range(readers)]
    found = eliminate(consumers, share=0)
    order, error = slow(consumers)
    assert found.order.tolist() == order
    np.testing.assert_allclose(found.error, error, rtol=1e-6, atol=1e-9 * error[0])


def test_consumers_with_different_numbers_of_rows():
    """A 1×1 conv and a 3×3 one read the same channels."""
    consumers = [consumer(7, 1, seed=1), consumer(7, 9, seed=2, positions=400)]
    found = eliminate(consumers, share=0)
    order, error = slow(consumers)
    assert found.order.tolist() == order
    np.testing.assert_allclose(found.error, error, rtol=1e-6, atol=1e-9 * error[0])


def test_the_comparison_can_fail():
    """Scores that do not refit give another order, and other errors."""
    one = consumer(9, seed=0)
    order, error = slow([one])
    energy = (one.weight.square().sum(1) * one.gram.diagonal())[one.rows[:, 0]]
    assert energy.argsort().tolist() != order
    assert float(energy.sort().values.cumsum(0)[4]) > 1.05 * error[4]


@settings(max_examples=25, deadline=None)
@given(
    units=st.integers(1, 120),
    k=st.sampled_from([1, 2, 4]),
    readers=st.integers(1, 2),
    seed=st.integers(0, 10**6),
)
def test_errors_are_those_of_the_kept_sets(units, k, readers, seed):
    """The error that batches of units are said to cost is that of a direct solve for the units that are kept."""
    consumers = [consumer(units, k, seed=seed + i) for i in range(readers)]
    found = eliminate(consumers)
    assert sorted(found.order.tolist()) == list(range(units))
    assert len(found.error) == units + 1 and found.error[units] == 0
    assert (np.diff(found.error) <= 0).all()
    for count in {0, 1, units // 4, units // 2, (3 * units) // 4}:
        direct = sum(solved(c, found.kept(count))[1] for c in consumers)
        # inside of a round the joint cost is spread over its units: exact at its ends, near in between
        assert found.error[count] == pytest.approx(direct, rel=0.05, abs=1e-9)


def test_at_the_ends_of_rounds_the_error_is_exact():
    one = consumer(50, 2, seed=3)
    stops = [40, 25, 10, 1]
    found = eliminate([one], at=stops, share=0.2)
    for count in [*stops, 0]:
        assert found.error[count] == pytest.approx(solved(one, found.kept(count))[1], rel=1e-8)


@pytest.mark.parametrize("k", [1, 3])
def test_refitted_weights_are_the_ridge_solution(k):
    consumers = [consumer(30, k, seed=4), consumer(30, k, seed=5, ridge=0.5)]
    found = eliminate(consumers, at=[30, 22, 7, 1])
    assert set(found.refitted) == {30, 22, 7, 1}
    for count, weights in found.refitted.items():
        for one, weight in zip(consumers, weights, strict=True):
            torch.testing.assert_close(weight, solved(one, found.kept(count))[0], rtol=1e-6, atol=1e-8)
            gone = [u for u in range(30) if u not in found.kept(count).tolist()]
            assert (weight[one.rows[gone].reshape(-1)] == 0).all()
    torch.testing.assert_close(found.refitted[30][0], consumers[0].weight)


def test_wanted_widths_do_not_change_what_is_given_to_eliminate():
    one = consumer(12)
    before = one.gram.clone(), one.weight.clone(), one.rows.clone()
    eliminate([one], at=[3])
    assert all(torch.equal(a, b) for a, b in zip(before, (one.gram, one.weight, one.rows), strict=True))


def test_a_singular_gram():
    """Twins cost nothing: one of each goes first."""
    random = torch.Generator().manual_seed(0)
    half = torch.randn(100, 5, generator=random, dtype=torch.float64)
    x = torch.cat([half, half], 1)
    one = Consumer(x.T @ x / 100, torch.ones(10, 3).double(), torch.arange(10)[:, None], ridge=1e-8)
    found = eliminate([one], share=0)
    assert {int(u) % 5 for u in found.order[:5]} == set(range(5))
    assert found.error[5] < 1e-6 * found.error[4]
    assert np.isfinite(found.error).all()


@pytest.mark.parametrize("k", [1, 4])
def test_dead_units_go_first_and_cost_nothing(k):
    alive = consumer(10, k, shuffled=False)
    gram = torch.zeros(14 * k, 14 * k, dtype=torch.float64)
    gram[: 10 * k, : 10 * k] = alive.gram
    weight = torch.cat([alive.weight, torch.zeros(4 * k, 4).double()])
    found = eliminate([Consumer(gram, weight, torch.arange(14 * k).reshape(14, k))])
    assert set(found.order[:4].tolist()) == {10, 11, 12, 13}
    assert found.error[10] == 0 < found.error[9]


def test_inputs_that_are_all_zero():
    found = eliminate([Consumer(torch.zeros(4, 4), torch.ones(4, 2), torch.arange(4)[:, None])], at=[2])
    assert sorted(found.order.tolist()) == [0, 1, 2, 3]
    assert np.isfinite(found.error).all() and torch.isfinite(found.refitted[2][0]).all()


def test_one_unit():
    one = consumer(1, 3)
    found = eliminate([one], at=[1])
    assert found.order.tolist() == [0] and found.kept(1).tolist() == [0] and found.kept(0).tolist() == []
    assert found.error.tolist() == [pytest.approx(solved(one, [])[1]), 0]
    torch.testing.assert_close(found.refitted[1][0], one.weight)


def test_rows_that_belong_to_no_unit_stay_and_help():
    """A concat feeds the layer: only some of its inputs are the group's."""
    whole = consumer(8, shuffled=False)
    part = Consumer(whole.gram, whole.weight, torch.arange(5)[:, None])
    found = eliminate([part], at=[2], share=0)
    assert sorted(found.order.tolist()) == list(range(5))
    stays = Consumer(whole.gram, whole.weight, torch.cat([torch.arange(8)[:, None]]))
    expected, error = solved(stays, [*found.kept(2).tolist(), 5, 6, 7])
    torch.testing.assert_close(found.refitted[2][0], expected, rtol=1e-6, atol=1e-8)
    assert found.error[2] == pytest.approx(error, rel=1e-6)


def wide_consumer(positions=400, ridge=1e-2):
    """1152 inputs behind a ReLU, two of three alike, fewer positions than inputs: as ill-conditioned as it gets."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(positions, 128, generator=random) @ torch.randn(128, 1152, generator=random)
    x = (x + 0.1 * torch.randn(positions, 1152, generator=random)).relu().double()
    weight = torch.randn(1152, 8, generator=random, dtype=torch.float64)
    return Consumer(x.T @ x / positions, weight, torch.arange(1152).reshape(128, 9), ridge)


def test_wide_consumers_in_float32_are_as_in_float64(monkeypatch):
    consumer = wide_consumer()
    quick = eliminate([consumer], at=(64,))
    monkeypatch.setattr("timm_knapsack.values.elimination.WIDE", 10_000)
    exact = eliminate([consumer], at=(64,))
    assert (quick.error != exact.error).any(), "the first was not in float32"
    np.testing.assert_allclose(quick.error, exact.error, rtol=1e-3, atol=1e-6 * exact.error[0])
    assert (quick.kept(64) == exact.kept(64)).float().mean() > 0.95
    assert (quick.refitted[64][0] - exact.refitted[64][0]).norm() < 1e-3 * exact.refitted[64][0].norm()


def test_where_float32_is_not_enough_it_is_float64(monkeypatch):
    consumer = wide_consumer(positions=3, ridge=1e-9)
    found = eliminate([consumer], at=(64,))
    monkeypatch.setattr("timm_knapsack.values.elimination.WIDE", 10_000)
    assert found.order.tolist() == eliminate([consumer], at=(64,)).order.tolist()
