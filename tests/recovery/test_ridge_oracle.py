"""Each number of a fit against its definition on all positions at once, in numpy: centred, damped, solved."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from timm_knapsack.errors import KnapsackError
from timm_knapsack.maps.patches import flat_weight
from timm_knapsack.recovery import ridge as room
from timm_knapsack.recovery.ridge import FEW_PENALTIES, PENALTIES, RidgeSums, check_ridge

LAYERS = {
    "linear": lambda: nn.Linear(5, 3),
    "conv": lambda: nn.Conv2d(2, 3, 2),
    "grouped conv": lambda: nn.Conv2d(4, 6, (1, 2), groups=2),
    "depthwise": lambda: nn.Conv2d(3, 3, 2, groups=3),
}


def data_of(layer, positions=(7, 4, 5), seed=0):
    """Batches of inputs and targets, with means that are not zero."""
    draw = torch.Generator().manual_seed(seed)
    groups, inputs, outs = flat_weight(layer).shape
    batches = []
    for n in positions:
        x = torch.randn(groups, n, inputs, generator=draw, dtype=torch.float64) + 0.7
        target = torch.randn(groups, n, outs, generator=draw, dtype=torch.float64) * 2 - 1.3
        batches.append((x, target))
    return batches


def halves_of(batches):
    """The first half of each batch's positions, the middle one with it; and the rest."""
    cut = [(x.shape[1] + 1) // 2 for x, _ in batches]
    first = [(x[:, :c], t[:, :c]) for (x, t), c in zip(batches, cut, strict=True)]
    second = [(x[:, c:], t[:, c:]) for (x, t), c in zip(batches, cut, strict=True)]
    return first, second


def joined(batches):
    return [torch.cat(parts, 1).numpy() for parts in zip(*batches, strict=True)]


def oracle(layer, batches, penalty, shifts, fixed=None):
    """Weights [groups, inputs, outputs], shift, and the shares that are missed before and after."""
    x, target = joined(batches)
    now = flat_weight(layer).double().numpy()
    rest = target - x @ now
    a, b = (x - x.mean(1, keepdims=True), rest - rest.mean(1, keepdims=True)) if shifts else (x, rest)
    n, change = x.shape[1], np.zeros_like(now)
    for g in range(len(now)):
        gram = a[g].T @ a[g] / n
        if penalty < math.inf:
            damped = gram + penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
            change[g] = np.linalg.solve(damped, a[g].T @ b[g] / n)
    shift = (rest - x @ change).mean(1) if shifts else np.zeros_like(rest.mean(1))
    if fixed is not None:
        stays = np.asarray(fixed).reshape(len(now), -1)
        change = np.where(stays[:, None], 0, change)
        shift = np.where(stays, 0, shift)
    variance = (target**2).sum() / n - (target.mean(1) ** 2).sum()
    missed = b - a @ change
    return now + change, shift.reshape(-1), (rest**2).sum() / n / variance, (missed**2).sum() / n / variance


def summed(layer, batches):
    sums = RidgeSums(layer)
    for x, target in batches:
        sums.add(x, target)
    return sums


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("penalty", [0.01, 0.5, math.inf])
def test_a_fit_is_what_it_says(kind, shifts, penalty):
    layer = LAYERS[kind]()
    batches = data_of(layer)
    fit = summed(layer, batches).fit(penalty, shifts)
    flat, shift, before, after = oracle(layer, batches, penalty, shifts)
    np.testing.assert_allclose(fit.flat.numpy(), flat, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fit.shift.numpy(), shift, rtol=1e-9, atol=1e-12)
    assert fit.error_before == pytest.approx(before) and fit.error_after == pytest.approx(after)
    assert fit.ridge == penalty and fit.weight.shape == layer.weight.shape and fit.weight.dtype == layer.weight.dtype
    changed = LAYERS[kind]()
    changed.weight.data = fit.weight
    np.testing.assert_allclose(flat_weight(changed).numpy(), flat, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("shifts", [False, True])
def test_outputs_that_are_fixed_stay(kind, shifts):
    layer = LAYERS[kind]()
    batches, outs = data_of(layer), layer.weight.shape[0]
    fixed = torch.arange(outs) % 2 == 0
    fit = summed(layer, batches).fit(0.1, shifts, fixed)
    flat, shift, _, after = oracle(layer, batches, 0.1, shifts, fixed.numpy())
    np.testing.assert_allclose(fit.flat.numpy(), flat, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fit.shift.numpy(), shift, rtol=1e-9, atol=1e-12)
    assert fit.error_after == pytest.approx(after)
    assert torch.equal(fit.weight[fixed], layer.weight.detach()[fixed]) and not fit.shift[fixed].any()


@pytest.mark.parametrize("shifts", [False, True])
def test_the_penalty_across_halves_by_its_definition(shifts):
    """For each way in which one is chosen, what it would miss of the half that it was not fitted on."""
    for seed in range(6):
        layer = nn.Linear(6, 2)
        batches = data_of(layer, (9, 8, 6 * seed + 1), seed)
        halves = halves_of(batches)

        def missed(penalty, layer=layer, halves=halves):
            total = 0.0
            for fitted, asked in (halves, halves[::-1]):
                change = oracle(layer, fitted, penalty, shifts)[0] - flat_weight(layer).double().numpy()
                x, target = joined(asked)
                rest = target - x @ flat_weight(layer).double().numpy()
                if shifts:
                    x, rest = x - x.mean(1, keepdims=True), rest - rest.mean(1, keepdims=True)
                total += ((rest - x @ change) ** 2).sum() / x.shape[1]
            return total

        assert summed(layer, batches).fit(None, shifts).ridge == min((*PENALTIES, math.inf), key=missed)


@pytest.mark.parametrize("single", [False, True], ids=["double", "single"])
@pytest.mark.parametrize("shifts", [False, True])
def test_a_fit_of_one_half(shifts, single, monkeypatch):
    layer = nn.Conv2d(4, 6, (1, 2), groups=2)  # four inputs in each group
    monkeypatch.setattr(room, "SINGLE_INPUTS", 4 if single else 5)
    batches = data_of(layer)
    sums = summed(layer, batches)
    for half, part in enumerate(halves_of(batches)):
        for _ in range(2):  # what was made once is taken again
            flat, shift = sums.fit_of_half(half, 0.05, shifts)
            expected = oracle(layer, part, 0.05, shifts)
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if single else {"rtol": 1e-9, "atol": 1e-12}
            np.testing.assert_allclose(flat.numpy(), expected[0], **tolerance)
            np.testing.assert_allclose(shift.numpy(), expected[1], **tolerance)
            assert flat.dtype == torch.float64
    assert (sums._half_normals[0].gram.dtype == torch.float32) == single


def test_wide_layers_compare_penalties_in_single_precision(monkeypatch):
    seen = []
    solve = room._Normal.solve
    monkeypatch.setattr(room._Normal, "solve", lambda self, *a: (seen.append(self.gram.dtype), solve(self, *a))[1])
    monkeypatch.setattr(room, "SINGLE_INPUTS", 5)
    summed(layer := nn.Linear(5, 3), data_of(layer)).fit(None, True)
    assert seen == [torch.float32] * 2 * len(PENALTIES) + [torch.float64]
    seen.clear()
    monkeypatch.setattr(room, "SINGLE_INPUTS", 6)
    monkeypatch.setattr(room, "MANY_INPUTS", 5)
    summed(layer, data_of(layer)).fit(None, True)
    assert seen == [torch.float64] * (2 * len(PENALTIES) + 1)
    seen.clear()
    monkeypatch.setattr(room, "MANY_INPUTS", 4)
    summed(layer, data_of(layer)).fit(None, True)
    assert seen == [torch.float64] * (len(FEW_PENALTIES) + 1)


def test_penalties_go_from_next_to_none_to_all_by_tens():
    assert np.allclose(np.diff(np.log10(PENALTIES)), 1) and PENALTIES[0] == 1e-4 and PENALTIES[-1] == 1
    assert set(FEW_PENALTIES) < set(PENALTIES) and len(FEW_PENALTIES) == 2
    for penalty in PENALTIES:
        check_ridge(penalty)


@pytest.mark.parametrize("shifts", [False, True])
def test_two_processes_see_what_one_sees(shifts):
    """All that is summed is added up, whichever half of the batches each has seen; the same of other targets."""
    layer = nn.Conv2d(4, 6, (1, 2), groups=2)
    batches = data_of(layer, (4, 6, 8, 2))  # of even length: halves are those of each batch
    one, left, right = summed(layer, batches), summed(layer, batches[:2]), summed(layer, batches[2:])
    others = iter([value.clone() for half in right.halves for value in vars(half).values()])
    left.reduce(lambda tensor: tensor + next(others))
    assert next(others, None) is None and left.positions == one.positions == 20
    for penalty in (None, 0.1):
        torch.testing.assert_close(left.fit(penalty, shifts).flat, one.fit(penalty, shifts).flat)
    other = [(x, torch.sin(target)) for x, target in batches]
    expected = summed(layer, other).fit(0.1, shifts)
    for sums, part in ((one, other), (left, other[:2]), (right, other[2:])):
        sums.forget_targets()
        for x, target in part:
            sums.add_targets(x, target)
    names = ("cross", "target_sum", "target_square")
    others = iter([getattr(half, name).clone() for half in right.halves for name in names])
    left.reduce_targets(lambda tensor: tensor + next(others))
    for sums in (one, left):
        fit = sums.fit(0.1, shifts)
        torch.testing.assert_close(fit.flat, expected.flat)
        torch.testing.assert_close(fit.shift, expected.shift)
        assert fit.error_before == pytest.approx(expected.error_before)
        assert fit.error_after == pytest.approx(expected.error_after)


def test_moments_are_means_over_all_positions():
    layer = nn.Conv2d(4, 6, (1, 2), groups=2)
    batches = data_of(layer)
    sums = summed(layer, batches)
    x, _ = joined(batches)
    square, mean = sums.moments()
    np.testing.assert_allclose(square.numpy(), np.einsum("gpi,gpj->gij", x, x) / x.shape[1])
    np.testing.assert_allclose(mean.numpy(), x.mean(1))
    assert sums.positions == 16
    nothing = RidgeSums(layer)
    assert nothing.positions == 0 and not nothing.moments()[0].any() and not nothing.moments()[1].any()


def test_halves_are_those_of_each_batch_with_the_middle_in_the_first():
    sums = summed(layer := nn.Linear(5, 3), data_of(layer, (7, 4, 1)))
    assert [int(half.count) for half in sums.halves] == [4 + 2 + 1, 3 + 2]


@pytest.mark.parametrize("positions", [(), (1,)])
def test_with_nothing_to_compare_with_nothing_changes(positions):
    layer = nn.Linear(5, 3)
    fit = summed(layer, data_of(layer, positions)).fit(None, shifts=False)
    assert fit.ridge == math.inf and torch.equal(fit.weight, layer.weight) and not fit.shift.any()
    if not positions:
        assert fit.error_before == fit.error_after == 0


def test_the_same_gram_matrix_is_factored_once(monkeypatch):
    layer = nn.Linear(5, 3)
    batches = data_of(layer)
    sums = summed(layer, batches)
    first = sums.fit(0.1, True)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *_: pytest.fail("factored again"))
    assert torch.equal(sums.fit(0.1, True).flat, first.flat)


def test_perfect_and_dead_inputs():
    """Where the layer gives its target already nothing is missed; where all inputs are zero nothing is divided by."""
    layer = nn.Linear(5, 3, bias=False)
    x = torch.randn(1, 20, 5, dtype=torch.float64)
    now = flat_weight(layer).double()
    fit = summed(layer, [(x, x @ now)]).fit(0.1, False)
    assert fit.error_before == pytest.approx(0, abs=1e-12) and fit.error_after == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(fit.flat, now)
    dead = summed(layer, [(x * 0, torch.ones(1, 20, 3, dtype=torch.float64))]).fit(0.1, True)
    torch.testing.assert_close(dead.flat, now)
    assert dead.shift.tolist() == [1, 1, 1] and dead.error_after == 0
    dead = summed(layer, [(x * 0, torch.ones(1, 20, 3, dtype=torch.float64))])
    assert dead.fit(None, False).ridge == math.inf  # no penalty does better than no change
    tiny = summed(layer, [(x * 1e-9, x @ now * 1e-9 * 2)]).fit(1e-6, False)  # a tiny scale is no dead input
    assert tiny.error_after <= tiny.error_before


@pytest.mark.parametrize("value", [1e-30, 1, 0.5, 1e9, None])
def test_a_penalty_above_zero_or_none(value):
    check_ridge(value)


@pytest.mark.parametrize("value", [0, 0.0, -1e-9, math.inf, math.nan, True, "1", [1]])
def test_what_is_no_penalty(value):
    with pytest.raises(KnapsackError, match="expected a number above 0"):
        check_ridge(value)
