"""find_channel_groups sees every kind of coupling, says what is frozen and why, and touches nothing."""

import copy

import pytest
import timm
import torch
from nets import NETS, CachedInference, Depthwise, FlattenedHead, SkipConnections, VisionTransformer
from oracle import seeded, shapes_of, torch_macs
from torch import nn

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError, TraceError
from timm_knapsack.slim.example_inputs import example_input


def groups_of(model, shape=(1, 3, 8, 8)):
    return tk.find_channel_groups(model, torch.empty(shape))


@pytest.mark.parametrize("name", NETS)
def test_groups_are_those_worked_out_by_hand(name):
    net = NETS[name]
    groups = tk.find_channel_groups(net.build(), torch.empty(net.shape))
    assert {group.name: group.size for group in groups} == net.groups
    assert set(groups.frozen) == set(net.frozen)
    assert {group.name for group in groups if group.crosses_norm} == set(net.crosses_norm)


@pytest.mark.parametrize("name", NETS)
def test_macs_are_those_that_torch_counts(name):
    net = NETS[name]
    model = net.build()
    assert tk.find_channel_groups(model, torch.empty(net.shape)).macs() == torch_macs(model, net.shape)


@pytest.mark.parametrize("name", NETS)
def test_every_index_of_a_slice_belongs_to_one_unit(name):
    net = NETS[name]
    groups = tk.find_channel_groups(net.build(), torch.empty(net.shape))
    taken = set()
    for group in groups:
        for s in (*group.slices, *group.hidden_slices):
            assert s.index.dtype == torch.int64 and s.index.shape[0] == group.size
            indices = s.index.flatten().tolist()
            assert 0 <= min(indices) and max(indices) < groups.shapes[s.param][s.dim]
            owned = {(s.param, s.dim, i) for i in indices}
            assert len(owned) == len(indices) and not owned & taken
            taken |= owned
        assert any(s.role == "out" for s in group.slices), "a group is made by a conv or linear"


def test_a_unit_owns_the_slices_that_the_docs_promise():
    group = groups_of(SkipConnections())["blocks.0.conv1"]
    owned = {(s.param, s.dim): (s.index[5].tolist(), s.role) for s in group.slices}
    assert owned == {
        ("blocks.0.conv1.weight", 0): ([5], "out"),
        ("blocks.0.bn1.weight", 0): ([5], ""),
        ("blocks.0.bn1.bias", 0): ([5], ""),
        ("blocks.0.bn1.running_mean", 0): ([5], ""),
        ("blocks.0.bn1.running_var", 0): ([5], ""),
        ("blocks.0.conv2.weight", 1): ([5], "in"),
    }


def test_a_stream_holds_all_layers_that_write_into_it():
    group = groups_of(SkipConnections())["stem"]
    writers = {s.param for s in group.slices if s.role == "out"}
    readers = {s.param for s in group.slices if s.role == "in"}
    assert writers == {"stem.weight", "blocks.0.conv2.weight", "blocks.1.conv2.weight"}
    assert readers == {"blocks.0.conv1.weight", "blocks.1.conv1.weight", "fc.weight"}


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("SkipConnections", {"stem"}),
        ("VisionTransformer", {"embed"}),
        ("LayerNormed", {"stem"}),
        ("SqueezeExcite", set()),  # a gate is multiplied, not added
        ("GlobalResponseNorm", {"stem"}),  # "inner" adds its channels to themselves: one layer makes them
        ("DenselyJoined", set()),
        ("Depthwise", set()),
    ],
)
def test_streams_are_where_several_layers_add_their_outputs(name, streams):
    net = NETS[name]
    groups = tk.find_channel_groups(net.build(), torch.empty(net.shape))
    assert {group.name for group in groups if group.is_stream} == streams


def test_one_unit_may_own_several_indices():
    by_param = {(s.param, s.dim): s.index.tolist() for s in groups_of(Depthwise())["multiply"].slices}
    assert by_param["twice.weight", 0][3] == [6, 7], "a depthwise conv that makes two channels of each"
    by_param = {(s.param, s.dim): s.index.tolist() for s in groups_of(FlattenedHead())["conv2"].slices}
    assert by_param["fc.weight", 1][2] == [8, 9, 10, 11], "a flattened map: one input for each pixel"
    by_param = {(s.param, s.dim): s.index.tolist() for s in groups_of(VisionTransformer())["attn.qkv"].slices}
    assert by_param["attn.qkv.weight", 0][1] == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23], "a head: q, k and v of it"
    assert by_param["attn.proj.weight", 1][1] == [4, 5, 6, 7]


def test_frozen_layers_say_why():
    nets = ("SortedChannels", "LiteralSizes", "TransposedConv")
    reasons = {name: groups_of(NETS[name].build()).frozen for name in nets}
    assert reasons["SortedChannels"]["fc"] == "the model's output"
    assert "no rule for the op aten.sort" in reasons["SortedChannels"]["conv1"]
    assert "the model itself" in reasons["SortedChannels"]["conv1"], "the module is named too"
    assert reasons["LiteralSizes"]["conv1"].startswith("the dry run without some of its channels fails: ")
    assert reasons["TransposedConv"]["up"] == "the model's input"


