"""Verification by values: whatever the code does with its channels, slim = masked, or the channels are frozen."""

import pytest
import torch
from nets import NETS, LayerNormed, PlainChain, VisionTransformer
from oracle import TOLERANCE, random_keep, seeded, slim_differs_from_masked
from torch import nn

import timm_knapsack as tk
from timm_knapsack.channels import value_check
from timm_knapsack.channels.labels import Layout
from timm_knapsack.channels.op_rules import RULES
from timm_knapsack.channels.tracing import Assumptions
from timm_knapsack.errors import TraceError
from timm_knapsack.slim.cutting import slice_model

SHAPE = (1, 3, 8, 8)


class Tricky(nn.Module):
    """A conv of 16 channels, a function of its output, a conv."""

    def __init__(self, trick, width=16):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, width, 3), nn.Conv2d(width, 6, 1), nn.Linear(6, 4)
        self.side = nn.Conv2d(3, width // 2, 3)
        self.trick, self.width = trick, width

    def forward(self, x):
        return self.fc(self.conv2(self.trick(self, self.conv1(x), x).relu()).mean((2, 3)))


def in_place(net, y, x):
    y = y.clone()
    y[:, 8:].mul_(-1)
    return y


def assigned(net, y, x):
    y = y.clone()
    y[:, 8:] = y[:, 8:].roll(1, 3)
    return y


def added(net, y, x):
    y = y.clone()
    y[:, 8:] += net.side(x)
    return y


def shuffled(groups, within):
    def shuffle(net, y, x):
        batch, channels, height, width = y.shape
        second = channels // groups if within is None else within
        return y.view(batch, groups, second, height, width).transpose(1, 2).reshape(batch, -1, height, width)

    return shuffle


# What the code does → the units of conv1 that may go: all, some or none of them.
TRICKS = {
    "nothing": (lambda net, y, x: y, 16),
    "negated tail": (lambda net, y, x: torch.cat([y[:, :8], -y[:, 8:]], 1), 8),
    "tail in place": (in_place, 8),
    "tail assigned": (assigned, 8),
    "conv added to the tail": (added, 8),
    "gate on the tail": (lambda net, y, x: torch.cat([y[:, :8], y[:, 8:] * y[:, 8:].sigmoid()], 1), 8),
    "mean of the tail": (lambda net, y, x: y * y[:, 8:].mean(1, keepdim=True), 8),
    "literal split": (lambda net, y, x: torch.cat([(i + 1) * q for i, q in enumerate(y.split(4, 1))], 1), 0),
    "square shuffle": (shuffled(4, None), 4),
    "square shuffle the other way": (shuffled(-1, 4), 0),
    "rectangular shuffle": (shuffled(2, None), 8),
    "scale by the width": (lambda net, y, x: y * y.shape[1] ** -0.5, 0),
    "asks for the width": (lambda net, y, x: y * 2 if y.shape[1] == 16 else y, 0),
    "asks for many": (lambda net, y, x: y * 2 if y.shape[1] > 12 else y, 0),
    "asks whether it is odd": (lambda net, y, x: y * (1 + y.shape[1] % 2), 0),
    "size and constant": (lambda net, y, x: y.view(y.shape[0], net.width, -1).view_as(y) / net.width, 0),
}


@pytest.mark.parametrize("name", TRICKS)
def test_what_computes_something_else_is_frozen_and_nothing_more(name):
    trick, units = TRICKS[name]
    net = seeded(Tricky(trick))
    groups = tk.find_channel_groups(net, torch.empty(SHAPE))
    assert groups.verified == "values" and not groups.verified_note
    found = [group for group in groups if any(s.param == "conv1.weight" and s.role == "out" for s in group.slices)]
    assert sum(group.size for group in found) == units
    for seed in range(4):
        keep = random_keep(groups, seed, only=lambda group: not group.crosses_norm)
        assert slim_differs_from_masked(net, groups, keep, SHAPE) < TOLERANCE


@pytest.mark.parametrize("name", ["scale by the width", "asks for the width", "size and constant"])
def test_shapes_alone_do_not_see_it(name):
    """The same check, switched to shapes, lets these through: it is the values that refuse them."""
    net = seeded(Tricky(TRICKS[name][0]))
    groups = tk.find_channel_groups(net, torch.empty(SHAPE), verify="shapes")
    assert groups["conv1"].size == 16 and groups.verified == "shapes"
    assert slim_differs_from_masked(net, groups, {"conv1": range(5)}, SHAPE) > 1e-3
    reason = tk.find_channel_groups(net, torch.empty(SHAPE)).frozen["conv1"]
    assert reason.startswith("without some of its channels the network computes something else: ")
    assert "% from those with zeros in their place" in reason


def test_a_cut_at_a_literal_place_is_seen_by_shapes_too():
    groups = tk.find_channel_groups(Tricky(TRICKS["negated tail"][0]), torch.empty(SHAPE), verify="shapes")
    assert any("a cut" in why or "are cut" in why for why in groups.frozen.values())


# ---- norms across channels ----------------------------------------------------------------------------------------


class ScaledNorm(LayerNormed):
    """A norm over channels, and a width in arithmetic: the norm must not hide it."""

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1)
        x = x * x.shape[-1] ** -0.5 + self.out(self.inner(self.norm(x)).relu())
        return self.fc(x.mean((1, 2)))


