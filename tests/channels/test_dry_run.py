"""The dry run on the meta device: each way in which shapes can give a mistake away, and that right groups pass."""

import numpy as np
import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.channels.dry_run import ShapeCheck
from timm_knapsack.channels.grouping import groups_of
from timm_knapsack.channels.tracing import run_trace
from timm_knapsack.slim.copying import on_meta

SHAPE = (1, 3, 8, 8)


class Between(nn.Module):
    """A conv of 16 channels, a function of its output, a conv."""

    def __init__(self, does):
        super().__init__()
        self.conv1, self.side, self.fc = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1), nn.Linear(6, 4)
        self.conv2 = nn.Conv2d(does(self, torch.zeros(1, 16, 6, 6)).shape[1], 6, 1)
        self.does = does

    def forward(self, x):
        return self.fc(self.conv2(self.does(self, self.conv1(x))).mean((2, 3)))


def negated_in_place(net, y):
    y = y.clone()
    y[:, 8:].mul_(-1)
    return y


def called_as_often_as_there_are_channels(net, y):
    for _ in range(y.shape[1] // 8):
        y = y + net.side(y).mean(1, keepdim=True)
    return y


WRONG = {
    "a cut": (negated_in_place, "a cut falls in another place than in the full model"),
    "cut from the end": (lambda net, y: torch.cat([y[:, :-8].exp(), y[:, -8:]], 1), "a cut falls|are cut into"),
    "parts": (lambda net, y: torch.cat([q * i for i, q in enumerate(y.split(4, 1))], 1), "parts instead of 4"),
    "a tie": (lambda net, y: torch.cat([y.narrow(1, 2, 6).exp(), y], 1), "channels meet that are not one unit"),
    "MACs": (called_as_often_as_there_are_channels, "MACs are left instead of"),
    "a shape": (lambda net, y: y.view(y.shape[0], 16, -1).view_as(y), "invalid for input of size|shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_shapes_give_away_is_frozen_with_the_reason(name):
    does, words = WRONG[name]
    net = Between(does)
    groups = tk.find_channel_groups(net, torch.empty(SHAPE), verify="shapes")
    made = {s.param for g in groups if g.size == 16 for s in g.slices if s.role == "out"}
    assert "conv1.weight" not in made
    reasons = " ".join(groups.frozen[layer] for layer in groups.frozen if layer.startswith("conv1"))
    assert reasons.startswith("the dry run without some of its channels fails: ")
    assert any(word in reasons for word in words.split("|"))


def check_of(net):
    shadow, inputs = on_meta(net), (torch.empty(SHAPE, device="meta"),)
    trace = run_trace(shadow, inputs)
    return ShapeCheck(groups_of(net, shadow, trace, inputs), shadow, inputs, trace)


def test_right_groups_pass_every_draw():
    check = check_of(Between(lambda net, y: y.relu() + net.side(y)))
    assert [group.name for group in check.groups] == ["conv1", "conv2"]
    for draw in check.draws:
        for chosen in ([0], [1], [0, 1], []):
            assert check.failure(chosen, draw) is None


@pytest.mark.parametrize("width, draws", [(2, 6), (4, 6), (5, 2), (16, 2)])
def test_few_units_are_drawn_more_often(width, draws):
    """Of four units and less: widths that must not agree can agree by chance."""
    check = check_of(nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, 9, 1), nn.Conv2d(9, 2, 1)))
    assert [group.size for group in check.groups] == [width, 9] and len(check.draws) == draws


def test_an_output_that_follows_the_width_is_seen():
    class Told(Between):
        def forward(self, x):
            return super().forward(x), x.new_zeros(self.conv1.weight.shape[0])

    check = check_of(Told(lambda net, y: y))
    failure = str(check.failure([0], 1))
    assert failure.startswith("the output becomes [(1, 4), (") and failure.endswith("instead of [(1, 4), (16,)]")
    assert check.failure([1], 1) is None


def test_a_tie_that_is_none_of_the_full_model_is_seen_whichever_units_it_joins():
    check = check_of(Between(lambda net, y: y.relu()))
    trace = run_trace(check.shadow, check.inputs)
    assert check._wrong_tie(trace, {}) is None
    for (name, dim), first in check._first_label.items():
        for other in range(1, check.groups.shapes[name][dim]):
            for tie in ((first, first + other), (first + other, first)):
                trace.labels.ties.append(tuple(np.array([label]) for label in tie))
                assert "channels meet" in str(check._wrong_tie(trace, {})), (name, dim, other)
                trace.labels.ties.pop()
