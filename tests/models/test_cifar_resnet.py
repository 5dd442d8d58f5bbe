"""The CIFAR ResNets are ordinary timm models, compute what He et al. describe, and work at any channel width."""

import copy
import re

import pytest
import torch
from torch.nn import functional as F

import timm_knapsack  # noqa: F401  (before timm)

import timm  # isort: skip
from timm_knapsack.models.cifar_resnet import PadShortcut

NAMES = [f"cifar_resnet{depth}" for depth in (20, 32, 44, 56, 110)]
PARAMS = {20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018, 110: 1_727_962}  # Table 6 of He et al., plus biases


@pytest.fixture
def model():
    """ResNet-20 with statistics that are not trivial, so that a forgotten norm would show."""
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20")
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.uniform_(-0.5, 0.5)
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def reference_forward(state, x, left=lambda c: c // 4):
    """The paper's network straight from a state dict; `left` zero channels of `c` stand before the others."""

    def conv_bn(x, conv, bn, stride=1):
        x = F.conv2d(x, state[f"{conv}.weight"], stride=stride, padding=1)
        statistics = [state[f"{bn}.{key}"] for key in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *statistics)

    x = conv_bn(x, "conv1", "bn1").relu()
    for stage in (1, 2, 3):
        for block in range(3):
            stride = 2 if stage > 1 and block == 0 else 1
            name = f"layer{stage}.{block}"
            y = conv_bn(x, f"{name}.conv1", f"{name}.bn1", stride).relu()
            y = conv_bn(y, f"{name}.conv2", f"{name}.bn2")
            if stride == 2:
                new = torch.zeros_like(y)
                start = left(y.shape[1])
                new[:, start : start + x.shape[1]] = x[:, :, ::2, ::2]
                x = new
            x = (x + y).relu()
    return F.linear(x.mean((2, 3)), state["linear.weight"], state["linear.bias"])


def test_is_the_network_of_the_paper(model, images):
    torch.testing.assert_close(model(images), reference_forward(model.state_dict(), images))


def test_the_reference_tells_other_shortcuts_apart(model, images):
    other = reference_forward(model.state_dict(), images, left=lambda c: 0)
    assert not torch.allclose(model(images), other, atol=1e-3)


@pytest.mark.parametrize("depth", PARAMS)
def test_depth_and_size(depth):
    with torch.device("meta"):
        model = timm.create_model(f"cifar_resnet{depth}")
    assert sum(p.numel() for p in model.parameters()) == PARAMS[depth]
    assert sum(isinstance(m, torch.nn.Conv2d | torch.nn.Linear) for m in model.modules()) == depth
    assert [len(stage) for stage in (model.layer1, model.layer2, model.layer3)] == [(depth - 2) // 6] * 3


def test_keys_are_those_of_the_published_weights():
    state = timm.create_model("cifar_resnet20").state_dict()
    keys = {key.split(".", 2)[-1] if key.startswith("layer") else key for key in state}
    bn = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    block = {f"{c}.weight" for c in ("conv1", "conv2")} | {f"{b}.{k}" for b in ("bn1", "bn2") for k in bn}
    assert keys == block | {"conv1.weight", *(f"bn1.{k}" for k in bn), "linear.weight", "linear.bias"}


def test_registered_with_a_32_pixel_config():
    assert timm.list_models(module="cifar_resnet") == ["cifar_resnet8x2", *NAMES]
    config = timm.data.resolve_model_data_config(timm.create_model("cifar_resnet20"))
    assert config["input_size"] == (3, 32, 32) and config["crop_pct"] == 1.0
    assert config["mean"] == (0.485, 0.456, 0.406) and config["std"] == (0.229, 0.224, 0.225)


@pytest.mark.parametrize("arguments", [{"num_classes": 100}, {"in_chans": 1}, {"drop_rate": 0.5}, {"num_classes": 0}])
@pytest.mark.parametrize("pool", ["avg", "max", "catavgmax"])
def test_create_model_arguments(arguments, pool):
    model = timm.create_model("cifar_resnet20", global_pool=pool, **arguments).eval()
    classes = arguments.get("num_classes", 10)
    width = 128 if pool == "catavgmax" else 64
    assert model(torch.zeros(2, arguments.get("in_chans", 3), 32, 32)).shape == (2, classes or width)


def test_reset_classifier(model, images):
    model.reset_classifier(7)
    assert model(images).shape == (2, 7) and model.get_classifier() is model.linear
    assert model.get_classifier(name_only=True) == model.pretrained_cfg["classifier"] == "linear"
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images), model.forward_features(images))


def test_head_is_split_as_in_timm(model, images):
    features = model.forward_features(images)
    assert features.shape == (2, model.num_features, 8, 8)
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.head_hidden_size)
    torch.testing.assert_close(model.linear(pooled), model(images))


