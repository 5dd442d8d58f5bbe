"""A network without some blocks: its groups are the original's, its costs are counted, slim = masked, config = slim."""

import pytest
import torch
from blocks_net import BRANCHES, blocks_net, images

import timm_knapsack as tk
from timm_knapsack.channels.verification import without_groups
from timm_knapsack.costs.latency.cost import LatencyCost
from timm_knapsack.costs.latency.time_surface import Surface
from timm_knapsack.errors import KnapsackError
from timm_knapsack.maps.branches import find_branches
from timm_knapsack.pruning.shortening import _matched, shorten
from timm_knapsack.slim.channel_groups import Count
from timm_knapsack.slim.cutting import mask_model, resize_model, slice_model

SIZE = (3, 8, 8)
CHOSEN = ("blocks.1", "blocks.4", "tokens.0.mix", "tokens.1.mix", "tokens.1.mlp")


@pytest.fixture(scope="module")
def network():
    net = blocks_net()
    groups = tk.find_channel_groups(net, torch.zeros(1, *SIZE))
    branches, _ = find_branches(net, images()[0])
    chosen = [branch for branch in branches if branch.name in CHOSEN]
    return net, groups, shorten(net, groups, chosen, branches)


def test_its_groups_are_the_originals(network):
    _, groups, shorter = network
    assert shorter.groups.verified == "values" and shorter.blocks == CHOSEN
    assert [groups[number].size for number in shorter.left] == shorter.groups.sizes
    assert [groups[number].name for number in shorter.left] == [group.name for group in shorter.groups]
    gone = set(groups.by_name) - {groups[number].name for number in shorter.left}
    assert gone == {"blocks.1.conv1", "blocks.4.conv1", "tokens.1.mlp.0"}
    values = {group.name: group.size for group in groups}
    assert shorter.values_of(values) == {group.name: group.size for group in shorter.groups}


def test_groups_that_are_not_the_originals_are_refused(network):
    """Shown to fail: the groups of a network that is thinner."""
    net, groups, _ = network
    slim = slice_model(net, groups, {"blocks.0.conv1": [0, 2]})
    with pytest.raises(KnapsackError, match=r"channels of blocks\.0\.conv1 hang together in another way"):
        _matched(groups, tk.find_channel_groups(slim, torch.zeros(1, *SIZE)))


def test_what_the_original_has_frozen_stays_frozen(network):
    net, groups, _ = network
    fewer = without_groups(groups, {groups.by_name["blocks.0.conv1"]: "a trial failed"})
    branches, _ = find_branches(net, images()[0])
    shorter = shorten(net, fewer, branches[1:2], branches, verify="none")
    assert (
        "blocks.0.conv1" not in shorter.groups.by_name and shorter.groups.frozen["blocks.0.conv1"] == "a trial failed"
    )
    assert shorter.groups.macs() == tk.count_macs(shorter.model, SIZE)
    assert [fewer[number].name for number in shorter.left] == [group.name for group in shorter.groups]


def test_slim_is_masked_and_macs_are_counted(network):
    net, _, shorter = network
    keep = {g.name: torch.arange(0, g.size, 2) for g in shorter.groups if g.size > 3 and not g.crosses_norm}
    assert len(keep) >= 3
    slim = slice_model(shorter.model, shorter.groups, keep)
    x = torch.randn(2, *SIZE)
    masked = mask_model(shorter.model, shorter.groups, keep)
    torch.testing.assert_close(slim.double()(x.double()), masked.double()(x.double()))
    counts = [len(keep.get(group.name, range(group.size))) for group in shorter.groups]
    assert shorter.groups.macs(counts) == tk.count_macs(slim, SIZE)
    assert tk.count_macs(shorter.model, SIZE) < tk.count_macs(net, SIZE)


