"""From labels to groups, part by part: which columns, roles, names and counts, and what a number in a module counts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nets import NETS
from torch import nn
from torch.nn import functional as F

import timm_knapsack as tk
from timm_knapsack.channels import grouping
from timm_knapsack.channels.labels import Axis, Use
from timm_knapsack.channels.tracing import run_trace
from timm_knapsack.slim.channel_groups import Count, Slice
from timm_knapsack.slim.copying import on_meta
from timm_knapsack.slim.cutting import slice_model

SHAPE = (1, 3, 8, 8)


def groups_of(net, shape=SHAPE, **options):
    return tk.find_channel_groups(net, torch.empty(shape), **options)


# ---- parts


def test_a_run_of_labels_is_one_column():
    columns, a, b = grouping._Columns(), np.arange(3), np.arange(3)
    assert [columns.number(x) for x in (a, b, a, b)] == [0, 1, 0, 1]
    assert columns.labels[0] is a and columns.labels[1] is b and len(columns.labels) == 2


def test_parts_are_the_indices_of_each_unit_in_each_column():
    rng = np.random.default_rng(0)
    for _ in range(50):
        # Each unit of a group has as many entries as the others in each column that the group has.
        entries, expected = [], {}
        group_of = rng.integers(0, 3, 8)
        for group in np.unique(group_of):
            for column in range(4):
                width = rng.integers(0, 3)
                for unit in np.flatnonzero(group_of == group) if width else ():
                    index = np.sort(rng.choice(50, width, replace=False))
                    entries += [(unit, column, i) for i in index]
                    expected.setdefault((int(group), column), []).append(index.tolist())
        entries = rng.permutation(entries).reshape(-1, 3).astype(int)
        found = grouping._parts(*entries.T, group_of)
        assert {key: index.tolist() for key, index in found.items()} == expected
    assert grouping._parts(*np.zeros((3, 0), dtype=int), np.zeros(0, dtype=int)) == {}


@pytest.mark.parametrize("components, count", [
    ([0, 1, 2], Count(0, ((7, 1),))), ([2, 1, 0, 0, 1, 2], Count(0, ((7, 2),))), ([0, 1], None), ([0, 1, 2, 2], None),
    ([5], Count(1, ())), ([5, 5, 6], Count(3, ())), ([0, 1, 2, 5, 3, 4, 4, 3], Count(1, ((7, 1), (9, 2)))),
    ([3, 4, 5, 6, 5], Count(3, ((9, 1),))), ([3], None),
])  # fmt: skip
def test_an_axis_holds_each_unit_of_a_group_as_often_or_is_no_function_of_the_widths(components, count):
    group_of = np.array([0, 0, 0, 2, 2, -1, 1])  # group 1 is none that can be pruned
    sizes = {7: 3, 9: 2}
    assert grouping._count_in_axis(np.array(components), group_of, {0: 7, 2: 9}, sizes) == count


@pytest.mark.parametrize("shape, role, makes", [
    ((4, 3, 1, 1), "out", True), ((4, 1, 3, 3), "out", False), ((4, 1), "out", True), ((4, 1, 3), "out", True),
    ((4,), "out", False), ((4, 3, 1, 1), "in", False), ((4, 3), "", False), (None, "out", False),
    ((4, 2, 3, 3), "out", True),
])  # fmt: skip
def test_which_layers_make_channels(shape, role, makes):
    part = Slice("a", 0, torch.zeros(1, 1), role)
    assert grouping._makes_channels(part, {} if shape is None else {"a": shape}) == makes


# ---- what a number counts


def coupling(**values):
    return SimpleNamespace(component=np.arange(10), frozen=np.zeros(10, dtype=bool), **values)


def test_the_surest_of_what_a_number_may_count():
    """Channels alone; or else what has no pixels in it; or else all."""
    columns = SimpleNamespace(labels=[np.arange(3), np.arange(3, 6)])
    channels = np.array([True] * 5 + [False] * 5)  # the second column's last label is no channel

    def surest(*candidates):
        return grouping._surest(list(candidates), columns, channels, coupling())

    alone, pixels, both, other = (1, [0]), (4, [0]), (1, [0, 1]), (1, [1])
    assert surest(pixels, both, alone, other) == [alone]
    assert surest(pixels, both, other) == [both, other] and surest(other, pixels) == [other]
    assert surest(pixels, (2, [1])) == [pixels, (2, [1])] and surest((1, []), pixels) == [(1, [])]
    assert surest(alone, alone) == [alone, alone] and surest(pixels) == [pixels]


@pytest.mark.parametrize("axes, heads", [
    ((Axis(3, np.array([0, 1, 2])),), True), ((Axis(3, np.array([1, 2, 0])),), True),
    ((Axis(3, np.array([0, 1, 1])),), False), ((Axis(3, np.array([4, 5, 6])),), False), ((Axis(3),), False),
    ((), False),
    ((Axis(3, np.array([0, 1, 2])), Axis(2)), False), ((Axis(1, np.array([2])),), True),
])  # fmt: skip
def test_a_number_counts_heads_where_each_of_its_indices_is_another_head(axes, heads):
    flags = np.array([True] * 4 + [False] * 6)
    assert grouping._counts_heads(Use("", 3, axes), coupling(heads=flags)) == heads


class Numbers(nn.Module):
    """Own parameters, and children, whose sizes its numbers may be."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 1), nn.Linear(6, 4)
        self.scale, self.one = nn.Parameter(torch.rand(6, 1, 1)), 1
        self.width, self.num_features, self.in_features, self.kernel_size = 6, 6, 6, 6
        self.other, self.classes = 7, 4

    def forward(self, x):
        return self.fc((self.conv(x) * self.scale).mean((2, 3)))


