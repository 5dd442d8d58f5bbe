"""An untrusted config.json, channels.json or weights file does no harm: a clear error, at once, and no memory."""

import json
import shutil
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import timm_knapsack as tk  # before timm
from timm_knapsack.errors import ChannelConfigError, CheckpointError

import timm  # isort: skip


def load(folder) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    norm = {f"layer1.0.bn1.{n}": {0: 9} for n in ("weight", "bias", "running_mean", "running_var")}
    widths = {"layer1.0.conv1.weight": {0: 9}, "layer1.0.conv2.weight": {1: 9}, **norm}
    model = timm.create_model("knapsack_pruned", channels=tk.ChannelConfig("cifar_resnet20", widths))
    return tk.save_pretrained(model, tmp_path_factory.mktemp("saved") / "net")


class RealMemory(TorchDispatchMode):
    """Bytes of real (not meta) tensors that ops return."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.bytes += result.nbytes
        return result


def nested(depth: int):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def channels(**changes):
    def change(config):
        config["model_args"]["channels"].update(changes)

    return change


def width(value, param="layer1.0.conv1.weight", dim="0"):
    return lambda config: config["model_args"]["channels"]["widths"].update({param: {dim: value}})


def at(*path, value):
    def change(config):
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = value

    return change


HOSTILE = {
    "unknown base": (channels(base="resnet9000"), "timm has no model 'resnet9000'"),
    "path as base": (channels(base="../../etc/passwd"), "expected a model name"),
    "hub id as base": (channels(base="hf-hub:evil/net"), "expected a model name"),
    "the generic one as base": (channels(base="knapsack_pruned", widths={}), "needs channels"),
    "base of wrong type": (channels(base=["resnet18"]), "expected a model name"),
    "channels missing": (lambda c: c["model_args"].pop("channels"), "needs channels"),
    "channels a path": (at("model_args", "channels", value="/etc/passwd"), "expected a JSON object"),
    "channels a list": (at("model_args", "channels", value=[1]), "expected a JSON object"),
    "newer version": (channels(version=99), "upgrade timm-knapsack"),
    "width 10^12": (width(10**12), "expected a whole number"),
    "width of text": (width("9"), "expected a whole number"),
    "width true": (width(True), "expected a whole number"),
    "width NaN": (width(float("nan")), "expected a whole number"),
    "width 0": (width(0), "expected a whole number"),
    "width larger than the base": (width(17), "more than the base model's 16"),
    "no such parameter": (width(3, "layer9.weight"), "has no parameter 'layer9.weight'"),
    "no such dim": (width(3, dim="7"), "there is no dim 7"),
    "parameter as a path": (width(3, "../x"), "is not a dotted name"),
    "kept without a width": (channels(kept={"layer2.0.conv1.weight": {"0": "0-3"}}), "dims that widths name"),
    "kept of another dim": (channels(kept={"layer1.0.conv1.weight": {"1": "0-8"}}), "no such dim"),
    "kept too many": (channels(kept={"layer1.0.conv1.weight": {"0": "0-9"}}), "names 10 channels, and the width is 9"),
    "kept a million": (channels(kept={"layer1.0.conv1.weight": {"0": "0-999999"}}), "names 1000000 channels"),
    "kept 10^12": (channels(kept={"layer1.0.conv1.weight": {"0": "0-1000000000000"}}), "expected sorted ranges"),
    "kept beyond the base": (channels(kept={"layer1.0.conv1.weight": {"0": "0-7,16"}}), "the base model has 16"),
    "kept twice": (channels(kept={"layer1.0.conv1.weight": {"0": "0-7,7"}}), "is not sorted"),
    "kept backwards": (channels(kept={"layer1.0.conv1.weight": {"0": "8-0"}}), "is not sorted"),
    "kept a list": (channels(kept={"layer1.0.conv1.weight": {"0": [[0]]}}), "expected channel numbers"),
    "kept text": (channels(kept={"layer1.0.conv1.weight": {"0": "all"}}), "expected sorted ranges"),
    "kept of huge widths": (
        channels(widths={f"w{i}": {"0": 2**22} for i in range(9)}, kept={"w0": {"0": "0"}, "w1": {"0": "0"}}),
        "names 1 channels|more than",
    ),
    "deep widths": (channels(widths=nested(500)), "expected"),
    "deeper widths": (channels(widths={"a": {"0": nested(900)}}), "expected"),
    "private attribute": (channels(attributes={"": {"__class__": 3}}), "not a public attribute"),
    "no such attribute": (channels(attributes={"layer1": {"evil": 3}}), "no such number"),
    "no such module": (channels(attributes={"evil": {"groups": 3}}), "has no module 'evil'"),
    "extra key": (channels(exec="rm -rf /"), "unknown key 'exec'"),
    "weights in base_args": (channels(base_args={"pretrained": True}), "does not choose weights"),
    "file in base_args": (channels(base_args={"checkpoint_path": "/tmp/x"}), "does not choose weights"),
    "deep base_args": (channels(base_args={"depth": nested(50)}), "expected a plain number"),
    "huge depth": (channels(base_args={"depth": 60_002}), "several times larger|can't be built"),
    "huge width": (channels(base_args={"channels": [65536, 65536, 65536]}), "several times larger"),
    "huge image": (channels(base_args={"img_size": 10**9}), "larger than any model uses"),
    "unknown argument": (channels(base_args={"evil": 1}), "can't be built with .*evil"),
    "extra model_args": (at("model_args", "evil", value=1), "can't be built with .*evil"),
    "builder's model_args": (at("model_args", "pretrained_strict", value=False), "does not belong"),
    "checkpoint in model_args": (at("model_args", "checkpoint_path", value="/etc/passwd"), "does not belong"),
    "trusted in model_args": (at("model_args", "trusted", value=True), "can't be built with .*trusted"),
    "trusted and huge": (
        lambda c: c["model_args"].update(
            trusted=True, channels={**c["model_args"]["channels"], "base_args": {"depth": 50_000}}
        ),
        "several times larger|can't be built",
    ),
    "a parameter of ours in model_args": (at("model_args", "variant", value="x"), "does not belong"),
    "arguments in model_args": (at("model_args", "arguments", value={"a": 1}), "can't be built with .*arguments"),
    "a device that is none": (at("model_args", "device", value="evil"), "no device of torch"),
    "a dtype of text": (at("model_args", "dtype", value="float64"), "no torch.dtype"),
    "2^20 classes": (at("num_classes", value=2**20), "several times larger"),
    "2^20 classes in model_args": (at("model_args", "num_classes", value=2**20), "several times larger"),
    "2^16 inputs": (channels(base="resnet18", widths={}, base_args={"in_chans": 2**16}), "several times larger"),
    "a large image for a transformer": (
        channels(base="vit_tiny_patch16_224", widths={}, base_args={"img_size": 24_000}),
        "more than 4 times",
    ),
    "the largest image for one with all pairs of positions": (
        channels(base="swin_tiny_patch4_window7_224", widths={}, base_args={"img_size": 1024, "window_size": 256}),
        "several times larger",
    ),
    "10^12 classes": (at("num_classes", value=10**12), "num_classes"),
    "negative input": (at("pretrained_cfg", "input_size", value=[3, -1, 32]), "input_size"),
    "huge input": (at("pretrained_cfg", "input_size", value=[10**9, 32, 32]), "input_size"),
    "mean of text": (at("pretrained_cfg", "mean", value="abc"), "mean"),
    "unknown cfg key": (at("pretrained_cfg", "evil", value=1), "knows no such key"),
    "a state dict in JSON": (at("pretrained_cfg", "state_dict", value={"a": [1]}), "knows no such key"),
    "custom loader": (at("pretrained_cfg", "custom_load", value="hf"), "plain safetensors"),
    "a pickle": (at("pretrained_cfg", "hf_hub_filename", value="evil.bin"), "expected a .safetensors file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_untrusted_config_is_refused(saved, tmp_path, case):
    change, message = HOSTILE[case]
    config = json.loads((saved / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(saved / "model.safetensors", tmp_path)
    memory, began = RealMemory(), time.process_time()
    with pytest.raises(ChannelConfigError, match=message), memory:
        load(tmp_path)
    assert time.process_time() - began < 1
    assert memory.bytes < 1e6


def test_a_valid_config_passes_the_same_way(saved, tmp_path):
    """The counterpart: without a change the same steps load the model, and memory is seen to be used."""
    shutil.copy(saved / "config.json", tmp_path)
    shutil.copy(saved / "model.safetensors", tmp_path)
    memory = RealMemory()
    with memory:
        load(tmp_path)
    assert memory.bytes > 1e5


def test_bad_json_and_bad_weights(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "net")
    (tmp_path / "net" / "channels.json").write_text('{"a":' * 100_000)
    with pytest.raises(ChannelConfigError, match="nested too deeply"):
        tk.register_pruned_model(tmp_path / "net" / "channels.json")
    (tmp_path / "net" / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(RecursionError):  # timm's own reader: before it reaches us, and without harm
        load(tmp_path / "net")

    from safetensors.torch import load_file, save_file

    shutil.copy(saved / "config.json", tmp_path / "net")
    state = load_file(saved / "model.safetensors")
    state["conv1.weight"] = torch.zeros(3, 3, 3, 3)
    state["evil"] = torch.zeros(1)
    del state["bn1.weight"], state["layer3.2.bn2.bias"]
    save_file(state, tmp_path / "net" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "net")
    assert "conv1.weight is [3, 3, 3, 3], expected" in str(caught.value)
    assert "bn1.weight is missing; layer3.2.bn2.bias is missing; and 1 more" in str(caught.value)


@pytest.mark.parametrize(
    "base, args",
    [
        ("resnet18", {"num_classes": 21_841}),
        ("mobilenetv3_small_100", {"num_classes": 21_841}),
        ("vit_tiny_patch16_224", {"img_size": 448}),
        ("vit_tiny_patch16_224", {"img_size": [384, 640]}),
        ("resnet18", {"in_chans": 12}),
    ],
)
def test_what_people_do_with_a_base_is_allowed(base, args):
    """The counterpart of the limits: other classes, images and input channels."""
    from timm_knapsack.models.effort import build_within_limits

    assert sum(p.numel() for p in build_within_limits(base, args).parameters()) > 1e6


def test_a_pruned_model_with_a_name_is_checked_too():
    """Its config ships with the package; what is asked of it may stand in a stranger's config.json."""
    memory = RealMemory()
    with pytest.raises(ChannelConfigError, match="several times larger"), memory:
        timm.create_model("resnet50_knapsack_2g", num_classes=2**20)
    assert memory.bytes < 1e6


