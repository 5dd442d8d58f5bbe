"""prune(blocks=True): what goes is what lost least on trial, and the shorter network is one like any other."""

import pytest
import timm
import torch
from blocks_net import blocks_net, images

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.maps.branches import find_branches
from timm_knapsack.pipeline import blocks as module
from timm_knapsack.pipeline.blocks import choose_by_trial
from timm_knapsack.pipeline.measured_loss import measure_loss
from timm_knapsack.pruning.shortening import shorten
from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.slim.removed_blocks import without_modules
from timm_knapsack.training.distillation import DistillationModule

SIZE = (3, 8, 8)
BUDGET = tk.Budget(macs=0.6)


def quiet_net():
    """One of its blocks adds next to nothing: any good choice lets it go."""
    net = blocks_net(few=True)
    with torch.no_grad():
        net.blocks[1].bn2.weight.mul_(1e-4)
        net.blocks[1].bn2.bias.mul_(1e-4)
    return net


@pytest.fixture(scope="module")
def network():
    net = quiet_net()
    groups = tk.find_channel_groups(net, torch.zeros(1, *SIZE))
    return net, groups, tk.value_curves(net, groups, images(), progress=False)


@pytest.fixture(scope="module")
def result(network):
    net, groups, curves = network
    return tk.prune(net, images(), scores=curves, groups=groups, budget=BUDGET, blocks=True, base_args={"few": True})


def test_blocks_that_add_nothing_go(network, result):
    net, report = network[0], result.report
    assert "blocks.1" in report.blocks and report.block_losses["blocks.1"] < 1e-4
    assert list(report.block_losses) == ["blocks.0", "blocks.1"]
    losses = {int(count): loss for count, loss in report.block_trials.items()}
    assert losses[len(report.blocks)] == min(losses.values()) < losses[0]
    assert report.line("macs").counted == tk.count_macs(result.model, SIZE) <= 0.6 * tk.count_macs(net, SIZE)
    assert "blocks removed: " in str(report)


def test_a_trial_is_the_network_cut_and_refitted_on_images_apart(network):
    net, groups, curves = network
    search = module._BlockSearch(module.Choice(curves, module.Shorter.of_whole(net, groups)), BUDGET, images(), {})
    search.all = search.order = find_branches(net, images()[0])[0]
    shorter, tryout = search._shorter(1, "none"), search.tryout
    slim = tk.sweep(net, search._values(shorter), [BUDGET], shorter=shorter)[0]
    recover_layers(slim.model, net, tryout.fitted, kept=slim.kept_channels, joint=0, views=False)
    lost = measure_loss(slim.model, net, tryout.held, recovered=True).measured
    assert search._loss(1) == pytest.approx(lost, rel=1e-3) and shorter.blocks == ("blocks.0",)


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([5, 6, 7, 8, 9, 9, 9, 9, 9], 0),  # none is the best: none goes
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], 8),
        ([9, 8, 7, 4, 6, 8, 8, 8, 8], 3),  # between the numbers that are tried first
        ([9, 9.2, 9.3, 5, 2, 2.5, 9, 9, 9], 4),
        ([9, 10, 11, 12, 12, 12, 5, 4, 3], 8),  # it may get worse first
    ],
)
def test_it_follows_what_is_measured(network, monkeypatch, losses, best):
    net, groups, curves = network
    start = module.Choice(curves, module.Shorter.of_whole(net, groups))
    search = module._BlockSearch(start, BUDGET, images(), {})
    search.most = 8
    monkeypatch.setattr(search, "_loss", lambda count: search.tried.setdefault(count, losses[count]))
    assert search._best_count() == best and search.tried[0] == losses[0]


def test_more_blocks_than_the_budget_needs_are_not_tried(network, monkeypatch):
    net, groups, curves = network
    search = module._BlockSearch(
        module.Choice(curves, module.Shorter.of_whole(net, groups)), tk.Budget(macs=0.9), images(), {}
    )
    monkeypatch.setattr(search.tryout, "loss", lambda result: 1 / (1 + len(result.report.blocks)))
    search.all = search.order = find_branches(net, images()[0])[0]
    search.most = 2
    assert search._best_count() == 1, "without one block it costs less than nine tenths, with nothing cut"


def test_what_is_to_be_left_alone_stays(network):
    net, groups, curves = network
    choice = module._BlockSearch(module.Choice(curves, module.Shorter.of_whole(net, groups)), BUDGET, images(),
                                 {"ignore": ["blocks.0.*"]})  # fmt: skip
    kept = [branch.name for branch in find_branches(net, images()[0])[0] if choice._is_kept(branch)]
    assert kept == ["blocks.0"]
    with pytest.warns(UserWarning, match=r"no block can go as a whole \(blocks.2: its output has another shape"):
        found = choose_by_trial(
            net, curves, tk.Budget(macs=0.97), images(), ignore=["blocks.[01].*"], groups=groups, blocks=True
        )
    assert not found.shorter.blocks and found.groups is groups


