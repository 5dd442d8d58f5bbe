"""Which way groups are verified: by values where that takes a small share of scoring, and the groups say which."""

import pytest
import timm
import torch
from nets import PlainChain
from torch import nn

import timm_knapsack as tk
from timm_knapsack.channels import value_check
from timm_knapsack.errors import TraceError

SHAPE = (1, 3, 8, 8)


class Dense(nn.Module):
    """Each weight is used once: valuing its channels takes less than copying its weights."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu())


def test_values_are_compared_where_that_takes_a_tenth_of_scoring_and_the_groups_say_which():
    # 8 passes of one image in float64, a MAC of which takes two, against 256 images forward and backward.
    with torch.device("meta"):
        large = timm.create_model("vit_base_patch8_224")
    groups = tk.find_channel_groups(large, verify="none")
    weights = sum(p.numel() for p in large.parameters())
    assert groups.macs() > 60e9 and weights < 200e6
    assert value_check.work_of_check(groups) == 16 * groups.macs() + 1000 * weights
    assert value_check.work_of_check(groups) < 0.1 * 256 * 3 * groups.macs()
    assert value_check.too_dear(groups) == ""
    # An MLP of 150 M weights, which one image uses once each: 2 x 16 + 1000 against 768 MACs for each of them.
    with torch.device("meta"):
        dense = Dense(12_247)
    groups = tk.find_channel_groups(dense, torch.empty(1, 3, device="meta"))
    assert (groups.verified, groups.verified_note) == (
        "shapes",
        "it would take 134% of scoring 256 images, more than 10%",
    )
    assert "verified: shapes" in repr(groups)


def test_a_network_of_seconds_is_compared_whatever_the_share_is(monkeypatch):
    groups = tk.find_channel_groups(Dense(64), torch.empty(1, 3))
    assert value_check.work_of_check(groups) > 256 * 3 * groups.macs() and groups.verified == "values"
    monkeypatch.setattr(value_check, "LITTLE_WORK", 0)
    assert tk.find_channel_groups(Dense(64), torch.empty(1, 3)).verified == "shapes"
    asked = tk.find_channel_groups(Dense(64), torch.empty(1, 3), verify="values")
    assert (asked.verified, asked.verified_note) == ("values", "")


def test_many_parameters_are_verified_by_shapes_whatever_the_share_is(monkeypatch):
    monkeypatch.setattr(value_check, "MOST_PARAMETERS", 100)
    groups = tk.find_channel_groups(PlainChain(), torch.empty(SHAPE))
    count = sum(tensor.numel() for tensor in PlainChain().state_dict().values())
    assert (groups.verified, groups.verified_note) == ("shapes", f"{count:.3g} parameters, more than 100")


def test_no_verification_says_so_and_other_words_are_refused():
    assert tk.find_channel_groups(PlainChain(), torch.empty(SHAPE), verify=False).verified == "none"
    assert tk.find_channel_groups(PlainChain(), torch.empty(SHAPE), verify=True).verified == "values"
    with pytest.raises(TraceError, match="verify must be one of 'auto', 'values', 'shapes', 'none', got 'value'"):
        tk.find_channel_groups(PlainChain(), torch.empty(SHAPE), verify="value")


class Noisy(PlainChain):
    def features(self, x):
        x = self.conv1(x)
        return self.conv2(self.bn1(x + torch.rand_like(x)).relu())


class NotFinite(PlainChain):
    def features(self, x):
        return super().features(x) / 0


@pytest.mark.parametrize("build, why", [(Noisy, "its outputs are random"), (NotFinite, "not finite")])
def test_networks_whose_values_say_nothing(build, why):
    groups = tk.find_channel_groups(build(), torch.empty(SHAPE))
    assert groups.verified == "shapes" and why in groups.verified_note
    with pytest.raises(TraceError, match=rf"{build.__name__} can't be compared: .*{why}.*; pass verify='shapes'"):
        tk.find_channel_groups(build(), torch.empty(SHAPE), verify="values")
