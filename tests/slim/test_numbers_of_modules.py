"""Which numbers of a module may follow its channels, and that setting one is strict: by name, by type, by size."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from timm_knapsack.errors import ChannelConfigError, KeepError
from timm_knapsack.slim import cutting
from timm_knapsack.slim.attributes import (
    apply_attributes,
    channel_numbers,
    feature_entries,
    get_attribute,
    holders,
    set_attribute,
    sync_layer,
)
from timm_knapsack.slim.channel_config import ChannelConfig
from timm_knapsack.slim.channel_groups import Attribute, ChannelGroup, ChannelGroups, Count, Slice
from timm_knapsack.slim.cutting import channel_config_of, kept_outputs, mask_model, resize_model, slice_model


def module(**values) -> nn.Module:
    made = nn.Identity()
    for name, value in values.items():
        setattr(made, name, value)
    return made


# ---- who holds a number


def test_numbers_that_count_something_else_are_left_alone_unless_named():
    net = module(width=8, dim=8, window_size=8, kernel_size=8, num_heads=8, _hidden=8, img_size=8, yes=True, part=8.0)
    assert list(holders(net, 8)) == ["width", "dim"]
    assert list(holders(net, 8, heads=True)) == ["num_heads"]
    assert list(holders(net, 8, names=("window_size", "num_heads", "_hidden"))) == ["window_size", "num_heads"]
    assert list(holders(net, 8, names=("window_size",), heads=True)) == ["window_size"]
    assert list(holders(net, 1)) == list(holders(net, 7)) == []
    assert channel_numbers(net) == {8}
    assert channel_numbers(module(width=2, dim=1, other=0, yes=True, kernel=9, _own=7, part=5.0, heads=3)) == {2, 3}


def test_groups_count_heads_where_nothing_is_named_so():
    assert list(holders(module(groups=4, width=4), 4, heads=True)) == ["groups"]
    assert list(holders(module(groups=4, num_heads=4), 4, heads=True)) == ["num_heads"]
    assert list(holders(module(groups=4, width=4), 4)) == ["groups", "width"]


def test_lists_of_up_to_sixteen_numbers_are_looked_into():
    short, long = [8] * 16, [8] * 17
    assert list(holders(module(dims=short), 8)) == [f"dims.{i}" for i in range(16)]
    assert list(holders(module(dims=long), 8)) == []
    assert list(holders(module(dims=(8, 8.0, True, "8", 9, [8])), 8)) == ["dims.0"]
    assert list(holders(module(dims=(1, True)), 1)) == ["dims.0"]
    assert list(holders(module(dims={"a": 8}, text="8888"), 8)) == []


def test_of_a_list_as_long_as_the_parts_only_that_part():
    net = module(dims=(8, 8, 8), pair=(8, 8), width=8)
    assert list(holders(net, 8, part=(1, 3))) == ["dims.1", "pair.0", "pair.1", "width"]
    assert list(holders(net, 8, part=(0, 2))) == ["dims.0", "dims.1", "dims.2", "pair.0", "width"]


# ---- paths


def test_numbers_are_set_wherever_they_stand_and_the_rest_stays():
    net = module(width=4, sizes=[4, 8], pair=(4, 8), table={"inner": (4, [8, 4]), "other": 4}, deep=[{"a": [1, 2]}])
    net.inner = module(width=4, sizes=(4, 8))
    net.feature_info = SimpleNamespace(info=[{"num_chs": 4}, {"num_chs": 8}])
    paths = ("width", "sizes.1", "pair.1", "table.inner.0", "table.inner.1.1", "table.other", "deep.0.a.1",
             "feature_info.1.num_chs")  # fmt: skip
    for i, path in enumerate(paths):
        set_attribute(net, path, 100 + i)
        assert get_attribute(net, path) == 100 + i, path
    assert net.width == 100 and net.sizes == [4, 101] and net.pair == (4, 102) and type(net.pair) is tuple
    assert net.table == {"inner": (103, [8, 104]), "other": 105} and net.deep == [{"a": [1, 106]}]
    assert net.feature_info.info == [{"num_chs": 4}, {"num_chs": 107}]


@pytest.mark.parametrize("path", ["sizes.2", "sizes.-1", "sizes.a", "table.no", "none", "sizes.0.a", "feature_info.a",
                                  "plain.0", "forward"])  # fmt: skip
def test_paths_that_lead_nowhere(path):
    net = module(sizes=[4, 8], table={}, plain=SimpleNamespace(), feature_info=SimpleNamespace(info=[{}]))
    with pytest.raises((KeyError, TypeError)):
        get_attribute(net, path)
    with pytest.raises(ChannelConfigError, match=r"attributes\[''\]\['.*'\]: Identity has no such number"):
        apply_attributes(net, {"": {path: 1}})


@pytest.mark.parametrize("path, value, right", [
    ("width", 8, True), ("width", 1, True), ("width", 9, False), ("width", 0, False), ("width", -1, False),
    ("pad_before", 0, True), ("pad_before", -1, True), ("pad_before", 9, False), ("width", 7, True),
])  # fmt: skip
def test_a_number_may_shrink_to_one_and_padding_to_none(path, value, right):
    net = nn.Sequential(module(width=8, pad_before=8))
    if right:
        apply_attributes(net, {"0": {path: value}})
        assert getattr(net[0], path) == value
    else:
        with pytest.raises(ChannelConfigError, match=rf"\['{path}'\] is {value}, expected 1 to 8 as in the base model"):
            apply_attributes(net, {"0": {path: value}})
        assert getattr(net[0], path) == 8


@pytest.mark.parametrize("held", [True, 8.0, "8", [8], None])
def test_what_is_no_number_of_channels_is_not_set(held):
    with pytest.raises(ChannelConfigError, match="which is not a number of channels"):
        apply_attributes(module(width=held), {"": {"width": 1}})


def test_modules_that_are_not_there():
    with pytest.raises(ChannelConfigError, match=r"the model has no module '0\.1'"):
        apply_attributes(nn.Sequential(nn.Identity()), {"0.1": {"width": 1}})


# ---- layers


class RmsNorm(nn.Module):
    def __init__(self, shape, affine=True):
        super().__init__()
        self.normalized_shape = shape
        self.weight = nn.Parameter(torch.ones(4)) if affine else None


def test_norms_know_their_new_shape_and_those_without_weights_keep_theirs():
    for norm in (nn.LayerNorm(8), RmsNorm((8,))):
        norm.weight = nn.Parameter(torch.ones(4))
        sync_layer(norm)
        assert norm.normalized_shape == (4,) and type(norm.normalized_shape) is tuple
    for norm in (RmsNorm((8,), affine=False), nn.LayerNorm(8, elementwise_affine=False)):
        sync_layer(norm)
        assert norm.normalized_shape == (8,)
    other = module(normalized_shape=(8,))
    other.weight = nn.Parameter(torch.ones(4))
    sync_layer(other)
    assert other.normalized_shape == (8,)


def test_layers_without_weights_keep_their_numbers():
    for layer in (nn.BatchNorm2d(8, track_running_stats=False), nn.InstanceNorm2d(8), nn.GroupNorm(2, 8, affine=False)):
        before = {k: v for k, v in vars(layer).items() if type(v) is int}
        sync_layer(layer)
        assert before == {k: v for k, v in vars(layer).items() if type(v) is int}
    recurrent = nn.GRU(6, 8)
    smaller = nn.GRU(3, 4)
    for name, parameter in smaller.named_parameters():
        setattr(recurrent, name, parameter)
    sync_layer(recurrent)
    assert (recurrent.input_size, recurrent.hidden_size) == (3, 4)


def test_entries_of_feature_info():
    good = {"num_chs": 8, "module": "a"}
    info = [good, {**good, "hook_type": "forward_pre"}, {**good, "hook_type": "forward"}, {"num_chs": 8},
            {"num_chs": 8.0, "module": "a"}, {"module": "a"}, {"num_chs": 8, "module": ""}, "a"]  # fmt: skip
    expected = [(0, "a", "out"), (1, "a", "in"), (2, "a", "out")]
    assert list(feature_entries(module(feature_info=info))) == expected
    assert list(feature_entries(module(feature_info=SimpleNamespace(info=tuple(info))))) == expected
    assert list(feature_entries(module())) == list(feature_entries(module(feature_info={"a": good}))) == []


# ---- the cut


class Net(nn.Module):
    """Two convs; a number that follows, and a plain tensor under the name of a weight."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)
        self.width, self.scale = 6, nn.Parameter(torch.rand(6))
        self.inner = module(note=torch.arange(6.0), scale=torch.arange(1.0, 7))
        self.running_mean = nn.Parameter(torch.rand(6))


