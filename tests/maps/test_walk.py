"""Walking a network segment by segment gives what plain forward passes give, and leaves the network as it was."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import timm_knapsack as tk
from timm_knapsack.maps.stand_ins import sliced_points, standing_in
from timm_knapsack.maps.taps import block_taps
from timm_knapsack.maps.walk import Segment, Walk, find_segments, hooked, watch_execution
from timm_knapsack.recovery.closed_form import planned_layers


def images(n=4, size=32, seed=0):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def segments_of(model, x):
    return find_segments(model, watch_execution(model, x[:1]).order)


def plain_output(model, segment, x):
    """What the segment's module returns in a plain forward pass."""
    seen = []
    module = dict(model.named_modules())[segment.name]
    handle = module.register_forward_hook(lambda _, args, output: seen.append(copy.deepcopy(output)))
    try:
        with torch.no_grad():
            model(x)
    finally:
        handle.remove()
    return seen[0]


class WritesIntoItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x += 1
        return self.conv2(self.conv1(F.relu(x, inplace=True)).mul_(2))


class WritesBetween(nn.Module):
    """Code between the layers writes into what they have returned."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.c(self.b(self.a(x).add_(1)).mul_(2).relu_()).add_(3)


class InPlace(nn.Module):
    """Every block writes into what it is given, and so does what lies between."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2)
        self.blocks = nn.Sequential(*(WritesIntoItsInput() for _ in range(3)))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = F.relu(self.stem(x), inplace=True)
        return self.head(self.blocks(x).mul_(2).mean((2, 3)))


class Dense(nn.Module):
    """The last layer looks back over two segments."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        a = self.a(x)
        return self.d(self.c(torch.cat([a, self.b(a)], 1)))


class Shortcut(nn.Module):
    """A shortcut around layers that are segments of their own: at the second, what the first gave is needed again."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(w, 4, 3, 1, 1) for w in (3, 4, 4, 4))

    def forward(self, x):
        x = self.a(x).relu()
        return self.d(x + self.c(self.b(x).relu()))


