"""slice_model: a smaller copy that is otherwise the same model, usable wherever the full one is."""

import copy
import threading

import pytest
import timm
import torch
from nets import NETS, HiddenBuffer, LayerNormed, PlainChain, SkipConnections, TiedWeights, VisionTransformer
from oracle import first, random_keep, seeded, shapes_of
from timm.models._features import FeatureGetterNet, FeatureHookNet, FeatureListNet
from torch import nn

import timm_knapsack as tk
from timm_knapsack.errors import KeepError
from timm_knapsack.slim.cutting import kept_indices, mask_model, slice_model

IMAGE = (1, 3, 8, 8)
KEEP = {"stem": [0, 2, 5], "blocks.0.conv1": [1, 4], "blocks.1.conv1": [0, 1, 2]}


def traced(build=SkipConnections):
    model = seeded(build())
    return model, tk.find_channel_groups(model, torch.empty(IMAGE))


# ---- what is cut --------------------------------------------------------------------------------------------------


def test_the_kept_filters_are_the_right_ones():
    model, groups = traced()
    slim = slice_model(model, groups, KEEP)
    conv = model.blocks[0].conv1.weight
    assert torch.equal(slim.blocks[0].conv1.weight, conv[[1, 4]][:, [0, 2, 5]])
    assert torch.equal(slim.blocks[0].bn1.running_var, model.blocks[0].bn1.running_var[[1, 4]])
    assert torch.equal(slim.fc.weight, model.fc.weight[:, [0, 2, 5]]) and torch.equal(slim.fc.bias, model.fc.bias)
    assert slim.blocks[0].bn1.num_features == 2 and slim.fc.in_features == 3
    kept = kept_indices(groups, groups.check_keep(KEEP))
    assert kept["blocks.0.conv1.weight"][0].tolist() == [1, 4]


def test_keep_may_be_a_list_a_range_a_mask_or_unsorted():
    model, groups = traced()
    wanted = slice_model(model, groups, {"stem": torch.tensor([1, 3])}).state_dict()
    for same in ([3, 1], range(1, 5, 2), torch.tensor([0, 1, 0, 1, 0, 0]).bool(), torch.tensor([1, 3, 3]).int()):
        state = slice_model(model, groups, {"stem": same}).state_dict()
        assert all(torch.equal(wanted[name], state[name]) for name in wanted)


def test_keeping_everything_is_a_copy():
    model, groups = traced()
    same = slice_model(model, groups, {})
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True))
    assert repr(same) == repr(model) and same is not model
    mine = {t.data_ptr() for t in model.state_dict().values()}
    assert not mine & {t.data_ptr() for t in same.state_dict().values()}, "no memory is shared"


@pytest.mark.parametrize("name", ["SkipConnections", "VisionTransformer", "Recurrent", "HiddenBuffer", "TiedWeights"])
def test_the_original_is_untouched_bit_for_bit(name):
    net = NETS[name]
    model = seeded(net.build())
    before, text = copy.deepcopy(dict(model.named_buffers()) | dict(model.named_parameters())), repr(model)
    numbers = {n: {k: v for k, v in vars(m).items() if type(v) is int} for n, m in model.named_modules()}
    groups = tk.find_channel_groups(model, torch.empty(net.shape))
    slim = slice_model(model, groups, random_keep(groups, 3))
    for parameter in slim.parameters():
        parameter.data.fill_(7)
    mask_model(model, groups, random_keep(groups, 4))
    after = dict(model.named_buffers()) | dict(model.named_parameters())
    assert all(torch.equal(before[key], after[key]) for key in before) and repr(model) == text
    assert numbers == {n: {k: v for k, v in vars(m).items() if type(v) is int} for n, m in model.named_modules()}


def test_buffers_outside_the_state_dict_shrink_too():
    model, groups = traced(HiddenBuffer)
    slim = slice_model(model, groups, {"conv": [1, 4]})
    assert torch.equal(slim.level, model.level[:, [1, 4]]) and "level" not in slim.state_dict()


def test_a_masked_model_is_zero_exactly_where_the_slim_one_is_cut():
    model, groups = traced(PlainChain)
    masked = mask_model(model, groups, {"conv1": [0, 5]})
    assert masked.conv1.weight[[1, 2, 3, 4]].abs().max() == 0
    assert torch.equal(masked.conv1.weight[0], model.conv1.weight[0])
    assert masked.conv2.weight[:, 1:5].abs().max() == 0
    assert torch.equal(masked.bn1.running_var, model.bn1.running_var), "a zero variance would divide by nothing"