def groups_of(net) -> ChannelGroups:
    units = torch.arange(6)[:, None]
    slices = (Slice("conv1.weight", 0, units, "out"), Slice("conv1.bias", 0, units),
              Slice("conv2.weight", 1, units, "in"), Slice("scale", 0, units))  # fmt: skip
    hidden = (Slice("running_mean", 0, units),)
    shapes = {name: tuple(t.shape) for name, t in net.named_parameters()}
    attributes = (Attribute("", "width", 1, (Count(0, ((0, 1),)),)), Attribute("conv1", "out_channels", 6, ()))
    return ChannelGroups((ChannelGroup("conv1", 6, slices, hidden),), {}, (), attributes[:1], shapes)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_what_is_cut_and_what_is_masked(memory):
    net = Net().to(memory_format=memory)
    groups, keep = groups_of(net), [1, 4]
    gone = [0, 2, 3, 5]
    slim, masked = slice_model(net, groups, {"conv1": keep}), mask_model(net, groups, {"conv1": keep})
    assert torch.equal(slim.conv1.weight, net.conv1.weight[keep])
    assert torch.equal(slim.conv2.weight, net.conv2.weight[:, keep])
    assert torch.equal(slim.scale, net.scale[keep]) and torch.equal(slim.running_mean, net.running_mean[keep])
    assert (slim.width, slim.conv1.out_channels, slim.conv2.in_channels, net.width) == (2, 2, 2, 6)
    assert torch.equal(slim.inner.note, net.inner.note) and slim.inner.note is not net.inner.note
    assert slim.conv2.weight.is_contiguous(memory_format=memory)
    for copied in (slim, masked):
        for name in ("note", "scale"):
            new, old = getattr(copied.inner, name), getattr(net.inner, name)
            assert torch.equal(new, old) and new is not old, name
    for name, tensor in masked.named_parameters():
        whole = net.get_parameter(name)
        dim = {"conv1.weight": 0, "conv1.bias": 0, "conv2.weight": 1, "scale": 0}.get(name)
        expected = whole.detach().clone()
        if dim is not None:
            expected.index_fill_(dim, torch.tensor(gone), 0)
        assert torch.equal(tensor, expected), name  # statistics stay: nothing is divided by zero
    whole = slice_model(net, groups, {})
    for name, tensor in whole.named_parameters():
        assert torch.equal(tensor, net.get_parameter(name)) and tensor is not net.get_parameter(name)
        assert tensor.untyped_storage().data_ptr() != net.get_parameter(name).untyped_storage().data_ptr()