def test_groups_that_cross_a_norm_are_compared_too():
    plain = tk.find_channel_groups(LayerNormed(), torch.empty(SHAPE))
    assert plain["stem"].crosses_norm and plain.verified == "values" and not plain.verified_note
    found = tk.find_channel_groups(ScaledNorm(), torch.empty(SHAPE))
    assert "stem" not in found.by_name and "outputs differ" in found.frozen["stem"]
    assert tk.find_channel_groups(ScaledNorm(), torch.empty(SHAPE), verify="shapes")["stem"].crosses_norm


@pytest.mark.parametrize("name", [name for name, net in NETS.items() if net.crosses_norm])
def test_what_survivors_give_is_what_the_slim_network_gives(name):
    """And not what zeros give: the comparison would fail without the survivors' norms."""
    net = NETS[name]
    model = seeded(net.build())
    groups = tk.find_channel_groups(model, torch.empty(net.shape))
    check = value_check.ValueCheck(groups, model, (torch.empty(net.shape),), Assumptions())
    keep = {group.name: [0, *range(2, group.size)] for group in groups if group.crosses_norm}
    expected = check._expected(keep)
    slim = value_check._run(slice_model(check.live, groups, keep), check.inputs)
    zeros = value_check._run(value_check.mask_model(check.live, groups, keep), check.inputs)
    assert value_check._difference(slim, expected) < TOLERANCE
    whole_groups = name == "GroupNormed"  # of channels: the others' statistics don't see them
    assert (value_check._difference(slim, zeros) > 1e-4) != whole_groups


