"""What a saved folder says and what is refused, case by case, on a network so small that it costs nothing."""

import copy
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.errors import CheckpointError, HubError
from timm_knapsack.hub import saving
from timm_knapsack.slim.channel_config import ChannelConfig

import timm  # isort: skip

NORM = {f"layer1.0.bn1.{n}": {0: 3} for n in ("weight", "bias", "running_mean", "running_var")}
WIDTHS = {"layer1.0.conv1.weight": {0: 3}, "layer1.0.conv2.weight": {1: 3}, **NORM}


def network(**config) -> nn.Module:
    return timm.create_model("knapsack_pruned", channels=ChannelConfig("cifar_resnet8x2", WIDTHS, **config))


@pytest.fixture(scope="module")
def net():
    return network()


@pytest.fixture(scope="module")
def saved(net, tmp_path_factory):
    return tk.save_pretrained(net, tmp_path_factory.mktemp("saved") / "net")


def save(net, folder, **options):
    folder = tk.save_pretrained(net, folder, **{"verify": False, **options})
    return json.loads((folder / "config.json").read_text())


# ---- what is written


def test_the_files_and_their_words(saved, net):
    assert sorted(os.listdir(saved)) == ["README.md", "channels.json", "config.json", "model.safetensors"]
    text = (saved / "config.json").read_text()
    config = json.loads(text)
    assert text == json.dumps(config, indent=2, sort_keys=True) + "\n"  # as timm writes its own
    assert set(config["timm_knapsack"]) == {"costs", "versions"}  # what nobody said is not there
    assert config["model_args"] == {"channels": net.channel_config.to_dict()}
    assert (config["architecture"], config["num_classes"]) == ("knapsack_pruned", 10)
    assert config["pretrained_cfg"]["num_classes"] == 10 and config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    assert not set(config["pretrained_cfg"]) & set(saving._OF_THE_BASE)
    assert ChannelConfig.load(saved / "channels.json") == net.channel_config
    assert "# net" in (saved / "README.md").read_text()


def test_what_is_said_is_written(net, tmp_path):
    evaluation = {"dataset": "d", "samples": 9, "top1": 50.0}
    said = {"datasets": ["me/d"], "license": "mit", "notes": ["a"], "base_model": "me/base"}
    made = save(net, tmp_path / "net", evaluation=evaluation, **said)["timm_knapsack"]
    assert {key: made[key] for key in said} == said and len(made["evaluation"]) == 1
    assert save(net, tmp_path / "many", evaluation=[evaluation] * 2)["timm_knapsack"]["evaluation"][1]["dataset"] == "d"


def report_of(**told):
    costs = [{"unit": "MACs", "original": 5, "counted": 3, "asked": None}]
    data = {"costs": costs, "model": "m", "value": 1.0, "loss": 3, "blocks": [], **told}
    return SimpleNamespace(to_dict=lambda: data, input_size=(3, 32, 32))


def test_what_a_report_tells_is_written(net, tmp_path):
    made = save(net, tmp_path / "net", report=report_of())["timm_knapsack"]
    assert made["costs"] == [{"unit": "MACs", "original": 5, "counted": 3}]
    assert made["pruning"] == {"model": "m", "value": 1.0}
    made = save(net, tmp_path / "blocks", report=report_of(blocks=["layer1.0"], rounds=2))["timm_knapsack"]
    assert made["pruning"] == {"model": "m", "value": 1.0, "rounds": 2, "blocks": ["layer1.0"]}
    own = report_of(value=2.0)
    result = SimpleNamespace(model=net, report=own)
    assert save(result, tmp_path / "own")["timm_knapsack"]["pruning"]["value"] == 2.0
    assert save(result, tmp_path / "given", report=report_of())["timm_knapsack"]["pruning"]["value"] == 1.0
    assert saving._costs(None) == [] and saving._pruning(None) == {}


def config_json(cfg, args=None, **config):
    model = nn.Identity()
    if cfg is not None:
        model.pretrained_cfg = cfg
    return saving._config_json(model, ChannelConfig("resnet18", {}, **config), args or {}, {})


