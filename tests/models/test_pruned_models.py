"""timm's own checks (tests/test_models.py), none skipped, on the pruned names; and what registering them does."""

import copy
import functools
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import timm_knapsack as tk  # before timm
from timm_knapsack.errors import ChannelConfigError
from timm_knapsack.models.pruned_models import TIMM_WEIGHTS, pruned_model_config
from timm_knapsack.models.rebuild import WRAPPERS

import timm  # isort: skip
from timm.models import create_feature_extractor, get_graph_node_names, group_parameters  # isort: skip


# name: parameters, MACs at the default input size
NAMED = {
    "ecaresnet50d_knapsack_pruned": (19_939_713, 2_519_874_113),
    "ecaresnet101d_knapsack_pruned": (24_876_040, 3_461_022_487),
    "efficientnet_b1_knapsack_pruned": (6_331_916, 391_208_019),
    "efficientnet_b2_knapsack_pruned": (8_309_737, 715_749_145),
    "efficientnet_b3_knapsack_pruned": (9_855_020, 1_020_257_090),
    "resnet50_knapsack_2g": (19_223_485, 2_020_653_960),
}
SMALL = "efficientnet_b1_knapsack_pruned"
RESNET = "resnet50_knapsack_2g"
each_name = pytest.mark.parametrize("name", NAMED)
both_kinds = pytest.mark.parametrize("name", [SMALL, RESNET])
three_kinds = pytest.mark.parametrize("name", [SMALL, RESNET, "ecaresnet50d_knapsack_pruned"])


@functools.cache
def _created(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name)
    for module in model.modules():  # zero-initialised residuals would hide what a block does
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
    return model.eval()


def created(name: str) -> nn.Module:
    return copy.deepcopy(_created(name))