@torch.library.custom_op("knapsack_test::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(1, keepdim=True)


@centred.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_group_that_an_unknown_op_combines_is_named_as_verified_by_shapes(monkeypatch):
    def rule(labels, op, layouts, args, kwargs, outputs):
        x = layouts(args[0])
        labels.mix(x.dims[1])
        return Layout(list(x.dims))

    monkeypatch.setitem(RULES, "knapsack_test::centred", rule)
    net = Tricky(lambda net, y, x: centred(y))
    groups = tk.find_channel_groups(net, torch.empty(SHAPE))
    assert groups["conv1"].crosses_norm and groups.verified == "values"
    assert groups.verified_note == (
        "but for conv1, by shapes: knapsack_test.centred in the model itself combines channels in its own way"
    )


# ---- attention ------------------------------------------------------------------------------------------------------


class TorchAttention(nn.Module):
    def __init__(self, width, heads, need_weights):
        super().__init__()
        self.embed = nn.Conv2d(3, width, 2, stride=2)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner, self.out, self.fc = nn.Linear(width, 10), nn.Linear(10, width), nn.Linear(width, 4)
        self.need_weights = need_weights

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.attn(x, x, x, need_weights=self.need_weights)[0]
        return self.fc((x + self.out(self.inner(x).relu())).mean(1))


@pytest.mark.parametrize("width, heads", [(12, 3), (16, 4), (24, 2)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_torchs_attention_loses_whole_heads_and_keeps_its_scale(width, heads, need_weights):
    net = seeded(TorchAttention(width, heads, need_weights))
    groups = tk.find_channel_groups(net, torch.empty(SHAPE))
    assert {group.name: group.size for group in groups} == {"embed": heads, "inner": 10}
    slim = slice_model(net, groups, {"embed": [1]}).eval()
    attention = slim.attn
    assert (attention.num_heads, attention.embed_dim, attention.head_dim) == (1, width // heads, width // heads)
    x = torch.randn(2, *SHAPE[1:])
    masked = value_check.mask_model(net, groups, {"embed": [1]})
    with torch.no_grad():
        assert torch.allclose(slim(x), masked(x), atol=1e-5)


# ---- hooks --------------------------------------------------------------------------------------------------------


def test_a_hook_that_changes_activations_is_part_of_the_network():
    net = seeded(PlainChain())
    net.bn1.register_forward_hook(lambda module, inputs, output: output * 0.5 + 1)
    groups = tk.find_channel_groups(net, torch.empty(SHAPE))
    keep = {"conv1": [0, 2, 3]}
    x = torch.randn(SHAPE)
    for name, dim in (("bn1.weight", 0), ("bn1.bias", 0), ("conv2.weight", 1)):
        net.get_parameter(name).data.index_fill_(dim, torch.tensor([1, 4, 5]), 0)
    with torch.no_grad():
        assert torch.allclose(slice_model(net, groups, keep).eval()(x), net(x), atol=1e-5)


def test_a_hook_that_cuts_at_a_literal_place_freezes_the_channels():
    net = seeded(PlainChain())
    net.bn1.register_forward_hook(lambda module, inputs, y: torch.cat([y[:, :3], y[:, 3:] * 2], 1))
    groups = tk.find_channel_groups(net, torch.empty(SHAPE))
    assert sum(g.size for g in groups if g.name.startswith("conv1")) < 6
    assert slim_differs_from_masked(net, groups, random_keep(groups, 1), SHAPE) < TOLERANCE


# ---- rounding -------------------------------------------------------------------------------------------------------


class HalfPrecision(PlainChain):
    def features(self, x):
        return super().features(x).bfloat16().to(x.dtype)


def test_half_precision_proves_too_little():
    groups = tk.find_channel_groups(HalfPrecision(), torch.empty(SHAPE))
    check = value_check.ValueCheck(groups, HalfPrecision(), (torch.empty(SHAPE),), Assumptions())
    with pytest.raises(value_check.NoValues, match="with a precision of 8e-03"):
        check._rounding()


class PartlySingle(PlainChain):
    """Rounding in single precision is no mistake, but one that it could hide is."""

    def features(self, x):
        x = self.bn1(self.conv1(x).float().exp().log().to(x.dtype))
        return self.conv2((x.float().softmax(2).to(x.dtype) * 5).relu()).relu()


def test_rounding_is_no_mistake():
    groups = tk.find_channel_groups(PartlySingle(), torch.empty(SHAPE))
    assert groups.verified == "values" and {g.name: g.size for g in groups} == {"conv1": 6, "conv2": 5}


class SlightlyWider(PlainChain):
    """Differs with the width by some 1e-8: more than double precision rounds, less than single precision does."""

    through = torch.float64

    def features(self, x):
        x = self.conv1(x).to(self.through).to(x.dtype)
        return self.conv2((x * (1 + 1e-8 * x.shape[1])).relu()).relu()


class SlightlyWiderInSingle(SlightlyWider):
    through = torch.float32


def test_what_the_coarsest_precision_rounds_away_is_no_mistake():
    single = tk.find_channel_groups(SlightlyWiderInSingle(), torch.empty(SHAPE))
    assert single.verified == "values" and single["conv1"].size == 6
    double = tk.find_channel_groups(SlightlyWider(), torch.empty(SHAPE))
    assert "conv1" not in double.by_name and "outputs differ" in double.frozen["conv1"]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_differences_are_relative_to_the_largest_number_of_their_output(scale):
    right = [torch.tensor([0.0, 4.0], dtype=torch.float64) * scale, torch.tensor([3, 5])]
    assert value_check._difference(right, right) == 0
    off = [right[0] + torch.tensor([0.01, 0.0], dtype=torch.float64) * scale, right[1]]
    assert value_check._difference(off, right) == pytest.approx(0.0025)
    assert value_check._difference([right[0], torch.tensor([3, 6])], right) == 1
    assert value_check._difference([right[0] * float("nan"), right[1]], right) == float("inf")
    assert value_check._difference(right[:1], right) == float("inf")


class HiddenByANorm(PlainChain):
    """Twice as large or not makes no difference behind the norm of each map, but for its eps."""

    def features(self, x):
        x = self.conv1(x)
        x = torch.cat([x[:, : x.shape[1] // 2] * 2, x[:, x.shape[1] // 2 :]], 1)
        return self.conv2(nn.functional.instance_norm(x)).relu()


def test_a_mistake_that_a_norm_hides_but_for_a_millionth_is_seen():
    groups = tk.find_channel_groups(HiddenByANorm(), torch.empty(SHAPE))
    net = seeded(HiddenByANorm())
    for seed in range(4):
        assert slim_differs_from_masked(net, groups, random_keep(groups, seed), SHAPE) < TOLERANCE
    shapes = tk.find_channel_groups(net, torch.empty(SHAPE), verify="shapes")
    assert 0 < slim_differs_from_masked(net, shapes, {"conv1": [1]}, SHAPE) < 1e-4


def test_nothing_of_the_caller_is_touched():
    torch.manual_seed(3)
    model = VisionTransformer()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    tk.find_channel_groups(model, torch.empty(SHAPE))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_only_trace_errors_leave_it(monkeypatch):
    monkeypatch.setattr("timm_knapsack.channels.find_groups.groups_of", lambda *_: 1 / 0)
    with pytest.raises(TraceError, match="the channels of PlainChain can't be grouped: ZeroDivisionError"):
        tk.find_channel_groups(PlainChain(), torch.empty(SHAPE))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("crosses", [False, True])
def test_the_units_drawn_show_what_they_should(size, crosses):
    group = tk.find_channel_groups(Tricky(TRICKS["nothing"][0]), torch.empty(SHAPE), verify=False)["conv1"]
    group = type(group)("g", size, group.slices, crosses_norm=crosses)
    some, many, few = (value_check.drawn_units(group, how) for how in value_check.WAYS_TO_DRAW)
    least = min(2 if crosses else 1, size - 1)
    for units in (some, many, few):
        assert least <= len(set(units)) == len(units) and units == sorted(units)
        assert 0 <= units[0] and units[-1] < size
    assert 0 not in some and (size - 1 not in some or size <= 3) and 0 in many
    assert len(few) <= max(least, size // 5)
    assert (len(many) == 2) if size == 2 else (size - 2 <= len(many) < size)
    assert size <= 4 or (len(some) - len(many)) % 2 == 1


class Halves(PlainChain):
    """The cut is right as long as both halves lose as many."""

    def features(self, x):
        x = self.conv1(x)
        half = x.shape[1] // 2
        return self.conv2(torch.cat([x[:, :half] * 2, x[:, half:]], 1)).relu()


def test_neighbours_lose_different_numbers():
    groups = tk.find_channel_groups(Halves(), torch.empty(SHAPE))
    assert sum(g.size for g in groups if g.name.startswith("conv1")) < 6
    net = seeded(Halves())
    for seed in range(4):
        assert slim_differs_from_masked(net, groups, random_keep(groups, seed), SHAPE) < TOLERANCE