@pytest.mark.parametrize("memory, dims", [(torch.channels_last, 4), (torch.channels_last_3d, 5)])
def test_memory_stays_as_it_was_laid_out(memory, dims):
    """Of any shape: one that is in order both ways is left in the usual one."""
    old = torch.rand((2, 3) + (4,) * (dims - 2)).contiguous(memory_format=memory)
    new = torch.rand((2, 2) + (4,) * (dims - 2))
    assert cutting._like_memory(new, old).stride() == new.contiguous(memory_format=memory).stride()
    assert cutting._like_memory(new.contiguous(memory_format=memory), new).stride() == new.stride()
    both = torch.rand((2, 3) + (1,) * (dims - 2))
    assert cutting._like_memory(new, both).stride() == new.stride()
    assert cutting._like_memory(torch.rand(4, 3).T, torch.rand(3, 4)).stride() == (4, 1)


def test_groups_of_another_model_are_refused_by_name():
    net = Net()
    groups = groups_of(net)
    wider = Net()
    wider.scale = nn.Parameter(torch.rand(7))
    fewer = Net()
    del fewer.scale
    more = Net()
    more.extra = nn.Parameter(torch.rand(1))
    for other, name in ((wider, "scale"), (fewer, "scale"), (more, "a tensor")):
        for use in (slice_model, mask_model):
            with pytest.raises(KeepError, match=f"^these groups belong to another model: {name} differs; call"):
                use(other, groups, {})


