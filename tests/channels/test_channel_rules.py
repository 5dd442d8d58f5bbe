"""The op table is open: a user's rule replaces or adds one; without a rule, what reaches an op is frozen."""

import pytest
import torch
from oracle import random_keep, seeded, slim_differs_from_masked
from torch import nn

import timm_knapsack as tk
from timm_knapsack.channels.labels import Axis, Labels, Layout, size_of
from timm_knapsack.channels.op_rules import RULES, elementwise
from timm_knapsack.errors import KnapsackError

SHAPE = (1, 3, 8, 8)


@torch.library.custom_op("knapsack_test::scale_channels", mutates_args=())
def scale_channels(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale.view(1, -1, 1, 1)


@scale_channels.register_fake
def _(x, scale):
    return torch.empty_like(x)


scale_channels.register_autograd(lambda context, gradient: (gradient, None))


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return scale_channels(x, self.scale)


class Scaled(nn.Module):
    """An op of another library between two convs."""

    def __init__(self):
        super().__init__()
        self.conv1, self.scaled, self.conv2 = nn.Conv2d(3, 6, 3), Scale(6), nn.Conv2d(6, 5, 3)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        return self.fc(self.conv2(self.scaled(self.conv1(x))).relu().mean((2, 3)))


@pytest.fixture
def rules(monkeypatch):
    """The table as it is now; whatever a test registers is forgotten after it."""
    for op, rule in list(RULES.items()):
        monkeypatch.setitem(RULES, op, rule)
    before = set(RULES)
    yield RULES
    for op in set(RULES) - before:
        del RULES[op]


def test_an_op_without_a_rule_freezes_what_reaches_it_and_says_so():
    groups = tk.find_channel_groups(Scaled(), torch.empty(SHAPE))
    assert [group.name for group in groups] == ["conv2"]
    assert groups.frozen["conv1"] == (
        "no rule for the op knapsack_test.scale_channels (knapsack_test.scale_channels in scaled)"
    )


def test_a_users_rule_frees_the_channels(rules):
    @tk.register_rule("knapsack_test::scale_channels")
    def scale_rule(labels, op, layouts, args, kwargs, outputs):
        x, scale = layouts(args[0]), layouts(args[1])
        return Layout([x.dims[0], labels.tie(x.dims[1], scale.dims[0]), *x.dims[2:]])

    model = seeded(Scaled())
    groups = tk.find_channel_groups(model, torch.empty(SHAPE))
    assert {group.name: group.size for group in groups} == {"conv1": 6, "conv2": 5}
    assert ("scaled.scale", 0) in {(s.param, s.dim) for s in groups["conv1"].slices}
    assert slim_differs_from_masked(model, groups, random_keep(groups, 3), SHAPE) < 1e-9


def test_a_rule_that_forgets_a_tie_is_caught_by_values(rules):
    @tk.register_rule("knapsack_test::scale_channels")
    def forgets_the_scale(labels, op, layouts, args, kwargs, outputs):
        layouts(args[1])
        return layouts(args[0])

    # On the meta device the fake kernel does not look at the scale's size: only its slices would be missing.
    model = seeded(Scaled())
    groups = tk.find_channel_groups(model, torch.empty(SHAPE), verify="shapes")
    with pytest.raises(RuntimeError, match="must match the size"):
        slim_differs_from_masked(model, groups, {"conv1": [0, 2]}, SHAPE)
    groups = tk.find_channel_groups(model, torch.empty(SHAPE))
    assert "conv1" not in groups.by_name and "must match the size" in groups.frozen["conv1"]


def test_a_rule_with_the_wrong_shape_freezes_instead_of_lying(rules):
    @tk.register_rule("relu")
    def loses_a_dim(labels, op, layouts, args, kwargs, outputs):
        return Layout(layouts(args[0]).dims[1:])

    groups = tk.find_channel_groups(Scaled(), torch.empty(SHAPE))
    assert "the rule for aten.relu does not give the op's shape" in groups.frozen["conv2"]


def test_names_without_a_library_mean_aten(rules):
    @tk.register_rule("sort", "aten::topk")
    def both(labels, op, layouts, args, kwargs, outputs):
        raise AssertionError("not called")

    assert RULES["aten::sort"] is RULES["aten::topk"] is both


@pytest.mark.parametrize("name", ["", None, torch.ops.aten.relu.default])
def test_a_rule_needs_the_name_of_an_op(name, rules):
    with pytest.raises(KnapsackError, match="takes op names such as 'aten::add'"):
        tk.register_rule(name)(elementwise)


# ---- labels: views and ties by themselves ---------------------------------------------------------------------------


def test_a_view_that_splits_and_merges_again_gives_the_same_labels():
    labels = Labels()
    dim = labels.new_dim(24)
    batch, heads, width = labels.view([(), dim], [1, 3, 8])
    assert batch == () and [axis.size for axis in (*heads, *width)] == [3, 8]
    (merged,) = labels.view([heads, width], [24])
    assert merged[0].labels is dim[0].labels


def test_a_view_across_channels_freezes_them():
    labels = Labels()
    dims = [labels.new_dim(6), (Axis(4),)]
    result = labels.view(dims, [8, 3])
    assert [size_of(dim) for dim in result] == [8, 3] and all(axis.labels is None for dim in result for axis in dim)
    assert labels.frozen[0][1].startswith("a view cuts across channels")


def test_pixels_may_be_cut_anywhere():
    labels = Labels()
    channels = labels.new_dim(5)
    result = labels.view([channels, (Axis(6),), (Axis(4),)], [5, 8, 3])
    assert result[0] == channels and [size_of(dim) for dim in result[1:]] == [8, 3] and not labels.frozen


def test_a_channel_that_meets_a_dim_without_channels_is_frozen():
    labels = Labels()
    channels = labels.new_dim(5)
    labels.tie(channels, (Axis(5),))
    assert labels.frozen[0][0] is channels[0].labels and "holds no channels" in labels.frozen[0][1]
    labels.frozen.clear()
    assert labels.tie(channels, ()) is channels and not labels.frozen, "size 1 broadcasts"