def images(batch: int = 1, size: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def same(a: nn.Module, b: nn.Module, x: torch.Tensor) -> bool:
    return torch.equal(a(x), b(x))


# ---- names ------------------------------------------------------------------------------------------------------


def test_all_names_are_listed_and_tagged():
    assert set(NAMED) <= set(timm.list_models("*_knapsack_*"))
    assert timm.list_models(module="pruned_models", filter="*_knapsack_2g") == [RESNET]
    pretrained = {f"{name}.{source.partition('.')[2]}" for name, source in TIMM_WEIGHTS.items()}
    assert set(timm.list_pretrained("*_knapsack_*")) == pretrained
    assert timm.is_model_pretrained(SMALL) and not timm.is_model_pretrained(RESNET)


def test_the_generic_entrypoint_is_not_listed():
    """timm's own tests build every listed name without arguments, which this one can't be."""
    assert "knapsack_pruned" not in timm.list_models() + timm.list_models(module="pruned_models")
    assert "knapsack_pruned" not in timm.list_models(include_tags=True)
    assert timm.is_model("knapsack_pruned")
    assert sys.modules["timm_knapsack.models.pruned_models"].__all__.count("knapsack_pruned") == 1


@pytest.mark.parametrize("name", [*timm.list_models("*knapsack*"), *timm.list_models("cifar_*")])
def test_every_listed_name_builds(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert model.num_classes == model.pretrained_cfg["num_classes"]


def test_every_packaged_config_has_a_row_above():
    folder = Path(tk.__file__).parent / "models" / "channel_configs"
    assert {path.stem for path in folder.glob("*.json")} == set(NAMED)
    for path in folder.glob("*.json"):
        assert path.read_text() == tk.ChannelConfig.load(path).to_json()  # sorted, canonical


def test_a_tag_selects_weights():
    model = timm.create_model(f"{SMALL}.in1k")
    assert model.pretrained_cfg["hf_hub_id"] == "timm/efficientnet_b1_pruned.in1k"
    assert model.pretrained_cfg["tag"] == "in1k" and model.pretrained_cfg["architecture"] == SMALL
    with pytest.raises(RuntimeError, match="Invalid pretrained tag"):
        timm.create_model(f"{SMALL}.wrong")
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model(RESNET, pretrained=True)


@each_name
def test_size_is_exact(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert (tk.count_params(model), tk.count_macs(model)) == NAMED[name]


@pytest.mark.parametrize("name", TIMM_WEIGHTS)
def test_equals_timms_own_pruned_network(name):
    own, ours = timm.create_model(TIMM_WEIGHTS[name].partition(".")[0]).eval(), _created(name)
    own.load_state_dict(ours.state_dict(), strict=True)
    assert same(own, ours, images())
    assert ours.pretrained_cfg == {**own.pretrained_cfg, "architecture": name}
    assert [info["num_chs"] for info in ours.feature_info] == [info["num_chs"] for info in own.feature_info]
    assert (ours.num_features, ours.head_hidden_size) == (own.num_features, own.head_hidden_size)


# ---- timm's own checks ------------------------------------------------------------------------------------------


@each_name
def test_inference_and_default_cfg(name):
    model = created(name)
    cfg = model.pretrained_cfg
    with torch.no_grad():
        output = model(images(2))
        features = model.forward_features(images())
    assert output.shape == (2, cfg["num_classes"]) and torch.isfinite(output).all()
    assert features.shape[1] == model.num_features
    state = model.state_dict()
    assert f"{cfg['classifier']}.weight" in state and f"{cfg['first_conv']}.weight" in state
    assert model.get_classifier().in_features == model.head_hidden_size
    with torch.no_grad():
        model.reset_classifier(0, "")
        assert model(images()).shape == features.shape
        model.reset_classifier(0)
        assert model(images()).shape == (1, model.num_features)
        model.reset_classifier(7)
        assert model(images()).shape == (1, 7)
        assert model.forward_head(features, pre_logits=True).shape == (1, model.head_hidden_size)


@each_name
def test_backward_reaches_every_parameter(name):
    model = created(name).train()
    model(images(2)).mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name


@each_name
def test_features_only(name):
    model = timm.create_model(name, features_only=True).eval()
    with torch.no_grad():
        outputs = model(images())
    assert [o.shape[1] for o in outputs] == model.feature_info.channels()
    assert [64 // o.shape[2] for o in outputs] == model.feature_info.reduction()
    with torch.device("meta"):
        two = timm.create_model(name, features_only=True, out_indices=(1, 3), output_stride=16).eval()
        shapes = [tuple(o.shape) for o in two(torch.empty(1, 3, 64, 64))]
    assert [s[1] for s in shapes] == two.feature_info.channels() and shapes[1][2:] == (4, 4)


# every wrapper of timm; EfficientNet itself, unpruned, has no 'list' and 'dict'
@pytest.mark.parametrize(
    ("name", "kind"), [*((RESNET, kind) for kind in WRAPPERS.values()), *((SMALL, k) for k in ("hook", "fx", "getter"))]
)
def test_features_by_every_wrapper(name, kind):
    whole = created(name)
    net = timm.create_model(
        name,
        features_only=True,
        feature_cls=kind,
        pretrained=True,
        pretrained_cfg_overlay={"state_dict": whole.state_dict()},
    ).eval()
    with torch.no_grad():
        outputs = net(images())
        _, expected = whole.forward_intermediates(images())
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    assert [o.shape[1] for o in outputs] == net.feature_info.channels()
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted)


@each_name
def test_forward_intermediates(name):
    model = _created(name)
    with torch.no_grad():
        last, taken = model.forward_intermediates(images())
        assert torch.equal(model.forward_features(images()), last)
        some = model.forward_intermediates(images(), indices=2, intermediates_only=True)
    assert [t.shape[1] for t in taken] == [info["num_chs"] for info in model.feature_info]
    assert all(torch.equal(a, b) for a, b in zip(some, taken[-2:], strict=True))


@each_name
def test_fx(name):
    model = _created(name)
    _, nodes = get_graph_node_names(model)
    extractor = create_feature_extractor(model, return_nodes=nodes[-1:]).eval()
    with torch.no_grad():
        assert torch.equal(extractor(images())[nodes[-1]], model(images()))


@three_kinds
def test_arguments_of_create_model(name):
    with torch.no_grad():
        model = timm.create_model(name, num_classes=5, in_chans=1, global_pool="max", drop_rate=0.25).eval()
        assert model(images(channels=1)).shape == (1, 5) and model.drop_rate == 0.25
        assert timm.create_model(name, num_classes=0).eval()(images()).shape == (1, _created(name).num_features)


# ---- what people do with models ---------------------------------------------------------------------------------


@both_kinds
def test_grad_checkpointing_changes_nothing(name):
    model = created(name).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # recomputing would update the statistics twice
    model(images(2)).sum().backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.set_grad_checkpointing()
    model(images(2)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[parameter_name])


@three_kinds
def test_group_matcher_covers_every_parameter(name):
    model = _created(name)
    grouped = group_parameters(model, model.group_matcher(coarse=False))
    assert sum(len(names) for names in grouped.values()) == len(list(model.parameters()))


def test_compile_and_script():
    model, x = created(RESNET), images()
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="aot_eager")(x)
        scripted = torch.jit.script(timm.create_model(RESNET, scriptable=True).eval())
        scripted.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scripted(x), expected, rtol=1e-4, atol=1e-4)


def test_export_and_trace():
    model, x = created(SMALL), images()
    with torch.no_grad():
        expected = model(x)
        exported = torch.export.export(model, (x,)).module()(x)
        traced = torch.jit.trace(model, x, check_trace=False)(x)
    torch.testing.assert_close(exported, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(traced, expected, rtol=1e-4, atol=1e-4)


@both_kinds
def test_half_precision_and_channels_last(name):
    model, x = created(name), images()
    with torch.no_grad():
        expected = model(x)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
        half = copy.deepcopy(model).bfloat16()(x.bfloat16())
    torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-4)
    assert half.dtype == torch.bfloat16 and torch.isfinite(half).all()


def test_onnx(tmp_path):
    import onnxruntime

    model = timm.create_model(SMALL, exportable=True).eval()
    torch.onnx.export(model, (images(),), tmp_path / "net.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    output = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images().numpy()})[0])
    torch.testing.assert_close(output, model(images()).detach(), rtol=1e-3, atol=1e-3)


def test_copies_keep_the_channel_config():
    from timm.utils import ModelEmaV3

    model = created(SMALL)
    ema = ModelEmaV3(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), ema.module):
        assert other.channel_config == pruned_model_config(SMALL)


@three_kinds
def test_initial_weights_are_those_of_the_base(name):
    """Norms at 1 and 0, finite, and as spread as the base model's own initialisation."""
    torch.manual_seed(0)
    slim = timm.create_model(name)
    base = timm.create_model(slim.channel_config.base)
    spread = {n: p.std() for n, p in base.named_parameters() if p.dim() == 4}
    for parameter_name, parameter in slim.named_parameters():
        assert torch.isfinite(parameter).all(), parameter_name
        if parameter.numel() > 2000 and parameter.dim() == 4:
            assert 0.8 < parameter.std() / spread[parameter_name] < 1.25, parameter_name
    for module in slim.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.running_mean == 0).all() and (module.running_var == 1).all()
            assert module.weight.unique().numel() == 1
    assert slim.training