def test_sizes_and_classes():
    assert config_json(None)["pretrained_cfg"] == {"input_size": [3, 224, 224], "num_classes": 1000}
    cfg = {"input_size": (3, 64, 32), "test_input_size": (3, 96, 96), "num_classes": 7, "mean": (0.5,), "url": "x"}
    made = config_json(cfg)["pretrained_cfg"]
    assert made == {"input_size": [3, 64, 32], "test_input_size": [3, 96, 96], "num_classes": 7, "mean": (0.5,)}
    made = config_json(cfg, {"in_chans": 1, "num_classes": 2})
    assert made["num_classes"] == made["pretrained_cfg"]["num_classes"] == 2
    assert made["pretrained_cfg"]["input_size"] == [1, 64, 32]
    assert made["pretrained_cfg"]["test_input_size"] == [1, 96, 96]
    least = config_json({**cfg, "min_input_size": (3, 8, 8)}, {"in_chans": 4})["pretrained_cfg"]["min_input_size"]
    assert least == [4, 8, 8]
    for size, expected in ((48, [3, 48, 48]), ((40, 56), [3, 40, 56])):
        assert config_json(cfg, base_args={"img_size": size})["pretrained_cfg"]["input_size"] == expected
    assert config_json(cfg, builder="my.nets:make")["num_classes"] == 0
    features = {"class": "FeatureListNet", "out_indices": (1,)}
    assert config_json(cfg, features=features)["num_classes"] == 0
    assert config_json(cfg)["num_features"] is None


def test_pictures_are_drawn_or_copied(net, tmp_path):
    drawn = tmp_path / "drawn.png"
    drawn.write_bytes(b"png")
    for number, picture in enumerate((drawn, str(drawn), lambda path: path.write_bytes(b"png"))):
        save(net, tmp_path / str(number), picture=picture)
        assert (tmp_path / str(number) / "kept_channels.png").read_bytes() == b"png"
    save(net, tmp_path / "none")
    assert not (tmp_path / "none" / "kept_channels.png").exists()


# ---- which network


@pytest.mark.parametrize("wrap", [
    lambda net: nn.DataParallel(net), lambda net: SimpleNamespace(model=net, report=None),
    lambda net: SimpleNamespace(model=nn.DataParallel(net), report=None),
    lambda net: nn.DataParallel(nn.DataParallel(net)), lambda net: net,
])  # fmt: skip
def test_the_network_inside_is_found(net, wrap):
    model, config, report = saving._unpack(wrap(net), None)
    assert model is net and config == net.channel_config and report is None


@pytest.mark.parametrize("thing", [None, "net", SimpleNamespace(), SimpleNamespace(model="x"), 3])
def test_what_is_no_network(thing):
    with pytest.raises(HubError, match=f"expected a PruneResult or a pruned model, got {type(thing).__name__}"):
        saving._unpack(thing, None)


def test_a_network_that_was_not_pruned_and_one_that_says_nonsense(net):
    odd = nn.Module()
    odd.module = None  # no module, under the name of one
    odd._modules["module"] = None
    for model, name in ((nn.Linear(1, 1), "Linear"), (nn.DataParallel(nn.Linear(1, 1)), "Linear"), (odd, "Module")):
        with pytest.raises(HubError, match=f"this {name} was not pruned by timm_knapsack"):
            saving._unpack(model, None)
    wrong = copy.copy(net)
    wrong.channel_config = {"base": "resnet18"}
    with pytest.raises(HubError, match="channel_config is a dict, expected a ChannelConfig"):
        saving._unpack(wrong, None)


def several_wrong(net):
    """Five parameters of other shapes than the config gives."""
    wrong = copy.deepcopy(net)
    names = [f"layer1.0.bn1.{n}" for n in ("weight", "bias", "running_mean", "running_var")]
    wrong.channel_config = ChannelConfig("cifar_resnet8x2", {k: v for k, v in WIDTHS.items() if k not in names})
    return wrong


def test_of_many_differences_three_are_named(net, tmp_path):
    wrong = several_wrong(net)
    with pytest.raises(CheckpointError, match="cifar_resnet8x2 and this model's channel config do not give") as caught:
        save(wrong, tmp_path / "net")
    assert str(caught.value).count("expected [16]") == 3 or str(caught.value).count("expected [") == 3
    assert os.listdir(tmp_path) == []


def plain_net():
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))


def other_net():
    return nn.Sequential(nn.Conv2d(3, 9, 1), nn.ReLU(), nn.Conv2d(9, 9, 1), nn.ReLU(), nn.Conv2d(9, 2, 1))


@pytest.fixture(scope="module")
def foreign():
    image = torch.zeros(1, 3, 8, 8)
    return tk.prune(plain_net(), budget=tk.Budget(macs=0.5), criterion="magnitude", example_inputs=image)


