"""Residual branches are found by trial: removed is zeroed, in every kind of block; what can't go says why."""

import pytest
import timm
import torch
from blocks_net import BRANCHES, blocks_net, images
from torch import nn

import timm_knapsack  # noqa: F401
from timm_knapsack.maps.branches import find_branches, removed_by
from timm_knapsack.slim.removed_blocks import without_modules


def test_every_branch_is_found_and_the_others_say_why():
    found, refused = find_branches(blocks_net(), images()[0])
    assert [branch.name for branch in found] == BRANCHES
    assert refused == {"blocks.3": "its output has another shape than its input"}
    assert found[4].removed == {"tokens.0.norm1": "identity", "tokens.0.mix": "identity", "tokens.0.drop1": "zero"}
    assert found[5].removed == {"tokens.0.norm2": "identity", "tokens.0.mlp": "zero"}
    assert set(found[5].layers) == {"tokens.0.norm2", "tokens.0.mlp.0", "tokens.0.mlp.2"}


def test_removed_is_zeroed():
    """By hand: the last weights of a branch set to zero make it add nothing."""
    net, x = blocks_net(), torch.randn(4, 3, 8, 8)
    ends = {"blocks": "bn2", "mix": "", "mlp": ".2"}
    for branch in find_branches(net, images()[0])[0]:
        shorter = without_modules(net, branch.removed)
        zeroed = blocks_net()
        kind = branch.name.split(".")[-1]
        name = f"{branch.name}.{ends['blocks']}" if kind.isdigit() else branch.name + ends[kind]
        with torch.no_grad():
            for parameter in zeroed.get_submodule(name).parameters():
                parameter.zero_()
            assert torch.equal(shorter.eval()(x), zeroed(x)), branch.name
            assert not torch.equal(shorter(x), net(x)), f"{branch.name} adds something"
        assert sum(p.numel() for p in shorter.parameters()) < sum(p.numel() for p in net.parameters())


def test_a_block_that_loses_all_branches_is_gone_as_a_whole():
    net = blocks_net()
    found, _ = find_branches(net, images()[0])
    removed = removed_by([found[5], found[4], found[0]], found)
    assert removed == {"tokens.0": "identity", "blocks.0": "identity"}
    one_by_one = {**found[0].removed, **found[4].removed, **found[5].removed}
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(without_modules(net, removed)(x), without_modules(net, one_by_one)(x), rtol=0, atol=0)


def test_a_norm_behind_the_sum_and_blocks_that_run_twice_are_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            net = blocks_net()
            self.stem, self.list = net.stem, nn.ModuleList([net.blocks[0]])
            self.post = nn.ModuleList([type(net.last)(8)])

        def forward(self, x):
            return self.post[0](self.list[0](self.list[0](self.stem(x)))).mean((2, 3))

    found, refused = find_branches(Net().eval(), images()[0])
    assert not found
    assert refused["list.0"] == "it runs 2 times in one forward pass"
    assert refused["post.0"].startswith("its input does not come through")


def test_the_check_of_the_whole_network_can_fail(monkeypatch):
    """Shown to fail: a stand-in that is no zero refuses the branches that need one, and only these."""
    monkeypatch.setattr("timm_knapsack.slim.removed_blocks.Zero.forward", lambda self, x, *_, **__: x.new_ones(()))
    found, refused = find_branches(blocks_net(), images()[0])
    assert [branch.name for branch in found] == BRANCHES[:4]
    assert refused["tokens.0"] == "the network without it is not the network with zeros in its place"


def test_a_network_that_asks_its_blocks_for_more_keeps_them():
    class Asking(type(blocks_net())):
        def forward(self, x):
            self.blocks[0].conv1.weight  # noqa: B018
            return super().forward(x)

    net = blocks_net()
    net.__class__ = Asking
    found, refused = find_branches(net, images()[0])
    assert "blocks.0" not in [branch.name for branch in found] and len(found) == len(BRANCHES) - 1
    assert refused["blocks.0"].startswith(
        "without it the network fails: AttributeError: 'Identity' object has no attribute 'conv1'"
    )


@pytest.mark.parametrize(
    ("name", "side", "branches"),
    [
        ("resnet18", 64, ["layer1.0", "layer4.1"]),
        ("mobilenetv3_small_050", 64, ["blocks.1.1", "blocks.3.0"]),
        ("test_vit", 160, ["blocks.0.attn", "blocks.0.mlp"]),
        ("test_convnext", 160, ["stages.0.blocks.0"]),
    ],
)
def test_families_of_timm(name, side, branches):
    torch.manual_seed(0)
    found, _ = find_branches(timm.create_model(name).eval(), torch.randn(1, 3, side, side))
    assert set(branches) <= {branch.name for branch in found}, [branch.name for branch in found]


def test_what_is_searched_is_left_as_it_was():
    net = blocks_net().train()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    find_branches(net, images()[0])
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    assert net.training and not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