# ---- what stays as it was -----------------------------------------------------------------------------------------


class OwnConv(nn.Conv2d):
    """A subclass with a number of its own."""

    def __init__(self, *args, flavour="strawberry", **kwargs):
        super().__init__(*args, **kwargs)
        self.flavour = flavour


def test_layer_classes_and_their_settings_stay():
    net = nn.Sequential(
        OwnConv(3, 6, 3, stride=2, dilation=2, padding=1, padding_mode="reflect", flavour="mint"),
        nn.BatchNorm2d(6, eps=1e-3, momentum=0.3),
        nn.LeakyReLU(0.3),
        nn.GroupNorm(2, 6, eps=0.1),
        nn.Conv2d(6, 4, 1),
    )
    groups = tk.find_channel_groups(net, torch.empty(1, 3, 16, 16))
    slim = slice_model(net, groups, {"0": [0]})
    conv, norm, act, group_norm, _ = slim
    assert [type(module) for module in slim] == [type(module) for module in net]
    assert (conv.flavour, conv.stride, conv.dilation, conv.padding_mode) == ("mint", (2, 2), (2, 2), "reflect")
    assert (norm.eps, norm.momentum, act.negative_slope, group_norm.eps) == (1e-3, 0.3, 0.3, 0.1)
    assert group_norm.num_channels % group_norm.num_groups == 0 and conv.out_channels < 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype):
    model = seeded(SkipConnections()).to(dtype)
    groups = tk.find_channel_groups(model, torch.empty(IMAGE, dtype=dtype))
    slim = slice_model(model, groups, KEEP)
    assert {t.dtype for t in slim.state_dict().values()} == {dtype, torch.int64}, "num_batches_tracked is int64"
    assert torch.equal(slim.stem.weight, model.stem.weight[[0, 2, 5]])


def test_the_device_stays():
    groups = tk.find_channel_groups(SkipConnections().to("meta"), torch.empty(IMAGE))
    slim = slice_model(SkipConnections().to("meta"), groups, KEEP)
    assert all(t.is_meta for t in slim.state_dict().values()) and slim.stem.out_channels == 3
    assert slice_model(SkipConnections(), groups, KEEP).stem.weight.device.type == "cpu", "groups fit any device"


def test_training_flags_stay_module_by_module():
    model, groups = traced()
    model.train()
    model.blocks[0].bn1.eval()
    model.fc.weight.requires_grad_(False)
    slim = slice_model(model, groups, KEEP)
    assert {n: m.training for n, m in slim.named_modules()} == {n: m.training for n, m in model.named_modules()}
    assert not slim.blocks[0].bn1.training and slim.training
    assert {n: p.requires_grad for n, p in slim.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.grad is None for p in slim.parameters())


def test_channels_last_stays():
    model = seeded(SkipConnections()).to(memory_format=torch.channels_last)
    groups = tk.find_channel_groups(model, torch.empty(IMAGE))
    slim = slice_model(model, groups, KEEP)
    weight = slim.blocks[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    plain, groups = traced()
    assert all(p.is_contiguous() for p in slice_model(plain, groups, KEEP).parameters())


def test_tied_weights_stay_tied():
    model, groups = traced(TiedWeights)
    slim = slice_model(model, groups, {"stem": [0, 1, 4]})
    assert slim.first.weight is slim.second.weight and slim.first.weight.shape == (3, 3, 1, 1)
    assert slim.first.bias is not slim.second.bias


def test_forward_hooks_come_along_even_those_that_cannot_be_copied():
    """They may change what a module returns; hooks of the backward pass change no output and stay behind."""
    model, groups = traced()
    calls = []

    class Watcher:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, *_):
            calls.append(1)

    watcher = Watcher()
    model.stem.register_forward_hook(watcher)
    model.stem.register_forward_pre_hook(watcher, with_kwargs=True)
    model.stem.register_full_backward_hook(watcher)
    slim = slice_model(model, groups, KEEP)
    slim(torch.randn(IMAGE)).sum().backward()
    assert len(calls) == 2, "forwards, not backwards"
    assert len(model.stem._forward_hooks) == 1, "the original keeps its own"


def test_a_hook_that_is_a_method_is_bound_to_the_copy():
    class Doubles(SkipConnections):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))
            self.stem.register_forward_hook(self.double)

        def double(self, module, inputs, output):
            return output * self.factor

    model = seeded(Doubles())
    groups = tk.find_channel_groups(model, torch.empty(IMAGE))
    slim = slice_model(model, groups, KEEP)
    (hook,) = slim.stem._forward_hooks.values()
    assert hook.__self__ is slim
    x = torch.randn(IMAGE)
    assert torch.allclose(slim(x), mask_model(model, groups, KEEP)(x), atol=1e-5)
    with torch.no_grad():
        before = slim(x)
        slim.factor.zero_()
        assert not torch.allclose(slim(x), before) and model.factor == model.factor.abs() > 0