def test_an_op_without_a_rule_is_named_with_its_module():
    class Sorts(nn.Module):
        def forward(self, x):
            return x.sort(dim=1).values

    model = nn.Sequential(nn.Conv2d(3, 5, 1), Sorts(), nn.Conv2d(5, 4, 1))
    assert groups_of(model).frozen["0"] == "no rule for the op aten.sort (aten.sort in 1)"


def test_a_layer_that_the_forward_pass_skips_is_left_alone():
    class Idle(SkipConnections):
        def __init__(self):
            super().__init__()
            self.spare = nn.Conv2d(6, 6, 1)

    groups = groups_of(Idle())
    assert groups.frozen["spare.weight"] == "the forward pass does not use it"
    assert not any(s.param.startswith("spare") for group in groups for s in group.slices)


def test_the_model_is_neither_changed_nor_run():
    model = CachedInference().train()
    original = model.conv
    original.register_forward_pre_hook(lambda conv, _: pytest.fail("it was run") if conv is original else None)
    before = copy.deepcopy(model.state_dict())
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    groups_of(model)
    assert model.training and all(module.training for module in model.modules())
    assert model.bias.cache == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert versions == {name: parameter._version for name, parameter in model.named_parameters()}
    assert "forward_features" not in vars(model) and len(model.conv._forward_pre_hooks) == 1


def test_what_a_module_cached_for_inference_does_not_matter():
    model = seeded(CachedInference())
    model(torch.randn(1, 3, 8, 8))  # fills the cache on the CPU
    assert model.bias.cache
    assert groups_of(model)["conv"].size == 6


def test_the_device_and_the_dtype_do_not_matter():
    plain = groups_of(VisionTransformer())
    for other in (VisionTransformer().to("meta"), VisionTransformer().half(), VisionTransformer().double()):
        found = tk.find_channel_groups(other, torch.empty((1, 3, 8, 8), dtype=next(other.parameters()).dtype))
        assert [(g.name, g.size) for g in found] == [(g.name, g.size) for g in plain]
        assert found.frozen == plain.frozen and found.terms == plain.terms


def test_a_model_that_asks_for_values_is_traced_with_real_tensors():
    class AsksForAValue(SkipConnections):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() >= 0 else 1.0)

    groups = groups_of(AsksForAValue())
    assert {g.name: g.size for g in groups} == NETS["SkipConnections"].groups


def test_tracing_twice_gives_the_same():
    first, second = (groups_of(NETS["WidthsReadOffTheInput"].build()) for _ in range(2))
    assert [(g.name, g.size) for g in first] == [(g.name, g.size) for g in second]
    assert (first.frozen, first.terms, first.attributes) == (second.frozen, second.terms, second.attributes)


def test_groups_behave_like_a_sequence_with_names():
    groups = groups_of(SkipConnections())
    assert len(groups) == 3 and groups[0] is groups["stem"] and next(iter(groups)) is groups[0]
    assert groups.sizes == [group.size for group in groups]
    assert "3 groups" in repr(groups) and "'stem'" in repr(groups[0])
    with pytest.raises(KeyError):
        groups["no such group"]


def test_timm_models_say_their_own_input_size():
    with torch.device("meta"):
        model = timm.create_model("resnet18", in_chans=1)
        image_size = timm.create_model("vit_tiny_patch16_224", img_size=64)
    assert tk.find_channel_groups(model, verify="none").input_shape == (1, 1, 224, 224)
    assert tk.find_channel_groups(image_size, verify="none").input_shape == (1, 3, 64, 64)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_stem_that_folds_pixels_into_channels_takes_ordinary_images(channels):
    with torch.device("meta"):
        model = timm.create_model("tresnet_m", in_chans=channels)
    assert example_input(model) == (1, channels, 224, 224)


@pytest.mark.parametrize("kept, expected", [([6, 8, 5], None), ([1, 1, 1], "least"), ([3, 8, 5], "some")])
def test_predicted_macs_follow_the_kept_widths(kept, expected):
    groups = groups_of(SkipConnections())
    stem, inner0, inner1 = kept
    pixels = 64
    by_hand = pixels * 9 * (3 * stem + 2 * stem * inner0 + 2 * stem * inner1) + stem * 4
    assert groups.macs(kept) == by_hand
    assert (groups.macs() == by_hand) == (expected is None)


# ---- models that can't be traced ----------------------------------------------------------------------------------


def test_a_model_without_an_input_size_is_told_what_to_pass():
    with pytest.raises(TraceError, match="pass example_inputs"):
        tk.find_channel_groups(SkipConnections())


def test_an_input_that_does_not_fit_is_named():
    model = SkipConnections()
    shapes = shapes_of(model)
    with pytest.raises(TraceError, match=r"SkipConnections can't be run on \[1, 5, 8, 8\]"):
        tk.find_channel_groups(model, torch.empty(1, 5, 8, 8))
    assert shapes_of(model) == shapes


def test_a_model_on_mixed_devices_is_refused():
    model = SkipConnections()
    model.blocks.to("meta")
    with pytest.raises(TraceError, match="spread over cpu, meta; move it to one device first"):
        groups_of(model)
    assert issubclass(TraceError, KnapsackError) and issubclass(TraceError, ValueError)
    assert model.stem.weight.device.type == "cpu" and model.blocks[0].conv1.weight.is_meta