def test_on_the_meta_device_nothing_is_allocated():
    with torch.device("meta"):
        named, generic = (
            timm.create_model(RESNET),
            timm.create_model("knapsack_pruned", channels=pruned_model_config(RESNET)),
        )
    for model in (named, generic):
        assert all(t.is_meta for t in model.state_dict().values())
    assert {k: v.shape for k, v in named.state_dict().items()} == {k: v.shape for k, v in generic.state_dict().items()}


# ---- the generic entrypoint and registering ---------------------------------------------------------------------


def small_config(**kwargs) -> "tk.ChannelConfig":
    widths = {f"layer4.1.bn1.{n}": {0: 9} for n in ("weight", "bias", "running_mean", "running_var")}
    return tk.ChannelConfig(
        "resnet18", {"layer4.1.conv1.weight": {0: 9}, "layer4.1.conv2.weight": {1: 9}, **widths}, **kwargs
    )


def test_generic_entrypoint_takes_dict_or_config():
    config = small_config()
    for channels in (config, config.to_dict()):
        model = timm.create_model("knapsack_pruned", channels=channels, num_classes=3)
        assert model.layer4[1].conv1.out_channels == 9 and model.fc.out_features == 3
        assert model.channel_config == config
    with pytest.raises(ChannelConfigError, match="needs channels"):
        timm.create_model("knapsack_pruned")


def test_base_args_are_defaults_that_the_caller_overrides():
    config = tk.ChannelConfig("vit_tiny_patch16_224", {}, base_args={"img_size": 64, "depth": 2})
    assert timm.create_model("knapsack_pruned", channels=config).pos_embed.shape == (1, 17, 192)
    model = timm.create_model("knapsack_pruned", channels=config, img_size=32)
    assert model.pos_embed.shape == (1, 5, 192) and len(model.blocks) == 2


