"""ChannelConfig: strict reader, exact round trip; resize_model: only onto the model that it was made for."""

import copy
import json
import math
import pickle
import subprocess
import sys
import time

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import SkipConnections, VisionTransformer
from oracle import random_keep, shapes_of

import timm_knapsack as tk
from timm_knapsack.errors import ChannelConfigError
from timm_knapsack.slim.channel_config import FORMAT, MAX_BYTES, VERSION, ChannelConfig
from timm_knapsack.slim.cutting import channel_config_of, resize_model, slice_model

GOOD = {
    "format": FORMAT,
    "version": VERSION,
    "base": "resnet18",
    "widths": {"layer1.0.conv1.weight": {"0": 45}, "layer1.0.conv2.weight": {"1": 45}},
    "attributes": {"": {"num_features": 100, "feature_info.0.num_chs": 60}, "layer1.0": {"groups": 2}},
    "base_args": {"img_size": [64, 64], "act_layer": "silu", "drop_rate": 0.5},
    "name": "resnet18_slim",
    "kept": {"layer1.0.conv1.weight": {"0": "0-40,50-52,63"}},
}


def changed(**changes):
    data = copy.deepcopy(GOOD)
    data.update(changes)
    return data


# ---- round trips --------------------------------------------------------------------------------------------------