def test_budgets_are_parts_of_the_original(network):
    net, _, shorter = network
    scores = {g.name: torch.rand(g.size, dtype=torch.float64) for g in shorter.groups}
    result = tk.sweep(net, scores, [tk.Budget(macs=0.4, params=0.5)], shorter=shorter)[0]
    report = result.report
    for name, count in (("macs", tk.count_macs(net, SIZE)), ("params", sum(p.numel() for p in net.parameters()))):
        line = report.line(name)
        assert line.original == count and line.counted <= line.asked
    assert report.line("macs").counted == tk.count_macs(result.model, SIZE)
    assert report.blocks == CHOSEN and "blocks removed: blocks.1, blocks.4" in str(report)
    lines = {line.name: (line.original, line.kept) for line in report.layers}
    assert lines["blocks.1.conv1"] == (5, 0) and lines["blocks.0.conv1"][1] > 0
    rebuilt = resize_model(blocks_net(), result.channel_config)
    rebuilt.load_state_dict(result.model.state_dict())
    x = torch.randn(2, *SIZE)
    assert torch.equal(rebuilt.eval()(x), result.model.eval()(x))


def test_pruned_again_it_is_still_rebuilt_from_its_base(network):
    net, groups, _ = network
    scores = {g.name: torch.rand(g.size, dtype=torch.float64) for g in groups}
    first = tk.sweep(net, scores, [tk.Budget(macs=0.8)], groups=groups)[0].model.eval()
    again = tk.find_channel_groups(first, torch.zeros(1, *SIZE))
    left, _ = find_branches(first, images()[0])
    assert [branch.name for branch in left] == BRANCHES
    second = shorten(first, again, [left[0], left[4]], left)
    scores = {g.name: torch.rand(g.size, dtype=torch.float64) for g in second.groups}
    slim = tk.sweep(first, scores, [tk.Budget(macs=0.7)], shorter=second)[0].model.eval()
    third = shorten(
        slim, tk.find_channel_groups(slim, torch.zeros(1, *SIZE)), *[find_branches(slim, images()[0])[0]] * 2
    )
    scores = {g.name: torch.ones(g.size, dtype=torch.float64) for g in third.groups}
    last = tk.sweep(slim, scores, [tk.Budget(macs=0.9)], shorter=third)[0]
    config = last.channel_config
    assert config.removed["blocks.0"] == "identity" and config.removed["tokens.0"] == "identity"
    assert not any(config.lacks(name) for table in (config.widths, config.kept) for name in table)
    for model in (slim, last.model):
        rebuilt = resize_model(blocks_net(), model.channel_config)
        rebuilt.load_state_dict(model.state_dict())
        x = torch.randn(2, *SIZE)
        assert torch.equal(rebuilt.eval()(x), model.eval()(x))


def test_time_of_layers_that_are_gone_is_gone():
    """Two layers, three groups; the second layer goes, and with it the last group: what is left costs what it did."""
    one, two = (Surface((torch.tensor([1.0, 4.0]).numpy(),) * 2, torch.tensor(v).numpy(), 0.0, 0) for v in
                ([[1.0, 2.0], [3.0, 8.0]], [[5.0, 6.0], [7.0, 9.0]]))  # fmt: skip
    widths = [(Count(0, ((0, 1),)), Count(0, ((1, 1),))), (Count(0, ((1, 1),)), Count(0, ((2, 1),)))]
    whole = LatencyCost(["a", "b.conv"], widths, [one, two], 3, calibration=(2.0, 0.5), steps=[1, 2, 3])
    shorter = whole.shortened({"b": "identity"}, [0, 1], [4, 4, 4])
    for kept in ([4, 4], [2, 3], [1, 1]):
        assert shorter.at(kept) == pytest.approx(2.0 * whole.layers_at([*kept, 4])[0] + 0.5)
        assert shorter.marginal(kept)[0] == pytest.approx(whole.marginal([*kept, 4])[0])
    assert shorter.names == ["a"] and shorter.steps == [1, 2] and whole.names == ["a", "b.conv"]
    frozen = whole.shortened({}, [0, 1], [4, 4, 4])  # a group that no longer moves stays as it is
    assert frozen.at([2, 3]) == pytest.approx(whole.at([2, 3, 4]))
