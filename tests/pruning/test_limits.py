"""How few units may stay: what a norm across channels leaves of one channel, and of one unit of several."""

import torch
from nets import NETS

import timm_knapsack as tk
from timm_knapsack.pruning.limits import Limits


def ranges(name: str) -> dict[str, tuple[int, int]]:
    groups = tk.find_channel_groups(NETS[name].build().eval(), torch.zeros(NETS[name].shape))
    return {group.name: Limits(groups, 1, 1, (), {}).range(group, 1) for group in groups if group.crosses_norm}


def test_a_norm_over_a_single_channel_leaves_nothing_of_it():
    found = ranges("LayerNormed")
    assert found and {least for least, _ in found.values()} == {2}


def test_one_unit_of_several_channels_is_enough_for_a_norm():
    assert ranges("GroupNormed") == {"conv1": (1, 4)}, "groups of three channels"