def test_the_config_of_a_cut_says_what_changed_and_nothing_else(monkeypatch):
    net = Net()
    groups = groups_of(net)
    whole = channel_config_of(groups, {}, "net")
    assert (whole.widths, whole.attributes, whole.base_args, whole.features, whole.kept) == ({}, {}, {}, {}, {})
    one_less = channel_config_of(groups, {"conv1": range(5)}, "net", {"depth": 1}, None)
    assert one_less.attributes == {"": {"width": 5}} and one_less.base_args == {"depth": 1}
    params = ("conv1.weight", "conv1.bias", "scale", "running_mean")
    assert one_less.widths == {"conv2.weight": {1: 5}, **{param: {0: 5} for param in params}}
    assert one_less.kept == {"conv1.weight": {0: (0, 1, 2, 3, 4)}}
    kept = kept_outputs(groups, {"conv1": [0, 2]}, net)
    assert list(kept) == ["conv1"] and kept["conv1"].tolist() == [0, 2] and kept_outputs(groups, {}, net) == {}
    with monkeypatch.context() as patch:  # as of a CondConv, whose kernels lie in one long dim
        patch.setattr(cutting, "MOST_CHANNELS", 5)
        assert channel_config_of(groups, {"conv1": range(5)}, "net").kept == {}
    features = {"class": "FeatureListNet", "out_indices": (1,)}
    assert channel_config_of(groups, {}, "net", None, features).features == features


def config(widths, **more):
    return ChannelConfig("net", widths, **more)


@pytest.mark.parametrize("widths, words", [
    ({"conv9.weight": {0: 1}}, "the base model 'net' has no parameter 'conv9.weight'"),
    ({"scale": {1: 1}}, r"widths\['scale'\]: there is no dim 1; the parameter has 1 dims"),
    ({"conv1.weight": {4: 1}}, "there is no dim 4; the parameter has 4 dims"),
    ({"conv1.weight": {0: 7}}, r"widths\['conv1.weight'\]\['0'\] is 7, more than the base model's 6"),
])  # fmt: skip
def test_a_config_of_another_model_is_refused(widths, words):
    with pytest.raises(ChannelConfigError, match=words):
        resize_model(Net(), config(widths))


@pytest.mark.parametrize("kept, right", [((0, 5), True), ((0, 6), False)])
def test_a_config_names_channels_that_are_there(kept, right):
    said = config({"conv1.weight": {0: 2}, "conv1.bias": {0: 6}}, kept={"conv1.weight": {0: kept}})
    if right:
        assert resize_model(Net(), said).conv1.weight.shape == (2, 3, 3, 3)
    else:
        with pytest.raises(ChannelConfigError, match="names channel 6, the base model has 6"):
            resize_model(Net(), said)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_what_is_resized_and_what_is_not(memory):
    net = Net().to(memory_format=memory)
    widths = {"conv1.weight": {0: 2}, "conv2.weight": {1: 2}, "scale": {0: 2}}
    said = config(widths, attributes={"": {"width": 2}})
    slim = resize_model(net, said)
    assert slim.conv1.weight.shape == (2, 3, 3, 3) and slim.conv2.weight.shape == (4, 2, 3, 3)
    assert (slim.conv1.out_channels, slim.conv2.in_channels, slim.width, net.width) == (2, 2, 2, 6)
    assert slim.conv2.weight.is_contiguous(memory_format=memory)
    for name in ("conv1.bias", "conv2.bias", "running_mean"):
        assert torch.equal(slim.get_parameter(name), net.get_parameter(name))
        assert slim.get_parameter(name) is not net.get_parameter(name)
    assert slim.scale.shape == (2,)
    for name in ("note", "scale"):
        new, old = getattr(slim.inner, name), getattr(net.inner, name)
        assert torch.equal(new, old) and new is not old, name


def test_a_layer_at_the_top_is_synced_too():
    layer = nn.Conv2d(3, 6, 1, bias=False)
    slim = resize_model(layer, config({"weight": {0: 2}}))
    assert (slim.out_channels, slim.in_channels) == (2, 3)
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 6)))
    assert resize_model(nested, config({"0.0.weight": {0: 2}, "0.0.bias": {0: 2}}))[0][0].out_features == 2
