"""One parameter under two names: it is known by its first, and both modules follow."""

import torch
from oracle import TOLERANCE, random_keep, seeded, slim_differs_from_masked
from torch import nn

import timm_knapsack as tk

SHAPE = (1, 3, 8, 8)


class Scale(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.channels = weight.shape[0]

    def forward(self, x):
        return x * self.weight.view(1, self.channels, 1, 1)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.rand(8))
        self.conv1, self.first = nn.Conv2d(3, 8, 3), Scale(weight)
        self.conv2, self.second, self.fc = nn.Conv2d(8, 8, 3), Scale(weight), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(self.conv1(x))
        return self.fc(self.second(self.conv2(x)).mean((2, 3)))


def test_two_layers_with_one_scale_lose_the_same_units():
    net = seeded(Shared())
    groups = tk.find_channel_groups(net, torch.empty(SHAPE))
    group = groups["conv1"]
    assert len(groups) == 1 and {s.param for s in group.slices} >= {"conv1.weight", "conv2.weight", "first.weight"}
    slim = tk.slice_model(net, groups, {"conv1": [1, 4, 6]})
    assert slim.first.weight is slim.second.weight and slim.first.channels == slim.second.channels == 3
    for seed in range(3):
        assert slim_differs_from_masked(net, groups, random_keep(groups, seed), SHAPE) < TOLERANCE