def test_a_network_with_a_builder_of_its_own(foreign, tmp_path):
    config = save(foreign, tmp_path / "net", builder=plain_net, verify=True)
    made = config["timm_knapsack"]
    assert config["num_classes"] == 0 and made["layers"] and made["input_size"] == [3, 8, 8]
    loaded = tk.load_pretrained(tmp_path / "net", builder=plain_net)
    state = foreign.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    by_model = save(loaded, tmp_path / "again", builder=plain_net)["timm_knapsack"]
    assert "input_size" not in by_model and by_model["layers"] == made["layers"]  # nobody told of images
    with pytest.raises(CheckpointError, match=r"what test_saving_edges:other_net builds, cut by .* belong into") as e:
        save(foreign, tmp_path / "wrong", builder=other_net)
    assert str(e.value).count("expected [") == 3
    with pytest.raises(HubError, match=r"timm has no model 'Sequential'.*builder='package.module:function'"):
        save(foreign, tmp_path / "wrong")
    assert sorted(os.listdir(tmp_path)) == ["again", "net"]


def test_weights_that_are_not_there(tmp_path):
    with torch.device("meta"):
        net = network()
    with pytest.raises(HubError, match="is on the meta device: this model has no weights to save"):
        save(net, tmp_path / "net")
    assert os.listdir(tmp_path) == []


# ---- where to


def test_where_it_may_be_saved(net, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    save(net, tmp_path / "empty")
    save(net, tmp_path / "empty")  # an earlier save
    save(net, tmp_path / "deep" / "er")
    (tmp_path / "file").touch()
    with pytest.raises(HubError, match="is a file, expected a folder"):
        save(net, tmp_path / "file")
    monkeypatch.chdir(tmp_path / "empty")
    for name in (".", "../empty", tmp_path / "empty"):
        with pytest.raises(HubError, match="the current folder can't be replaced"):
            save(net, name)


@pytest.mark.parametrize("text", ["", "3", '"text"', "[1]", "{}", '{"architecture": "resnet18"}', None, "\xff"])
def test_a_folder_that_is_not_ours_is_left_alone(net, tmp_path, text):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("mine")
    if text is not None:
        (tmp_path / "mine" / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(HubError, match="holds files that save_pretrained did not write"):
        save(net, tmp_path / "mine")
    assert (tmp_path / "mine" / "a.txt").read_text() == "mine"


def test_a_disk_that_can_not_write_is_said_in_the_systems_words(net, tmp_path):
    for error, words in ((OSError(28, "No space left on device"), "No space left on device"), (OSError("odd"), "odd")):

        def fail(path, error=error):
            raise error

        with pytest.raises(HubError, match=f"can't write .*net: {words}; what stood there before is whole"):
            save(net, tmp_path / "net", picture=fail)


# ---- publishing


def plan(what, **options):
    return tk.push_to_hub(what, "me/net", dry_run=True, **options)


def test_what_would_be_published(saved, net, tmp_path, monkeypatch):
    sent = {}
    monkeypatch.setattr(saving, "publish", lambda *a, **k: sent.update(files=a[1], texts=a[2], **k))
    plan(saved)
    assert sent["files"] == {n: saved / n for n in ("model.safetensors", "config.json", "channels.json")}
    assert list(sent["texts"]) == ["README.md"] and sent["commit_message"] == "Publish a pruned cifar_resnet8x2"
    card = sent["texts"]["README.md"]
    assert "hf-hub:you/else" in card("you/else") and "hf-hub:you/else" not in (saved / "README.md").read_text()
    plan(saved, commit_message="mine")
    assert sent["commit_message"] == "mine"
    own = tmp_path / "own"
    shutil.copytree(saved, own)
    (own / "README.md").write_text("my own words")
    (own / "kept_channels.png").write_bytes(b"png")
    (own / "private.txt").write_text("mine")
    plan(own)
    assert sent["texts"]["README.md"]("you/else") == "my own words"
    assert "kept_channels.png" in sent["files"] and "private.txt" not in sent["files"]
    plan(net, notes=["a note"], verify=False)
    assert set(sent["files"]) == {"model.safetensors", "config.json", "channels.json"}
    assert sent["files"]["config.json"].parent.name == "net"


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "channels.json", "README.md"])
def test_what_is_not_whole_is_not_published(saved, tmp_path, missing):
    shutil.copytree(saved, tmp_path / "net")
    (tmp_path / "net" / missing).unlink()
    with pytest.raises(HubError, match=f"was not written by save_pretrained: {missing} is missing or foreign"):
        plan(tmp_path / "net")


def test_what_is_not_ours_is_not_published(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "net")
    (tmp_path / "net" / "config.json").write_text("{}")
    with pytest.raises(HubError, match=r"was not written by save_pretrained: config\.json is missing or foreign"):
        plan(tmp_path / "net")
    with pytest.raises(HubError, match="there is no folder"):
        plan(tmp_path / "none")
    with pytest.raises(HubError, match="'license' describes how a model is saved; this folder is saved already"):
        plan(saved, notes=[], license="mit")