def test_plain_attributes_come_along():
    model, groups = traced()
    model.pretrained_cfg = {"input_size": (3, 8, 8), "tag": "mine"}
    model.note = ["anything"]
    slim = slice_model(model, groups, KEEP)
    assert slim.pretrained_cfg == model.pretrained_cfg and slim.note == ["anything"] and slim.note is not model.note


def test_a_slim_model_saves_loads_and_scripts_like_any_other(tmp_path):
    model, groups = traced(VisionTransformer)
    slim = slice_model(model, groups, {"attn.qkv": [1], "mlp.0": [0, 3, 4]})
    torch.save(slim.state_dict(), tmp_path / "slim.pt")
    again = slice_model(VisionTransformer(), groups, {"attn.qkv": [0], "mlp.0": [5, 6, 7]}).eval()
    again.load_state_dict(torch.load(tmp_path / "slim.pt", weights_only=True))
    x = torch.randn(2, *IMAGE[1:])
    assert torch.equal(again(x), slim(x)) and slim.attn.num_heads == 1
    traced_slim = torch.jit.trace(slim, x)
    assert torch.allclose(traced_slim(x), slim(x), atol=1e-6)


# ---- bad input ----------------------------------------------------------------------------------------------------

BAD_KEEP = [
    ({"layer9": [0]}, "names the group 'layer9', which is not among the 3 groups"),
    ({"stem": [0, 6]}, r"keep\['stem'\] holds 6; its units are 0 to 5"),
    ({"stem": [-1, 2]}, r"keep\['stem'\] holds -1; its units are 0 to 5"),
    ({"stem": []}, r"keep\['stem'\] (is empty|must be a list of unit indices)"),
    ({"stem": torch.zeros(0, dtype=torch.long)}, r"keep\['stem'\] is empty; at least one of its 6 units must stay"),
    ({"stem": torch.zeros(6, dtype=torch.bool)}, r"keep\['stem'\] is empty"),
    ({"stem": [0.0, 1.0]}, r"keep\['stem'\] must be a list of unit indices"),
    ({"stem": torch.tensor([[0, 1]])}, r"keep\['stem'\] must be a list of unit indices"),
    ({"stem": torch.tensor([True, False])}, r"keep\['stem'\] must be a list of unit indices"),
    ({"stem": 3}, r"keep\['stem'\] must be a list of unit indices"),
    ({"stem": "all"}, r"keep\['stem'\] must be a list of unit indices"),
    ({"stem": None}, r"keep\['stem'\] must be a list of unit indices"),
    ({"stem": [0, None]}, r"keep\['stem'\] must be a list of unit indices"),
]


@pytest.mark.parametrize("keep, message", BAD_KEEP, ids=[str(keep)[:40] for keep, _ in BAD_KEEP])
@pytest.mark.parametrize("cut", [slice_model, mask_model])
def test_a_bad_keep_is_named_and_changes_nothing(keep, message, cut):
    model, groups = traced()
    before, shapes = copy.deepcopy(model.state_dict()), shapes_of(model)
    with pytest.raises(KeepError, match=message):
        cut(model, groups, keep)
    assert shapes_of(model) == shapes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("cut", [slice_model, mask_model])
def test_groups_of_another_model_are_refused(cut):
    _, groups = traced()
    with pytest.raises(KeepError, match=r"these groups belong to another model: .*; call find_channel_groups\(model\)"):
        cut(PlainChain(), groups, {})
    model, groups = traced(LayerNormed)
    slim = slice_model(model, groups, {"inner": [0, 1]})
    with pytest.raises(KeepError, match=r"inner\.weight differs"):
        cut(slim, groups, {"inner": [0, 1]})


# ---- timm's own ways of using a model -----------------------------------------------------------------------------

TIMM = {
    "resnet18": {},
    "efficientnet_lite0": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1, 2, 1), "embed_dim": 24, "num_heads": (2,) * 4},
}
SIZE = {name: args.get("img_size", 64) for name, args in TIMM.items()}