def test_register_pruned_model(tmp_path):
    config = small_config()
    name = tk.register_pruned_model(config)
    assert name.startswith("resnet18_knapsack_") and timm.is_model(name)
    assert tk.register_pruned_model(config) == name  # again changes nothing
    assert timm.create_model(name, num_classes=4).eval()(images()).shape == (1, 4)

    config.renamed("resnet18_knapsack_test").save(tmp_path / "c.json")
    assert tk.register_pruned_model(tmp_path / "c.json") == "resnet18_knapsack_test"
    assert timm.create_model("resnet18_knapsack_test").pretrained_cfg["architecture"] == "resnet18_knapsack_test"
    assert not timm.is_model_pretrained("resnet18_knapsack_test")
    assert sys.modules["timm_knapsack.models.pruned_models"].resnet18_knapsack_test().num_classes == 1000

    for taken in ("resnet18", "resnet18_knapsack_test"):
        with pytest.raises(ChannelConfigError, match="already"):
            tk.register_pruned_model(tk.ChannelConfig("resnet18", {}, name=taken))
    with pytest.raises(ChannelConfigError, match="did you mean resnet18"):
        tk.register_pruned_model(tk.ChannelConfig("resnet18b", {}))
    with pytest.raises(ChannelConfigError, match="no field 'hub'"):
        tk.register_pruned_model(small_config(name="resnet18_knapsack_hub"), weights={"x": {"hub": 1}})
    tagged = tk.register_pruned_model(
        small_config(name="resnet18_knapsack_tag"), weights={"x": {"hf_hub_id": "me/net"}}
    )
    assert timm.list_pretrained("resnet18_knapsack_tag") == ["resnet18_knapsack_tag.x"]
    assert timm.create_model(tagged).pretrained_cfg["hf_hub_id"] == "me/net"


def test_a_pruned_model_is_pruned_again_from_the_same_base():
    model = timm.create_model("knapsack_pruned", channels=small_config(), num_classes=10)
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="random")
    result = tk.prune(model, scores=scores, budget=tk.Budget(macs=0.7), groups=groups)
    assert result.channel_config.base == "resnet18"
    again = timm.create_model("knapsack_pruned", channels=result.channel_config, num_classes=10)
    again.load_state_dict(result.model.state_dict())
    assert same(again.eval(), result.model.eval(), images())


def test_weights_that_do_not_fit_name_three():
    state = created(RESNET).state_dict()
    for number in (1, 2, 3, 4):
        state[f"layer1.0.bn{min(number, 3)}.bias"] = torch.zeros(number)
    state["extra"] = torch.zeros(1)
    del state["layer4.2.conv3.weight"], state["fc.bias"]
    with pytest.raises(tk.KnapsackError) as caught:
        timm.create_model(RESNET, pretrained=True, pretrained_cfg_overlay={"state_dict": state})
    message = str(caught.value)
    assert "layer1.0.bn1.bias is [1], expected [45]" in message and "layer1.0.bn2.bias is [2], expected [26]" in message
    assert message.count(";") == 3 and "and 3 more" in message


def test_weights_adapt_to_other_classes_and_inputs():
    whole = created(RESNET)
    overlay = {"state_dict": whole.state_dict()}
    model = timm.create_model(RESNET, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, in_chans=1)
    assert torch.equal(model.layer1[0].conv1.weight, whole.layer1[0].conv1.weight)
    assert model.fc.out_features == 3 and model.conv1.weight.shape[1] == 1
    torch.testing.assert_close(model.conv1.weight, whole.conv1.weight.sum(1, keepdim=True))


def test_position_embeddings_follow_another_image_size():
    config = tk.ChannelConfig("vit_tiny_patch16_224", {}, base_args={"img_size": 64, "depth": 1})
    whole = timm.create_model("knapsack_pruned", channels=config)
    overlay = {"state_dict": whole.state_dict()}
    model = timm.create_model(
        "knapsack_pruned", channels=config, img_size=96, pretrained=True, pretrained_cfg_overlay=overlay
    )
    assert model.pos_embed.shape == (1, 37, 192)
    assert torch.equal(model.blocks[0].mlp.fc1.weight, whole.blocks[0].mlp.fc1.weight)