@pytest.mark.parametrize("feature_cls", ["list", "dict", "hook", "fx", "getter"])
def test_features_only_equals_forward_intermediates(model, images, feature_cls):
    features = timm.create_model("cifar_resnet20", features_only=True, feature_cls=feature_cls).eval()
    state = model.state_dict()
    for key, value in features.state_dict().items():
        value.copy_(state[re.sub(r"^(model|graph_module|body)\.", "", key)])
    outputs = features(images)
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    final, intermediates = model.forward_intermediates(images)
    torch.testing.assert_close(list(outputs), intermediates)
    torch.testing.assert_close(final, model.forward_features(images))
    assert [x.shape[1] for x in outputs] == features.feature_info.channels()
    assert [32 // x.shape[2] for x in outputs] == features.feature_info.reduction()


def test_intermediates_can_stop_early_and_be_pruned(model, images):
    whole = model.forward_intermediates(images, indices=[0, 2], intermediates_only=True)
    early = model.forward_intermediates(images, indices=[0, 2], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(whole, early)
    assert model.prune_intermediate_layers([0, 2]) == [0, 2]
    assert isinstance(model.layer3, torch.nn.Identity) and isinstance(model.linear, torch.nn.Identity)
    torch.testing.assert_close(model.forward_intermediates(images, [0, 2], intermediates_only=True), whole)


def test_fx_and_torchscript(model, images):
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), model(images))
    torch.testing.assert_close(torch.jit.script(model)(images), model(images))


def test_grad_checkpointing_gives_the_same_gradients(model, images):
    gradients = []
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        model(images).logsumexp(1).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_group_matcher_covers_every_parameter(model):
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(name for names in groups.values() for name in names) == sorted(n for n, _ in model.named_parameters())
    assert len(groups) == 1 + 9 + 1  # stem, blocks, head


def cut(model, keep1, keep2, keep3):
    """Cut the three residual streams to the given channels, as a pruner does: weights and plain attributes only."""
    model = copy.deepcopy(model)
    keeps = [torch.tensor(k) for k in (keep1, keep2, keep3)]

    def conv(module, out=None, into=None):
        weight = module.weight.data
        weight = weight if out is None else weight[out]
        weight = weight if into is None else weight[:, into]
        module.weight = torch.nn.Parameter(weight)
        module.out_channels, module.in_channels = weight.shape[:2]

    def norm(module, keep):
        for name in ("weight", "bias"):
            setattr(module, name, torch.nn.Parameter(getattr(module, name).data[keep]))
        module.running_mean, module.running_var = module.running_mean[keep], module.running_var[keep]
        module.num_features = len(keep)

    conv(model.conv1, out=keeps[0])
    norm(model.bn1, keeps[0])
    into = keeps[0]
    for stage, keep in zip((model.layer1, model.layer2, model.layer3), keeps, strict=True):
        for block in stage:
            conv(block.conv1, into=into)
            conv(block.conv2, out=keep)
            norm(block.bn2, keep)
            if isinstance(block.shortcut, PadShortcut):
                left = int((keep < block.shortcut.pad_left).sum())  # zero channels that are kept, before and after
                block.shortcut.pad_left, block.shortcut.pad_right = left, len(keep) - len(into) - left
            into = keep
    model.linear.weight = torch.nn.Parameter(model.linear.weight.data[:, into])
    model.linear.in_features = len(into)
    return model


def masked(model, keep1, keep2, keep3, images):
    """The uncut model with the removed channels of each residual stream held at zero."""
    model = copy.deepcopy(model)

    def zero_all_but(keep):
        def hook(module, inputs, output):
            mask = torch.zeros(output.shape[1])
            mask[keep] = 1
            return output * mask[:, None, None]

        return hook

    model.act1.register_forward_hook(zero_all_but(keep1))
    for stage, keep in zip((model.layer1, model.layer2, model.layer3), (keep1, keep2, keep3), strict=True):
        for block in stage:
            block.register_forward_hook(zero_all_but(keep))
    return model(images)


# A channel that a later stage takes from a shortcut must stay in the earlier one too: stage 1's channel c is stage 2's
# c + 8, and stage 2's c is stage 3's c + 16.
KEEPS = {
    "some zero channels on both sides": ([2, 3, 7], [0, 5, 10, 11, 15, 31], [16, 21, 26, 27, 31, 47, 60]),
    "none on the left": ([2, 3], [10, 11, 30], [26, 27, 46, 63]),
    "none at all": ([2, 3], [10, 11], [26, 27]),
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_any_width_works(model, images, keep):
    slim = cut(model, *keep)
    torch.testing.assert_close(slim(images), masked(model, *keep, images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.jit.script(slim)(images), slim(images))
    torch.testing.assert_close(torch.fx.symbolic_trace(slim)(images), slim(images))


def test_the_width_check_sees_a_wrong_pad(model, images):
    keep = KEEPS["some zero channels on both sides"]
    slim = cut(model, *keep)
    shortcut = slim.layer2[0].shortcut
    shortcut.pad_left, shortcut.pad_right = shortcut.pad_right, shortcut.pad_left
    assert shortcut.pad_left != shortcut.pad_right
    assert not torch.allclose(slim(images), masked(model, *keep, images), atol=1e-3)


def test_depth_that_does_not_exist():
    from timm_knapsack.models.cifar_resnet import CifarResNet

    with pytest.raises(ValueError, match="6 n \\+ 2"):
        CifarResNet(21)