@pytest.fixture(scope="module", params=TIMM)
def slim_timm(request):
    """(name, slim model): half of the units of each group are gone, another number in each."""
    torch.manual_seed(0)
    model = seeded(timm.create_model(request.param, num_classes=7, **TIMM[request.param]))
    groups = tk.find_channel_groups(model, torch.empty(1, 3, SIZE[request.param], SIZE[request.param]))
    keep = {g.name: torch.arange(g.size - max(1, g.size // 2 - i % 3)) for i, g in enumerate(groups) if g.size > 1}
    return request.param, model, slice_model(model, groups, keep)


def image_for(name):
    return torch.randn(2, 3, SIZE[name], SIZE[name], generator=torch.Generator().manual_seed(1))


def channels_of(model, feature):
    """Channels of a feature map: the last dim where the model's output format says so."""
    return feature.shape[-1 if getattr(model, "output_fmt", "NCHW") == "NHWC" or feature.dim() == 3 else 1]


@torch.no_grad()
def test_forward_features_and_head_agree_with_forward(slim_timm):
    name, full, slim = slim_timm
    x = image_for(name)
    features = slim.forward_features(x)
    assert torch.allclose(slim.forward_head(features), slim(x), atol=1e-5)
    assert slim.num_features == channels_of(slim, features) < full.num_features
    assert slim.forward_head(features, pre_logits=True).shape == (2, slim.head_hidden_size)
    assert slim.get_classifier().in_features == slim.head_hidden_size < full.head_hidden_size


@torch.no_grad()
def test_feature_info_tells_the_slim_widths(slim_timm):
    name, full, slim = slim_timm
    features = slim.forward_intermediates(image_for(name), intermediates_only=True)
    info = slim.feature_info if isinstance(slim.feature_info, list) else slim.feature_info.info
    before = full.feature_info if isinstance(full.feature_info, list) else full.feature_info.info
    assert [f.shape[1] for f in features] == [entry["num_chs"] for entry in info]
    assert all(entry["num_chs"] < old["num_chs"] for entry, old in zip(info, before, strict=True))


WRAPPERS = {
    "resnet18": (FeatureListNet, FeatureHookNet, FeatureGetterNet),
    "efficientnet_lite0": (FeatureHookNet, FeatureGetterNet),
    "convnext_atto": (FeatureListNet, FeatureHookNet, FeatureGetterNet),
    "vit_tiny_patch16_224": (FeatureGetterNet,),
    "swin_tiny_patch4_window7_224": (FeatureListNet, FeatureGetterNet),
}


@torch.no_grad()
def test_features_only_wrappers_work(slim_timm):
    name, _, slim = slim_timm
    for wrapper in WRAPPERS[name]:
        flatten = wrapper is FeatureListNet and name != "resnet18"  # as timm itself does
        arguments = {"flatten_sequential": True} if flatten else {}
        wrapped = wrapper(copy.deepcopy(slim), out_indices=(0, 1), **arguments)
        features = wrapped(image_for(name))
        features = list(features.values()) if isinstance(features, dict) else features
        last = wrapper is FeatureListNet and "swin" in name
        assert [f.shape[-1 if last else 1] for f in features] == wrapped.feature_info.channels(), wrapper


@torch.no_grad()
def test_reset_classifier_fits_the_slim_width(slim_timm):
    name, _, slim = slim_timm
    other = copy.deepcopy(slim)
    other.reset_classifier(11)
    assert other(image_for(name)).shape == (2, 11)
    other.reset_classifier(0)
    pooled = other(image_for(name))
    assert pooled.shape == (2, slim.head_hidden_size)


def test_slim_timm_models_train(slim_timm):
    name, _, slim = slim_timm
    model = copy.deepcopy(slim).train()
    model.set_grad_checkpointing(True)
    first(model(image_for(name))).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_two_heads_become_narrower_and_keep_their_scale():
    model = seeded(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_heads=2))
    groups = tk.find_channel_groups(model)
    slim = slice_model(model, groups, {"blocks.0.attn.qkv": range(5, 25)})
    assert [block.attn.num_heads for block in slim.blocks] == [2, 2]
    assert [block.attn.head_dim for block in slim.blocks] == [20, 96]
    assert slim.blocks[0].attn.scale == 96**-0.5 and slim.blocks[0].attn.qkv.out_features == 3 * 2 * 20
    assert not groups["blocks.0.attn.qkv"].crosses_norm


def test_heads_are_counted_anew():
    model = seeded(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2))
    groups = tk.find_channel_groups(model)
    slim = slice_model(model, groups, {"blocks.0.attn.qkv": [0, 2]})
    assert [block.attn.num_heads for block in slim.blocks] == [2, 3]
    assert slim.blocks[0].attn.head_dim == 64 and slim.blocks[0].attn.qkv.out_features == 3 * 2 * 64
