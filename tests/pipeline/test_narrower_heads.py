"""Heads that are turned: the same function, widths in order of weight, and the whole way through prune, save, load."""

import pytest
import timm
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.slim.cutting import mask_model, slice_model
from timm_knapsack.slim.turned_heads import turned_of

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def vit(**options):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**SIZES, **options})
    with torch.no_grad():
        for parameter in model.parameters():  # biases start as zeros, and would hide what they do
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


IMAGES = [torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
ATTENTION = "blocks.0.attn.qkv"


def test_a_turned_network_computes_the_same():
    model = vit().double()
    turned = tk.turn_heads(model, [x.double() for x in IMAGES])
    assert turned_of(turned) == {"blocks.0.attn", "blocks.1.attn"} and not turned_of(model)
    assert not torch.equal(turned.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
    torch.testing.assert_close(turned(IMAGES[0].double()), model(IMAGES[0].double()), rtol=1e-9, atol=1e-9)
    assert tk.turn_heads(turned, IMAGES) is turned, "once is enough"


def test_widths_come_in_order_of_what_they_carry():
    """Of the logits q · k and of what reaches the output, the first widths have the most."""
    turned = tk.turn_heads(vit(), IMAGES)
    attention, seen = turned.blocks[0].attn, {}
    attention.qkv.register_forward_hook(lambda _, args, y: seen.__setitem__("qkv", y.detach()))
    attention.proj.register_forward_pre_hook(lambda _, args: seen.__setitem__("z", args[0].detach()))
    with torch.no_grad():
        turned(torch.cat(IMAGES))
    q, k, _ = seen["qkv"].unflatten(-1, (3, 3, 8)).unbind(2)  # images, tokens, heads, widths
    k = k - k.mean(1, keepdim=True)
    logits = q.square().mean((0, 1)) * k.square().mean((0, 1))
    assert (logits[:, :-1] >= 0.99 * logits[:, 1:]).all() and (logits[:, 0] > 2 * logits[:, -1]).all()
    z = seen["z"].unflatten(-1, (3, 8))
    reach = z.var((0, 1)) * attention.proj.weight.detach().unflatten(-1, (3, 8)).square().sum(0)
    assert (reach[:, :-1] >= 0.98 * reach[:, 1:]).all()


@pytest.mark.parametrize("size, heads", [(8, 3), (12, 2), (4, 6)])
def test_slim_equals_masked(size, heads):
    turned = tk.turn_heads(vit(num_heads=heads), IMAGES).double()
    groups = tk.find_channel_groups(turned)
    assert groups[ATTENTION].size == size and groups.verified == "values"
    keep = {ATTENTION: [0, 2], "blocks.1.attn.qkv": [1], "blocks.1.mlp.fc1": range(0, 96, 5)}
    slim, masked = slice_model(turned, groups, keep), mask_model(turned, groups, keep)
    torch.testing.assert_close(slim(IMAGES[0].double()), masked(IMAGES[0].double()), rtol=1e-10, atol=1e-10)
    attention = slim.blocks[0].attn
    assert (attention.num_heads, attention.head_dim, attention.scale) == (heads, 2, size**-0.5)


def test_heads_that_are_not_turned_go_as_a_whole():
    """A norm of the queries sees each width: such a module computes something else when it is turned."""
    model = vit(qk_norm=True)
    assert tk.turn_heads(model, IMAGES) is model
    assert tk.find_channel_groups(model)[ATTENTION].size == 3


class TwoKinds(nn.Module):
    """One block that can be turned, and one whose values a gate changes width by width."""

    def __init__(self):
        super().__init__()
        self.net = vit()
        self.gate = nn.Parameter(torch.rand(24))
        self.net.blocks[1].attn.proj.register_forward_pre_hook(lambda _, args: (args[0] * self.gate,))

    def forward(self, x):
        return self.net(x)


def test_only_what_can_be_turned_is():
    model = TwoKinds().eval()
    turned = tk.turn_heads(model, IMAGES)
    assert turned_of(turned) == {"net.blocks.0.attn"}
    assert torch.equal(turned.net.blocks[1].attn.qkv.weight, model.net.blocks[1].attn.qkv.weight), "put back"
    with torch.no_grad():
        torch.testing.assert_close(turned(IMAGES[0]), model(IMAGES[0]), rtol=1e-4, atol=1e-4)


def test_weights_that_two_modules_share_are_left_alone():
    """Turned for the first of them, they would be wrong for the second, or the other way round."""
    model = vit()
    model.blocks[1].attn.qkv = model.blocks[0].attn.qkv
    turned = tk.turn_heads(model, IMAGES)
    with torch.no_grad():
        torch.testing.assert_close(turned(IMAGES[0]), model(IMAGES[0]), rtol=1e-4, atol=1e-4)
    assert turned is model


def test_the_plain_call_makes_heads_narrower_and_saves_and_loads(tmp_path):
    model = vit()
    result = tk.prune(model, IMAGES, budget=tk.Budget(macs=0.5), base_args=SIZES)
    widths = {block.attn.head_dim for block in result.model.blocks}
    assert {block.attn.num_heads for block in result.model.blocks} == {3} and min(widths) < 8
    assert result.model.channel_config.turned == ("blocks.0.attn", "blocks.1.attn")
    assert tk.ChannelConfig.from_json(result.model.channel_config.to_json()) == result.model.channel_config
    folder = tk.save_pretrained(result, tmp_path / "slim")
    again = tk.load_pretrained(folder)
    torch.testing.assert_close(again(IMAGES[0]), result.model(IMAGES[0]), rtol=0, atol=0)
    assert turned_of(again) == turned_of(result.model)
    paper = tk.prune(model, IMAGES, budget=tk.Budget(macs=0.5), criterion="magnitude")
    assert {block.attn.head_dim for block in paper.model.blocks} == {8}, "scores are of whole heads"


def test_recovery_with_the_unturned_teacher_leaves_the_heads_alone():
    """Its channels are others than those that were cut; what reads them is fitted all the same."""
    model = vit()
    result = tk.prune(model, IMAGES, budget=tk.Budget(macs=0.6), recover=False)
    fits = recover_layers(result.model, model, IMAGES, joint=0, views=False)
    skipped = {fit.name: fit.skipped for fit in fits if fit.skipped}
    assert set(skipped) == {"blocks.0.attn.qkv", "blocks.1.attn.qkv"} and "turned" in skipped[ATTENTION]
    turned = tk.turn_heads(model, IMAGES)
    again = tk.prune(model, IMAGES, budget=tk.Budget(macs=0.6), recover=False)
    assert not any(fit.skipped for fit in recover_layers(again.model, turned, IMAGES, joint=0, views=False))


def test_a_second_cut_counts_on_in_the_turned_base():
    model = vit()
    first = tk.prune(model, IMAGES, budget=tk.Budget(macs=0.8))
    second = tk.prune(first.model, IMAGES, budget=tk.Budget(macs=0.7))
    assert second.model.channel_config.turned == first.model.channel_config.turned
    kept = [result.model.channel_config.kept[f"{ATTENTION}.weight"][0] for result in (first, second)]
    assert set(kept[1]) <= set(kept[0])
