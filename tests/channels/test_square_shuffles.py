"""Channel shuffles that turn a square: shapes fit whichever way it is turned, so values must tell."""

import pytest
import torch
from oracle import TOLERANCE, random_keep, seeded, slim_differs_from_masked
from torch import nn

import timm_knapsack as tk

SHAPE = (1, 3, 6, 6)


class Shuffled(nn.Module):
    def __init__(self, channels, groups, within):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 6, 1), nn.Linear(6, 4)
        self._parts = groups, within

    def forward(self, x):
        x = self.conv1(x)
        batch, channels, height, width = x.shape
        groups, within = self._parts
        x = x.view(batch, groups, channels // groups if within is None else within, height, width)
        return self.fc(self.conv2(x.transpose(1, 2).reshape(batch, -1, height, width).relu()).mean((2, 3)))


@pytest.mark.parametrize("channels, groups, within", [(16, 4, None), (64, 8, None), (16, -1, 4), (64, -1, 8)])
def test_slim_is_masked(channels, groups, within):
    net = seeded(Shuffled(channels, groups, within))
    found = tk.find_channel_groups(net, torch.empty(SHAPE))
    assert found.verified == "values" and len(found) >= 1
    for seed in range(4):
        keep = random_keep(found, seed)
        assert slim_differs_from_masked(net, found, keep, SHAPE) < TOLERANCE
