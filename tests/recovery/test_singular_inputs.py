"""Inputs that depend on each other: next to no penalty gives what a small one gives, and no error of the algebra."""

import pytest
import torch
from torch import nn

import timm_knapsack as tk


@pytest.fixture(scope="module")
def alike():
    """A network whose inner channels are all the same, cut to half of its MACs, and images."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 4)).eval()
    with torch.no_grad():
        net[0].weight[1:], net[0].bias[1:] = net[0].weight[:1].clone(), net[0].bias[:1].clone()
    groups = tk.find_channel_groups(net, torch.empty(1, 3, 8, 8))
    scores = {group.name: torch.arange(1.0, group.size + 1) for group in groups}
    result = tk.prune(net, scores=scores, budget=tk.Budget(macs=0.5), groups=groups)
    return net, groups, result, [torch.randn(8, 3, 8, 8) for _ in range(3)]


@pytest.mark.parametrize("ridge", [1e-12, 1e-17, 1e-30, 1e-320])
def test_next_to_no_penalty_is_a_small_one(alike, ridge):
    net, groups, result, images = alike
    outputs = []
    for penalty in (1e-9, ridge):
        slim = tk.slice_model(net, groups, result.keep)
        slim = tk.recover(slim, net, images, kept=result.kept_channels, ridge=penalty).eval()
        with torch.no_grad():
            outputs.append(slim(images[0]))
    assert torch.allclose(*outputs, rtol=1e-3, atol=1e-4)