class Remembers(nn.Module):
    """Code between the layers holds the number of images."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        count = len(x)
        x = self.b(self.a(x))
        return self.c(x.reshape(count, *x.shape[1:]))


def tiny_vit():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=3, num_heads=3, num_classes=5, patch_size=8
    )


NETS = {
    "resnet": lambda: timm.create_model("cifar_resnet20", num_classes=4, channels=(4, 8, 8)),
    "vit": tiny_vit,
    "densenet": Dense,
    "shortcut": Shortcut,
    "in place": InPlace,
    "in place between": WritesBetween,
    "remembers": Remembers,
}


@pytest.mark.parametrize("limit", [None, 1, 20_000])
@pytest.mark.parametrize("kind", NETS)
def test_each_segment_and_the_rest_are_those_of_a_plain_pass(kind, limit):
    torch.manual_seed(0)
    net = NETS[kind]().eval()
    batches = [images(4), images(4, seed=1), images(3, seed=2)]
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    given = [batch.clone() for batch in batches]
    segments = segments_of(net, batches[0])
    with torch.no_grad():
        whole = [net(batch) for batch in batches]
    walk = Walk(net, batches, segments, limit=limit)
    for number, segment in enumerate(segments):
        assert walk.segment is segment and walk.position == number
        for _ in range(2):  # a run leaves what is kept as it was
            for batch, x in enumerate(batches):
                torch.testing.assert_close(walk.run(batch), plain_output(net, segment, x), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(walk.rest(batch), whole[batch], rtol=1e-5, atol=1e-5)
        if number < len(segments) - 1:
            walk.advance()
    assert walk.sequential == (kind not in ("densenet", "shortcut"))
    assert all(torch.equal(a, b) for a, b in zip(batches, given, strict=True))
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())


def test_advancing_with_known_outputs_is_advancing():
    torch.manual_seed(0)
    net = NETS["resnet"]().eval()
    batches = [images(4), images(2, seed=1)]
    segments = segments_of(net, batches[0])
    plain, told = Walk(net, batches, segments), Walk(net, batches, segments)
    for _ in segments[:-1]:
        told.advance([told.run(number) for number in range(2)])
        plain.advance()
        assert torch.equal(told.rest(1), plain.rest(1))


def test_the_rest_of_another_network_with_the_same_beginning():
    torch.manual_seed(0)
    net = NETS["resnet"]().eval()
    batches = [images(4)]
    walk = Walk(net, batches, segments_of(net, batches[0]))
    for _ in range(3):
        walk.advance()
    other = copy.deepcopy(net)
    layer = dict(other.named_modules())[walk.segment.layers[0]]
    with torch.no_grad():
        layer.weight.mul_(2)
        expected = other(batches[0])
    torch.testing.assert_close(walk.rest(0, other), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, walk.rest(0), rtol=1e-3)  # the change shows
    assert "forward" not in vars(dict(other.named_modules())[walk.segment.name])


@pytest.mark.parametrize("remembers", [False, True])
def test_what_lies_between_sees_one_image_unless_the_net_remembers_how_many(remembers):
    torch.manual_seed(0)
    net = Remembers().eval() if remembers else InPlace().eval()
    seen = []
    batches = [images(4), images(4, seed=3)]
    walk = Walk(net, batches, segments_of(net, batches[0]))
    for _ in range(2):
        walk.advance()
    handle = net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    walk.rest(1)
    handle.remove()
    assert seen == [4 if remembers else 1]


def test_inputs_that_are_too_large_are_made_again_from_an_earlier_segment():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(width, 8, 3, 2, 1) for width in (3, 8, 8, 8))).eval()
    batches = [images(4), images(4, seed=3)]  # inputs: 98 kB, then 65, 16 and 4
    segments = segments_of(net, batches[0])
    ran = []
    walk = Walk(net, batches, segments, limit=20_000)
    for layer in net:
        layer.register_forward_hook(lambda module, args, output: ran.append(module))
    counts = []
    for position in range(4):
        ran.clear()
        torch.testing.assert_close(walk.run(0), plain_output(net, segments[position], batches[0]))
        counts.append(len(ran) - 4)  # the plain pass runs all four
        if position < 3:
            walk.advance()
    assert counts == [1, 2, 1, 1]  # the second segment's inputs are too large: the first runs again


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.broken = False

    def forward(self, x):
        x = self.b(self.a(x))
        if self.broken:
            raise RuntimeError("broken")
        return x


def hook_count(net):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def test_hooks_and_forwards_are_taken_back_after_errors():
    net = Breaks().eval()
    walk = Walk(net, [images()], [Segment("a", ("a",)), Segment("b", ("b",))])
    walk.advance()
    net.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        walk.rest(0)
    with pytest.raises(RuntimeError, match="broken"):
        watch_execution(net, images())
    with pytest.raises(RuntimeError, match="broken"), hooked((net.a, "input", lambda x: None)):
        net(images())
    with pytest.raises(RuntimeError, match="broken"), standing_in({net.a: net.a.forward}):
        net(images())
    assert hook_count(net) == 0
    assert not any("forward" in vars(module) for module in net.modules())
    net.a.register_forward_hook(lambda *args: None)
    assert hook_count(net) == 1  # the check can fail


def test_a_forward_that_was_replaced_before_is_put_back():
    net = Breaks().eval()
    own = net.a.forward = lambda x: x.new_zeros(len(x), 4, 2, 2)
    with standing_in({net.a: lambda x: x}):
        assert net.a(1) == 1
    assert net.a.forward is own
    assert net(images(1)).shape == (1, 4, 2, 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_strided_points_see_the_same_pixels(groups):
    """FastViT's stem has them, of 3 channels: their own gradient in bfloat16 ends the process (torch 2.13, CPU)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 6, 1, stride=(2, 3), groups=groups), nn.Conv2d(6, 6, 3, stride=2)).double()
    x = torch.randn(2, 4, 16, 18, dtype=torch.float64)
    plain = net(x)
    wanted = torch.autograd.grad(plain.square().sum(), list(net.parameters()))
    stand_ins = sliced_points(net)
    assert list(stand_ins) == [net[0]]
    with standing_in(stand_ins):
        made = net(x)
        torch.testing.assert_close(made, plain)
        for mine, theirs in zip(torch.autograd.grad(made.square().sum(), list(net.parameters())), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_pass_with_gradients_takes_stand_ins_for_strided_points():
    block = nn.Sequential(nn.Conv2d(3, 4, 1, stride=2), nn.ReLU())
    walk = Walk(block, [images()], [Segment("0", ("0",))])
    seen = []
    with hooked((block[0], "output", lambda y: seen.append("forward" in vars(block[0])))):
        walk.run(0)
        walk.run(0, gradients=True)
    assert seen == [False, True]


def test_execution_names_order_norms_and_calls():
    net = timm.create_model("cifar_resnet20", num_classes=4, channels=(4, 8, 8)).eval()
    execution = watch_execution(net, images(1))
    layers = [n for n, m in net.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert sorted(execution.order) == sorted(layers) and set(execution.calls.values()) == {1}
    assert len(execution.norm_after) == len(layers) - 1  # all but the classifier
    assert sum(len(s.layers) for s in find_segments(net, execution.order)) == len(layers)


class Sized(nn.Module):
    """A residual block that returns its map and the map's size, as MViTv2's do."""

    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, x, size):
        return x + self.b(self.a(x).relu()), size


class OfSized(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 8, 1), nn.ModuleList([Sized(), Sized()]), nn.Linear(8, 5)

    def forward(self, x):
        x, size = self.stem(x), list(x.shape[2:])
        for block in self.blocks:
            x, size = block(x, size)
        return self.head(x.mean((2, 3)))


def test_blocks_that_return_more_than_their_map_are_tapped_and_recovered():
    torch.manual_seed(0)
    net, loader = OfSized().eval(), [torch.randn(16, 3, 6, 6) for _ in range(2)]
    assert [tap.name for tap in block_taps(net, loader[0])] == ["blocks.0", "blocks.1"]
    result = tk.prune(net, loader, budget=tk.Budget(macs=0.6), recover=False)
    before = (result.model(loader[0]) - net(loader[0])).norm()
    plans = planned_layers(result.model, net, loader[0][:2], kept=result.kept_channels, images=32)
    assert plans["blocks.0.b"] == plans["blocks.1.b"] == "to sums"
    tk.recover(result.model, net, loader, kept=result.kept_channels)
    assert (result.model(loader[0]) - net(loader[0])).norm() < before


def test_no_map_in_any_block_is_no_error():
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))).eval()
    net[0].register_forward_hook(lambda module, args, output: [output, output])
    assert block_taps(net, torch.zeros(1, 3, 2, 2)) == []
