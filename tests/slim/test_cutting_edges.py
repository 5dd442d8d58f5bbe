"""Edges of the cut: names that stand twice, the last channel, the numbers of layers."""

import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.errors import ChannelConfigError
from timm_knapsack.slim.attributes import sync_layer
from timm_knapsack.slim.channel_config import ChannelConfig
from timm_knapsack.slim.cutting import resize_model, slice_model


class Scaled(nn.Module):
    """Its own parameter is called ``scale``, and so is a plain tensor of the module inside."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.inner = nn.Identity()
        self.inner.scale = torch.arange(8.0)

    def forward(self, x):
        return self.fc((self.inner(self.conv(x)) * self.scale).mean((2, 3)))


def test_a_plain_tensor_with_the_name_of_a_parameter_is_left_as_it_is():
    net = Scaled()
    groups = tk.find_channel_groups(net, torch.empty(1, 3, 8, 8))
    slim = slice_model(net, groups, {"conv": [1, 5]})
    assert torch.equal(slim.scale, net.scale[[1, 5]]) and torch.equal(slim.inner.scale, torch.arange(8.0))


@pytest.mark.parametrize("last, fits", [(7, True), (8, False)])
def test_kept_names_channels_that_the_base_has(last, fits):
    config = ChannelConfig("net", {"0.weight": {0: 2}}, kept={"0.weight": {0: [0, last]}})
    base = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False))
    if fits:
        assert resize_model(base, config)[0].out_channels == 2
    else:
        with pytest.raises(ChannelConfigError, match=r"names channel 8, the base model has 8"):
            resize_model(base, config)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_numbers_of_grouped_convs_are_those_of_their_weights(kind):
    whole, slim = kind(8, 12, 3, groups=4), kind(4, 6, 3, groups=2)
    whole.weight, whole.groups = slim.weight, 2
    sync_layer(whole)
    assert (whole.in_channels, whole.out_channels) == (4, 6)