def test_json_round_trip_is_exact_and_sorted(tmp_path):
    config = ChannelConfig.from_dict(GOOD)
    path = tmp_path / "config.json"
    config.save(path)
    assert ChannelConfig.load(path) == config and ChannelConfig.from_json(config.to_json()) == config
    assert path.read_text() == config.to_json()
    assert config.to_json() == json.dumps(json.loads(config.to_json()), indent=1, sort_keys=True) + "\n"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"], "no temporary file is left"
    assert hash(config) == hash(ChannelConfig.load(path))


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}(\.[a-z0-9]{1,5}){0,3}", fullmatch=True)
widths = st.dictionaries(names, st.dictionaries(st.integers(0, 9), st.integers(1, 2**24), min_size=1), max_size=5)
attributes = st.dictionaries(names | st.just(""), st.dictionaries(names, st.integers(1, 999), min_size=1), max_size=4)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(widths=widths, attributes=attributes, name=st.none() | st.from_regex(r"[a-z0-9_]{1,20}", fullmatch=True))
def test_any_config_survives_json_pickle_and_copy(widths, attributes, name):
    config = ChannelConfig("resnet18", widths, attributes, {"img_size": 64}, name)
    for same in (
        ChannelConfig.from_json(config.to_json()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        ChannelConfig.from_dict(config.to_dict()),
    ):
        assert same == config and same.to_json() == config.to_json()


def test_features_and_builder_survive_and_older_readers_are_told():
    """Version 3 is written only where an older reader would build the wrong thing."""
    features = {"class": "FeatureListNet", "out_indices": (1, 2)}
    kept = {"a.weight": {0: (0, 3)}}
    config = ChannelConfig("Net", {"a.weight": {0: 2}}, kept=kept, features=features, builder="a.b:c")
    for same in (ChannelConfig.from_json(config.to_json()), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config and same.features == features and same.builder == "a.b:c"
    assert config.to_dict()["version"] == 3
    assert ChannelConfig("Net", config.widths, kept=config.kept).to_dict()["version"] == 2
    assert ChannelConfig("Net", config.widths).to_dict()["version"] == 1


def test_a_config_can_not_be_changed():
    config = ChannelConfig.from_dict(GOOD)
    with pytest.raises(AttributeError):
        config.base = "resnet34"
    with pytest.raises(TypeError):
        config.widths["fc.weight"] = {0: 1}
    with pytest.raises(TypeError):
        config.widths["layer1.0.conv1.weight"][0] = 1
    assert config.renamed("other").name == "other" and config.name == "resnet18_slim"


def test_failing_to_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        ChannelConfig.from_dict(GOOD).save(path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_configs_need_no_torch():
    """Reading a config is pure data: the module by itself imports neither torch nor timm."""
    code = (
        "import sys, types, importlib; p = types.ModuleType('timm_knapsack'); p.__path__ = ['timm_knapsack']; "
        "sys.modules['timm_knapsack'] = p; m = importlib.import_module('timm_knapsack.slim.channel_config'); "
        "m.ChannelConfig('resnet18', {}).to_json(); print('torch' in sys.modules)"
    )
    root = tk.__path__[0] + "/.."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"


# ---- files that are refused ---------------------------------------------------------------------------------------

BAD = [
    (changed(version=VERSION + 1), f"version {VERSION + 1} is newer than the {VERSION} .* upgrade timm-knapsack"),
    (changed(version=0), "version is 0, expected a whole number"),
    (changed(version=True), "version is True, expected"),
    (changed(version="1"), "version is '1', expected"),
    (changed(format="other"), "format is 'other', expected"),
    (changed(colour="red"), "unknown key 'colour'"),
    ({k: v for k, v in GOOD.items() if k != "widths"}, "key 'widths' is missing"),
    (changed(base="../etc/passwd"), "base is '../etc/passwd', expected a model name"),
    (changed(base=None), "base is None"),
    (changed(name="a b"), "name is 'a b', expected a model name"),
    (changed(widths=[1]), r"widths is \[1\], expected an object"),
    (changed(widths={"fc.weight": {}}), r"widths\['fc.weight'\] is {}, expected an object that is not empty"),
    (changed(widths={"fc.weight": {"0": 0}}), r"widths\['fc.weight'\]\['0'\] is 0, expected a whole number from 1"),
    (changed(widths={"fc.weight": {"0": -3}}), r"widths\['fc.weight'\]\['0'\] is -3"),
    (changed(widths={"fc.weight": {"0": 2**40}}), "expected a whole number from 1"),
    (changed(widths={"fc.weight": {"0": 4.0}}), "is 4.0, expected a whole number"),
    (changed(widths={"fc.weight": {"0": True}}), "is True, expected a whole number"),
    (changed(widths={"fc.weight": {"0": "4"}}), "is '4', expected a whole number"),
    (changed(widths={"fc.weight": {"x": 4}}), "'x' is not a dim, expected 0 to 9"),
    (changed(widths={"fc.weight": {"-1": 4}}), "'-1' is not a dim"),
    (changed(widths={"fc weight": {"0": 4}}), "'fc weight' is not a dotted name"),
    (changed(widths={"": {"0": 4}}), "'' is not a dotted name"),
    (changed(attributes={"fc": {"__class__": 4}}), "'__class__' is not a public attribute name"),
    (changed(attributes={"fc": {"a._b": 4}}), "is not a public attribute name"),
    (changed(attributes={"fc": 3}), r"attributes\['fc'\] is 3, expected an object"),
    (changed(base_args={"pretrained": True}), "does not choose weights or files"),
    (changed(base_args={"checkpoint_path": "x"}), "does not choose weights or files"),
    (changed(base_args={"img_size": {"a": 1}}), "expected a plain number"),
    (changed(base_args={"img_size": 10**9}), "larger than any model uses"),
    (changed(base_args=[]), r"base_args is \[\], expected an object"),
    ([GOOD], "expected a JSON object"),
    (None, "expected a JSON object, got None"),
]


@pytest.mark.parametrize("data, message", BAD, ids=[message[:45] for _, message in BAD])
def test_a_malformed_config_is_refused_with_key_and_value(data, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ChannelConfigError, match=message) as caught:
        ChannelConfig.load(path)
    assert str(caught.value).startswith(f"{path}: "), "the file is named"
    with pytest.raises(ChannelConfigError, match=message):
        ChannelConfig.from_dict(data)


WIDTHS = json.dumps(GOOD).replace("45", "%s", 1)
BAD_TEXT = [
    (WIDTHS % "NaN", "NaN is no number"),
    (WIDTHS % "Infinity", "Infinity is no number"),
    (WIDTHS % "1e3", "is 1000.0, expected a whole number"),
    ('{"base": "a", "base": "b"}', "key 'base' stands twice in one object"),
    ('{"widths": {"fc.weight": {"0": 3, "0": 4}}}', "key '0' stands twice"),
    ("[" * 200_000, "nested too deeply"),
    ('{"widths":' * 50_000, "nested too deeply|not JSON"),
    ("", "not JSON"),
    ("{", "not JSON"),
    ("\ufeff{}", "not JSON"),
    ("9" * 10_000, "not JSON|expected a JSON object"),
    ("{" + ",".join(f'"{i % 299_999}":1' for i in range(300_000)) + "}", "key '0' stands twice"),  # not quadratic
    (" " * (MAX_BYTES + 1), "larger than 4 MiB"),
]


@pytest.mark.parametrize("text, message", BAD_TEXT, ids=[message[:30] for _, message in BAD_TEXT])
def test_text_that_is_no_config_is_refused(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    began = time.process_time()
    with pytest.raises(ChannelConfigError, match=message):
        ChannelConfig.load(path)
    assert time.process_time() - began < 1


def test_files_that_can_not_be_read(tmp_path):
    with pytest.raises(ChannelConfigError, match=r"nowhere\.json can't be read: No such file"):
        ChannelConfig.load(tmp_path / "nowhere.json")
    with pytest.raises(ChannelConfigError, match="can't be read: Is a directory"):
        ChannelConfig.load(tmp_path)
    (tmp_path / "latin.json").write_bytes('{"base": "é"}'.encode("latin-1"))
    with pytest.raises(ChannelConfigError, match="not a text file in UTF-8"):
        ChannelConfig.load(tmp_path / "latin.json")


def test_python_values_are_checked_like_files():
    with pytest.raises(ChannelConfigError, match=r"widths\['a'\]\['0'\] is nan"):
        ChannelConfig("resnet18", {"a": {0: math.nan}})
    with pytest.raises(ChannelConfigError, match="base is 'resnet 18'"):
        ChannelConfig("resnet 18", {})
    with pytest.raises(ChannelConfigError, match="expected a plain number"):
        ChannelConfig("resnet18", {}, base_args={"drop_rate": math.inf})
    with pytest.raises(ChannelConfigError, match="not an argument name"):
        ChannelConfig("resnet18", {}, base_args={"a b": 1})


# ---- resize_model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet():
    with torch.device("meta"):
        return timm.create_model("resnet18")


MISFITS = [
    (ChannelConfig("resnet18", {"blocks.0.norm1.weight": {0: 8}}), "no parameter 'blocks.0.norm1.weight'; is this"),
    (ChannelConfig("resnet18", {"conv1.weight": {0: 65}}), r"widths\['conv1.weight'\]\['0'\] is 65, more than .* 64"),
    (ChannelConfig("resnet18", {"conv1.weight": {4: 1}}), "there is no dim 4; the parameter has 4 dims"),
    (ChannelConfig("resnet18", {}, {"layer9": {"groups": 1}}), "the model has no module 'layer9'"),
    (ChannelConfig("resnet18", {}, {"": {"no_such": 1}}), r"attributes\[''\]\['no_such'\]: ResNet has no such number"),
    (ChannelConfig("resnet18", {}, {"": {"num_features": 600}}), "is 600, expected 1 to 512 as in the base model"),
    (ChannelConfig("resnet18", {}, {"": {"feature_info.9.num_chs": 6}}), "has no such number"),
    (ChannelConfig("resnet18", {}, {"": {"feature_info.0.module": 6}}), "holds 'act1', which is not a number"),
    (ChannelConfig("resnet18", {}, {"": {"training": 1}}), "holds .*, which is not a number of channels"),
    (ChannelConfig("resnet18", {}, {"conv1": {"forward": 1}}), "has no such number"),
]


@pytest.mark.parametrize("config, message", MISFITS, ids=[message[:40] for _, message in MISFITS])
def test_a_config_for_another_model_is_refused_and_changes_nothing(config, message, resnet):
    shapes, text, info = shapes_of(resnet), repr(resnet), copy.deepcopy(resnet.feature_info)
    with pytest.raises(ChannelConfigError, match=message):
        resize_model(resnet, config)
    assert (shapes_of(resnet), repr(resnet), resnet.feature_info) == (shapes, text, info)
    assert resnet.num_features == 512


def test_the_slim_architecture_comes_back_from_the_base_alone(resnet):
    groups = tk.find_channel_groups(resnet)
    keep = random_keep(groups, 2)
    slim = slice_model(resnet, groups, keep)
    config = channel_config_of(groups, keep, "resnet18")
    again = resize_model(resnet, config)
    assert shapes_of(again) == shapes_of(slim) and repr(again) == repr(slim)
    assert again.feature_info == slim.feature_info and again.num_features == slim.num_features
    assert all(p.is_meta for p in again.parameters())
    assert not any(name.startswith("fc.") and 0 in dims for name, dims in config.widths.items()), "classes stay free"


def test_a_config_fits_a_base_with_other_classes_and_channels(resnet):
    groups = tk.find_channel_groups(resnet)
    config = channel_config_of(groups, {"conv1": range(20), "layer1.0.conv1": range(7)}, "resnet18")
    with torch.device("meta"):
        other = resize_model(timm.create_model("resnet18", num_classes=10, in_chans=1), config)
    assert other.fc.out_features == 10 and other.conv1.weight.shape == (20, 1, 7, 7)
    assert other(torch.empty(1, 1, 64, 64, device="meta")).shape == (1, 10)


def test_real_tensors_keep_the_state_dict_of_the_slim_model():
    model = VisionTransformer().eval()
    groups = tk.find_channel_groups(model, torch.empty(1, 3, 8, 8))
    keep = {"attn.qkv": [1], "mlp.0": [0, 2, 4], "embed": [0, 1, 2, 7]}
    slim = slice_model(model, groups, keep)
    again = resize_model(VisionTransformer().eval(), channel_config_of(groups, keep, "vit"))
    again.load_state_dict(slim.state_dict())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), slim(x))


def test_an_empty_config_is_a_copy():
    model = SkipConnections()
    same = resize_model(model, ChannelConfig("base", {}))
    assert same is not model and shapes_of(same) == shapes_of(model)
    assert torch.equal(same.stem.weight, model.stem.weight)


def test_a_number_that_changes_by_one_is_in_the_config():
    groups = tk.find_channel_groups(VisionTransformer().eval(), torch.empty(1, 3, 8, 8))
    keep = {group.name: torch.arange(group.size - 1) for group in groups if group.size > 1}
    sizes = [group.size - 1 if group.size > 1 else group.size for group in groups]
    changes = {(a.module, a.path): (a.at(groups.sizes), a.at(sizes)) for a in groups.attributes}
    changes = {place: pair for place, pair in changes.items() if pair[0] != pair[1]}
    assert any(before - after == 1 for before, after in changes.values())  # a head less
    config = channel_config_of(groups, keep, "net")
    written = {(module, path): n for module, paths in config.attributes.items() for path, n in paths.items()}
    assert written == {place: after for place, (_, after) in changes.items()}
