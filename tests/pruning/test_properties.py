"""Whatever units are kept, the slim model computes what the full one does with zeros in place of the removed units."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nets import NETS, PlainChain
from oracle import TOLERANCE, check_pruned, random_keep, seeded, slim_differs_from_masked, torch_macs, widths_of

import timm_knapsack as tk
from timm_knapsack.channels import shape_rules  # noqa: F401  (the other half of RULES)
from timm_knapsack.channels.op_rules import RULES, elementwise, plain
from timm_knapsack.slim.channel_groups import ChannelGroups
from timm_knapsack.slim.cutting import slice_model

PRUNABLE = [name for name, net in NETS.items() if net.groups]
EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@functools.cache
def traced(name: str):
    net = NETS[name]
    torch.manual_seed(0)
    model = seeded(net.build())
    return model, tk.find_channel_groups(model, torch.empty(net.shape)), net.shape


def keeps(groups: ChannelGroups):
    """Any choice that keeps at least one unit of each group; a group may be left out."""
    choices = {group.name: st.sets(st.integers(0, group.size - 1), min_size=1).map(sorted) for group in groups}
    return st.fixed_dictionaries({}, optional=choices)


@pytest.mark.parametrize("name", PRUNABLE)
def test_slim_equals_masked(name):
    model, groups, shape = traced(name)

    @EXAMPLES
    @given(keep=keeps(groups))
    @example(keep={group.name: [0] for group in groups})
    @example(keep={group.name: [group.size - 1] for group in groups})
    def holds(keep):
        assert slim_differs_from_masked(model, groups, keep, shape) < TOLERANCE
        slim = slice_model(model, groups, keep)
        assert torch_macs(slim, shape) == groups.macs(widths_of(groups, keep))

    holds()


@pytest.mark.parametrize("name", PRUNABLE)
def test_slim_models_train_and_rebuild(name):
    model, groups, shape = traced(name)
    for seed in (1, 2):
        check_pruned(model, groups, random_keep(groups, seed), shape)


@pytest.mark.parametrize("name", PRUNABLE)
def test_pruning_in_two_steps_is_pruning_in_one(name):
    """The slim model is an ordinary model: it can be traced and pruned again."""
    model, groups, shape = traced(name)
    keep = {g.name: torch.arange(0, g.size, 2) if g.size > 2 else torch.arange(g.size) for g in groups}
    once = slice_model(model, groups, keep)
    again = tk.find_channel_groups(once, torch.empty(shape))
    assert again.macs() == groups.macs(widths_of(groups, keep))
    assert slim_differs_from_masked(once, again, random_keep(again, 5), shape) < TOLERANCE


# ---- the same checker fails where it should -------------------------------------------------------------------------


def add_that_does_not_tie(labels, op, layouts, args, kwargs, outputs):
    return layouts(args[0]) if layouts.is_tensor(args[0]) else layouts(args[1])


def cat_that_swaps_its_parts(labels, op, layouts, args, kwargs, outputs):
    right = RULES_BEFORE["aten::cat"]
    d = args[1] if len(args) > 1 else 0
    result = right(labels, op, layouts, (args[0], *args[1:]), kwargs, outputs)
    axis = result.dims[d][0]
    axis.labels = axis.labels[::-1].copy()
    return result


def norm_that_is_not_tied(labels, op, layouts, args, kwargs, outputs):
    return (layouts(args[0]), *(plain(y.shape) for y in outputs[1:]))


RULES_BEFORE = dict(RULES)
BROKEN = [
    ("SkipConnections", "aten::add", add_that_does_not_tie),
    ("DenselyJoined", "aten::cat", cat_that_swaps_its_parts),
    ("PlainChain", "aten::native_batch_norm", norm_that_is_not_tied),
]


@pytest.mark.parametrize("name, op, broken", BROKEN, ids=[f"{name}-{op}" for name, op, _ in BROKEN])
def test_a_broken_rule_makes_the_checker_fail(monkeypatch, name, op, broken):
    """Without the dry run, which would refuse these groups, the oracle or a shape error shows the mistake."""
    net = NETS[name]
    model = seeded(net.build())
    monkeypatch.setitem(RULES, op, broken)
    if op == "aten::add":
        monkeypatch.setitem(RULES, "aten::add_", broken)
    groups = tk.find_channel_groups(model, torch.empty(net.shape), verify=False)
    failures = 0
    for seed in range(4):
        try:
            failures += slim_differs_from_masked(model, groups, random_keep(groups, seed), net.shape) >= TOLERANCE
        except (RuntimeError, ValueError, IndexError):
            failures += 1
    assert failures >= 2


@pytest.mark.parametrize("name, op, broken", [BROKEN[0], BROKEN[2]])
def test_the_dry_run_refuses_a_tie_that_a_rule_forgot(monkeypatch, name, op, broken):
    net = NETS[name]
    model = seeded(net.build())
    monkeypatch.setitem(RULES, op, broken)
    groups = tk.find_channel_groups(model, torch.empty(net.shape))
    for seed in range(3):
        assert slim_differs_from_masked(model, groups, random_keep(groups, seed), net.shape) < TOLERANCE


def test_the_checker_sees_a_tie_that_a_wrong_keep_breaks():
    """Zeroing other units than those that were cut is noticed."""
    model, groups, shape = traced("PlainChain")
    assert slim_differs_from_masked(model, groups, {"conv1": [0, 1]}, shape) < TOLERANCE
    wrong = tk.find_channel_groups(model, torch.empty(shape))
    for s in wrong["conv1"].slices:
        if s.param == "conv2.weight":
            s.index.copy_(s.index.flip(0))
    assert slim_differs_from_masked(model, wrong, {"conv1": [0, 1]}, shape) > 1e-3


def test_every_elementwise_op_shares_one_rule():
    assert RULES["aten::add"] is RULES["aten::mul"] is elementwise


# ---- numbers in the code that depend on a width ----------------------------------------------------------------


class WidthAsANumber(PlainChain):
    """The width is used in arithmetic, which no shape shows."""

    def features(self, x):
        x = self.conv1(x)
        return self.conv2(self.bn1(x * x.shape[1] ** -0.5).relu())


class LiteralCutWithoutATie(PlainChain):
    """A number in the code cuts channels, and both parts meet nothing that would show where the cut belongs."""

    def features(self, x):
        x = self.bn1(self.conv1(x))
        return self.conv2(torch.cat([x[:, :3] * 2, x[:, 3:]], 1).relu())


def test_a_cut_at_a_literal_is_seen_and_frozen():
    groups = tk.find_channel_groups(seeded(LiteralCutWithoutATie()), torch.empty(1, 3, 8, 8))
    assert "conv1" not in groups.by_name and groups.frozen["conv1"]


def test_code_that_calculates_with_a_width_is_seen_and_frozen():
    """No shape shows it; values do."""
    groups = tk.find_channel_groups(seeded(WidthAsANumber()), torch.empty(1, 3, 8, 8))
    assert "conv1" not in groups.by_name and "outputs differ by" in groups.frozen["conv1"]