def test_numbers_that_are_sizes_of_own_parameters_follow():
    net = Numbers()
    groups = groups_of(net)
    assert {(a.module, a.path) for a in groups.attributes} >= {("", "width"), ("", "num_features"), ("", "in_features")}
    slim = slice_model(net, groups, {"conv": [0, 2]})
    assert (slim.width, slim.num_features, slim.in_features, slim.kernel_size) == (2, 2, 2, 6)
    assert (slim.one, slim.other, slim.classes) == (1, 7, 4) and slim.fc.in_features == 2


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.num_features, self.width, self.in_features = nn.Linear(6, 4), 6, 6, 4

    def forward(self, x):
        return self.fc(x)


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 1), Head()

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))


def test_a_heads_number_of_features_is_its_classifiers():
    net = Headed()
    slim = slice_model(net, groups_of(net), {"conv": [0, 2]})
    assert (slim.head.num_features, slim.head.in_features) == (2, 4)


# ---- names and roles


class Parts(nn.Module):
    """A conv whose parts go different ways, a weight of the network's own, and what is not used."""

    def __init__(self):
        super().__init__()
        self.conv1, self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 6, 1), nn.Conv2d(5, 6, 1)
        self.weight, self.fc = nn.Parameter(torch.randn(5, 6, 1, 1)), nn.Linear(5, 4)
        self.unused, self.spare, self.none = (
            nn.Conv2d(3, 4, 1),
            nn.Parameter(torch.randn(2, 2)),
            nn.Parameter(torch.randn(3)),
        )
        self.register_buffer("gain", torch.rand(5, 1, 1), persistent=False)

    def forward(self, x):
        one, two = self.conv1(x).split([3, 5], 1)
        y = self.a(one.relu()) + self.b(two.exp())
        return self.fc((F.conv2d(y, self.weight) * self.gain).mean((2, 3)))


@pytest.fixture(scope="module")
def parts():
    return groups_of(Parts(), verify="none")


def test_groups_are_named_after_their_first_layer_in_its_order(parts):
    assert [(group.name, group.size) for group in parts] == [("weight", 5), ("conv1", 3), ("conv1#2", 5), ("a", 6)]
    assert {group.name for group in parts if group.is_stream} == {"a"}
    assert not any(group.crosses_norm for group in parts)


def test_buffers_that_are_not_saved_are_hidden(parts):
    group = parts["weight"]
    assert [s.param for s in group.hidden_slices] == ["gain"]
    assert {(s.param, s.dim, s.role) for s in group.slices} == {("weight", 0, "out"), ("fc.weight", 1, "in")}
    assert all(s.index.tolist() == [[i] for i in range(5)] and s.index.dtype == torch.int64 for s in group.slices)


def test_what_can_not_be_pruned_has_a_reason(parts):
    assert set(parts.frozen) == {"fc", "unused.weight", "spare"}
    assert parts.frozen["spare"] == parts.frozen["unused.weight"] == "the forward pass does not use it"
    top = nn.Linear(3, 4)
    groups = groups_of(top, (1, 3))
    assert len(groups) == 0 and list(groups.frozen) == ["weight"]


@pytest.mark.parametrize("name", ["PlainChain", "SkipConnections"])
def test_roles_of_weights(name):
    net = NETS[name]
    for group in groups_of(net.build(), net.shape, verify="none"):
        for s in (*group.slices, *group.hidden_slices):
            expected = "" if not s.param.endswith("weight") or "bn" in s.param else ("out", "in")[s.dim]
            assert s.role == expected, (s.param, s.dim)


def test_streams_are_where_several_layers_add():
    for name in ("PlainChain", "SkipConnections"):
        found = {group.name for group in groups_of(NETS[name].build(), NETS[name].shape) if group.is_stream}
        assert found == ({"stem"} if name == "SkipConnections" else set())

    class Deepened(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.deep, self.fc = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1, groups=6), nn.Linear(6, 4)

        def forward(self, x):
            x = self.conv(x)
            return self.fc((x + self.deep(x) + x.relu()).mean((2, 3)))

    assert not groups_of(Deepened())["conv"].is_stream  # a depthwise conv passes channels on


@pytest.mark.parametrize("inputs, shape", [((), None), (("words",), None), (([1], torch.zeros(1, 2)), None),
                                           ((torch.zeros(1, 2), "words"), (1, 2))])  # fmt: skip
def test_the_shape_of_the_first_input_where_it_is_a_tensor(inputs, shape):
    net = on_meta(NETS["PlainChain"].build())
    trace = run_trace(net, (torch.empty(SHAPE, device="meta"),))
    assert grouping.groups_of(net, net, trace, inputs).input_shape == shape


# ---- costs


@pytest.mark.parametrize("name", sorted(NETS))
def test_macs_at_any_widths_are_those_of_the_slim_network(name):
    """And what lives of maps at the full widths is what it is at them."""
    net = NETS[name]
    model = net.build().eval()
    groups = groups_of(model, net.shape)
    rng = np.random.default_rng(0)
    for _ in range(2):
        keep = {g.name: sorted(rng.choice(g.size, rng.integers(1, g.size + 1), replace=False).tolist()) for g in groups
                if not g.crosses_norm or g.size > 2}  # fmt: skip
        sizes = [len(keep.get(g.name, range(g.size))) for g in groups]
        slim = slice_model(model, groups, keep)
        assert groups.macs(sizes) == groups_of(slim, net.shape, verify="none").macs()
    if groups.maps is not None:
        for term in groups.maps:
            assert term.first <= term.last and term.constant > 0
            assert all(count.fixed >= 0 and all(times > 0 for _, times in count.units) for count in term.counts)