def test_blocks_are_no_default(network):
    net, groups, curves = network
    choice = choose_by_trial(net, tk.Scores({g.name: torch.ones(g.size) for g in groups}), BUDGET, None, groups=groups)
    assert choice.shorter.blocks == () and not choice.block_trials
    report = tk.sweep(net, curves, [BUDGET], groups=groups)[0].report
    assert report.blocks == () and "blocks removed" not in str(report)


def test_without_images_or_curves_it_says_what_it_needs(network):
    net, groups, curves = network
    given = {"groups": groups, "budget": BUDGET, "blocks": True}
    for loader, more in (
        (None, {"scores": curves}),
        (images(), {"criterion": "magnitude"}),
        (images(), {"recover": False}),
    ):
        with pytest.raises(KnapsackError, match="it needs images, value curves"):
            tk.prune(net, loader, **given, **more)
    with pytest.raises(KnapsackError, match="at least 16 of them"):
        tk.prune(net, images(8), scores=curves, **given)


def test_saved_is_loaded(result, tmp_path):
    folder = tk.save_pretrained(
        result, tmp_path / "shorter", builder="blocks_net:blocks_net", example_inputs=images()[0]
    )
    loaded, x = tk.load_pretrained(folder, builder="blocks_net:blocks_net"), images()[0]
    assert torch.equal(loaded(x), result.model.eval()(x))
    card = (folder / "README.md").read_text()
    assert "residual blocks removed as a whole: " in card and "| blocks.1.conv1 | 5 | 0 |" in card


def test_refined_too(network, result):
    net = network[0]
    student = tk.refine(result.model, net, images(), epochs=2)
    assert student is result.model


def test_recovery_begins_behind_the_gap(network):
    """Nothing is thinner, a block is gone: what runs behind it is refitted, what runs before it is left alone."""
    net = blocks_net()
    shorter = without_modules(net, {"blocks.1": "identity"})
    student = type(net)().eval()
    student.blocks[1] = torch.nn.Identity()
    student.load_state_dict(shorter.state_dict())
    before = measure_loss(student, net, images(), recovered=False).measured
    fits = recover_layers(student, net, images(), kept={}, joint=0, views=False)
    assert [fit.name for fit in fits][:2] == ["blocks.2.conv1", "blocks.2.conv2"]
    assert torch.equal(student.blocks[0].conv2.weight, net.blocks[0].conv2.weight)
    assert measure_loss(student, net, images(), recovered=True).measured < 0.7 * before


def test_a_timm_network_goes_all_the_way(tmp_path):
    """Cut without a block, saved, created by timm, distilled from."""
    net = timm.create_model("cifar_resnet20").eval()
    x = torch.randn(4, 3, 32, 32)
    groups, (branches, _) = tk.find_channel_groups(net, verify="none"), find_branches(net, x)
    shorter = shorten(net, groups, branches[-1:], branches, verify="none")
    scores = {group.name: torch.rand(group.size, dtype=torch.float64) for group in shorter.groups}
    result = tk.sweep(net, scores, [tk.Budget(macs=0.5)], shorter=shorter)[0]
    gone = branches[-1].name
    assert dict(result.channel_config.removed) == {gone: "identity"}
    folder = tk.save_pretrained(result, tmp_path / "shorter")
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(loaded(x), result.model.eval()(x))
    assert tk.count_macs(loaded) == result.report.line("macs").counted
    torch.testing.assert_close(torch.jit.script(loaded)(x), loaded(x))
    for at in ("convs", "blocks"):
        distilling = DistillationModule(loaded, net, tk.DistillationConfig(ikd_at=at, ikd_init="selection"))
        assert torch.isfinite(distilling(x, torch.zeros(4, dtype=torch.long)).total)
        assert distilling.taps and not any(gone in tap.module for tap in distilling.taps)


def test_one_branch_of_a_transformers_block_goes(tmp_path):
    """Attention of one block, the MLP of another, all of a third: recovered, saved, created by timm, exported."""
    torch.manual_seed(0)
    net, x = timm.create_model("test_vit").eval(), torch.randn(8, 3, 160, 160)
    with torch.no_grad():
        net.head.weight.div_(net(x).std())
    groups, (branches, _) = tk.find_channel_groups(net, verify="none"), find_branches(net, x)
    gone = ("blocks.0.attn", "blocks.1.mlp", "blocks.2.attn", "blocks.2.mlp")
    shorter = shorten(net, groups, [branch for branch in branches if branch.name in gone], branches, verify="none")
    scores = {group.name: torch.rand(group.size, dtype=torch.float64) for group in shorter.groups}
    result = tk.sweep(net, scores, [tk.Budget(macs=0.5)], shorter=shorter)[0]
    assert result.report.blocks == gone and result.channel_config.removed["blocks.2"] == "identity"
    before = measure_loss(result.model, net, [x], recovered=False).measured
    tk.recover(result.model, net, [x], joint=0, views=False)
    assert measure_loss(result.model, net, [x], recovered=True).measured < 0.5 * before
    folder = tk.save_pretrained(result, tmp_path / "shorter")
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(loaded(x), result.model.eval()(x))
    assert tk.count_macs(loaded) == result.report.line("macs").counted
    exported = torch.export.export(loaded, (x[:2],)).module()
    torch.testing.assert_close(exported(x[:2]), loaded(x[:2]), rtol=1e-4, atol=1e-5)
