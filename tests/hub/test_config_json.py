"""config.json as timm reads it: sizes, classes, and how the network was made."""

import json

import pytest
import torch

import timm_knapsack as tk
from timm_knapsack.hub.saving import _config_json
from timm_knapsack.slim.channel_config import ChannelConfig

import timm  # isort: skip


def test_every_size_has_the_channels_of_the_models_images():
    with torch.device("meta"):
        model = timm.create_model("resnet18", in_chans=1)
    cfg = model.pretrained_cfg
    assert cfg["test_input_size"] == (3, 288, 288)
    made = _config_json(model, ChannelConfig("resnet18", {}), {"in_chans": 1}, {})["pretrained_cfg"]
    assert made["test_input_size"] == [1, 288, 288] and made["input_size"] == [1, 224, 224]


def test_an_image_size_of_the_base_is_that_of_the_model():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    for size, expected in ((64, [3, 64, 64]), ((64, 96), [3, 64, 96])):
        config = ChannelConfig("vit_tiny_patch16_224", {}, base_args={"img_size": size})
        assert _config_json(model, config, {}, {})["pretrained_cfg"]["input_size"] == expected


def test_a_model_that_says_nothing_is_one_of_timms_usual():
    made = _config_json(torch.nn.Identity(), ChannelConfig("resnet18", {}), {}, {})
    assert made["num_classes"] == made["pretrained_cfg"]["num_classes"] == 1000
    assert made["pretrained_cfg"]["input_size"] == [3, 224, 224]


@pytest.mark.parametrize("said, written", [(None, None), ("me/net", "me/net"), (True, "timm/net.in1k")])
def test_weights_are_claimed_only_where_somebody_says_so(said, written, tmp_path):
    """The base's own name is taken only if that is asked for: a model does not remember where its weights came from."""
    model = timm.create_model("knapsack_pruned", channels=ChannelConfig("cifar_resnet8x2", {}))
    model.pretrained_cfg["hf_hub_id"] = "timm/net.in1k"
    folder = tk.save_pretrained(model, tmp_path / "net", base_model=said, verify=False)
    made = json.loads((folder / "config.json").read_text())["timm_knapsack"]
    assert made.get("base_model") == written


def test_how_it_was_pruned_is_written(tmp_path):
    model = timm.create_model("cifar_resnet8x2", channels=(4, 4, 4)).eval()
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="random")
    options = {"budget": tk.Budget(macs=0.5), "groups": groups, "base_args": {"channels": (4, 4, 4)}}
    result = tk.prune(model, scores=scores, **options)
    folder = tk.save_pretrained(result, tmp_path / "net", verify=False)
    written = json.loads((folder / "config.json").read_text())["timm_knapsack"]
    assert not {"layers", "input_size"} & set(written)  # timm's base has them
    made, told = written["pruning"], result.report.to_dict()
    expected = ("model", "value", "total_value", "upper_bound", "rounds", "scores", "options")
    assert made == json.loads(json.dumps({key: told[key] for key in expected}))
