"""The penalty of a layer's fit: the one that does best on the half of the images that was not fitted."""

import math

import pytest
import torch
from torch import nn

from timm_knapsack.recovery import ridge
from timm_knapsack.recovery.ridge import PENALTIES, RidgeSums


def sums_of(layer, positions, noise, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sums, truth = RidgeSums(layer), torch.randn(layer.weight.shape, generator=draw)
    x = torch.randn(1, positions, layer.in_features, generator=draw)
    sums.add(x, x @ truth.T + noise * torch.randn(1, positions, layer.out_features, generator=draw))
    return sums, truth


def test_where_much_is_known_the_least_penalty_is_best():
    sums, truth = sums_of(nn.Linear(6, 3), 400, noise=0.0)
    fit = sums.fit(None, shifts=True)
    assert fit.ridge == PENALTIES[0] and torch.allclose(fit.weight, truth, atol=1e-3)


@pytest.mark.parametrize("many", [False, True], ids=["both halves", "one half"])
@pytest.mark.parametrize("noise", [0.1, 1.0, 3.0, 10.0, 30.0])
def test_the_penalty_is_the_best_of_those_tried(noise, many, monkeypatch):
    """By the definition: fit on one half, mean squared error on the other, summed where both are tried."""
    monkeypatch.setattr(ridge, "MANY_INPUTS", 1 if many else 1500)
    layer = nn.Linear(12, 4, bias=False)
    sums, _ = sums_of(layer, 40, noise)
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(layer.weight.shape, generator=draw)
    x = torch.randn(1, 40, 12, generator=draw).double()[0]
    target = x @ truth.double().T + noise * torch.randn(1, 40, 4, generator=draw).double()[0]
    now = layer.weight.detach().double().T

    def error(penalty):
        total = 0.0
        for fitted, asked in ((slice(0, 20), slice(20, 40)), (slice(20, 40), slice(0, 20)))[: 1 if many else 2]:
            a, rest = x[fitted], target[fitted] - x[fitted] @ now
            gram = a.T @ a / 20
            damped = gram + penalty * gram.diagonal().mean() * torch.eye(12, dtype=gram.dtype)
            change = torch.linalg.solve(damped, a.T @ rest / 20) if penalty < math.inf else torch.zeros_like(now)
            total += (target[asked] - x[asked] @ (now + change)).square().sum().item() / 20
        return total

    offered = (*(ridge.FEW_PENALTIES if many else PENALTIES), math.inf)
    assert sums.fit(None, shifts=False).ridge == min(offered, key=error)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_penalty_is_a_share_of_the_inputs_mean_square(scale):
    layer, draw = nn.Linear(6, 3, bias=False), torch.Generator().manual_seed(0)
    x, target = (torch.randn(1, 50, n, generator=draw, dtype=torch.float64) * scale for n in (6, 3))
    sums = RidgeSums(layer)
    sums.add(x, target)
    now = layer.weight.detach().double().T
    gram = x[0].T @ x[0] / 50
    damped = gram + 0.1 * gram.diagonal().mean() * torch.eye(6, dtype=gram.dtype)
    change = torch.linalg.solve(damped, x[0].T @ (target[0] - x[0] @ now) / 50)
    torch.testing.assert_close(sums.fit(0.1, shifts=False).flat[0], now + change)


def test_without_a_second_half_nothing_is_changed():
    layer = nn.Linear(6, 3)
    sums, _ = sums_of(layer, 1, noise=0.0)
    fit = sums.fit(None, shifts=False)
    assert fit.ridge == math.inf and torch.equal(fit.weight, layer.weight)