def test_model_source_checks_what_timm_would_not(saved, tmp_path):
    """The config.json of a plain timm model, through the door of the command line."""
    from timm_knapsack.models.model_source import ModelSource

    def refused(text, message):
        (tmp_path / "config.json").write_text(text)
        memory = RealMemory()
        with pytest.raises(ChannelConfigError, match=message), memory:
            ModelSource(str(tmp_path)).load()
        assert memory.bytes < 1e6

    refused('{"a":' * 100_000, "nested too deeply")
    refused("[" + "1," * 3_000_000 + "1]", "larger than 4 MiB")
    refused('{"architecture": "resnet18", "architecture": "resnet50"}', "stands twice")
    refused('{"architecture": 3}', "names no architecture")
    refused('{"architecture": "resnet18", "model_args": [1]}', "expected an object")
    refused('{"architecture": "resnet18", "model_args": {"checkpoint_path": "/etc/passwd"}}', "the caller's to say")
    refused('{"architecture": "vit_tiny_patch16_224", "model_args": {"img_size": 24000}}', "more than 4 times")
    refused('{"architecture": "resnet18", "num_classes": 1048576}', "several times larger")
    refused('{"architecture": "evil"}', "timm has no model")
    shutil.copy(saved / "config.json", tmp_path)
    shutil.copy(saved / "model.safetensors", tmp_path)
    assert ModelSource(str(tmp_path)).load().num_classes == 10


@pytest.mark.parametrize("key", ["features_only", "out_indices", "feature_cls", "device", "dtype"])
def test_a_file_does_not_choose_another_kind_of_network_or_where_it_is_made(saved, tmp_path, key):
    from timm_knapsack.models.model_source import ModelSource

    shutil.copytree(saved, tmp_path / "net")
    value = {"features_only": True, "out_indices": [1], "feature_cls": "list", "device": "meta", "dtype": None}[key]
    ours = json.loads((saved / "config.json").read_text())
    for config in (ours, {"architecture": "cifar_resnet20", "model_args": {}}):
        config["model_args"][key] = value
        (tmp_path / "net" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ChannelConfigError, match=f"can't set '{key}': that is the caller's to say"):
            ModelSource(str(tmp_path / "net")).load()
    assert ModelSource(str(saved), args={"features_only": True}).load().feature_info.channels()  # the caller may
