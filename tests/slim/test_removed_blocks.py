"""Modules that are gone: recorded in a ChannelConfig, rebuilt from it, refused where they make no sense."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from timm_knapsack.errors import ChannelConfigError
from timm_knapsack.models.rebuild import build_pruned
from timm_knapsack.slim.channel_config import ChannelConfig
from timm_knapsack.slim.cutting import resize_model
from timm_knapsack.slim.removed_blocks import Passage, Zero, without_modules

GONE = {"layer1.1": "identity", "layer3.1.conv2": "zero"}


def test_a_config_survives_json_pickle_and_copy():
    config = ChannelConfig("resnet18", {"conv1.weight": {0: 8}}, removed=GONE)
    for same in (ChannelConfig.from_json(config.to_json()), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config and dict(same.removed) == GONE
    assert config.to_dict()["version"] == 4 and "2 modules removed" in repr(config)
    assert "removed" not in ChannelConfig("resnet18", {}).to_dict()


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["layer1.1"], "removed is .*, expected an object"),
        ({"": "identity"}, "removed: '' is not a dotted name"),
        ({"layer1.1": "gone"}, "is 'gone', expected 'identity' or 'zero'"),
        ({"layer1": "identity", "layer1.1": "identity"}, "removed names 'layer1.1', which is gone with 'layer1'"),
    ],
)
def test_what_makes_no_sense_is_refused(removed, message):
    with pytest.raises(ChannelConfigError, match=message):
        ChannelConfig("resnet18", {}, removed=removed)


def test_a_module_that_is_not_there_is_an_error():
    config = ChannelConfig("resnet18", {}, removed={"layer9.1": "identity"})
    with pytest.raises(ChannelConfigError, match=r"removed: the model has no module 'layer9\.1'"):
        resize_model(timm.create_model("resnet18"), config)
    with pytest.raises(ChannelConfigError, match=r"removed: the base model 'resnet18' has no module 'layer9\.1'"):
        build_pruned("knapsack_pruned", config, arguments={"num_classes": 0})
    inside = ChannelConfig("resnet18", {"layer1.1.conv1.weight": {0: 3}}, removed=GONE)
    with pytest.raises(ChannelConfigError, match=r"no parameter 'layer1\.1\.conv1\.weight'"):
        resize_model(timm.create_model("resnet18"), inside)


def test_the_architecture_is_rebuilt_with_the_names_of_its_base():
    base = timm.create_model("resnet18")
    slim = build_pruned("knapsack_pruned", ChannelConfig("resnet18", {}, removed={"layer1.1": "identity"}))
    gone = {name for name in base.state_dict() if name.startswith("layer1.1.")}
    assert gone and set(slim.state_dict()) == set(base.state_dict()) - gone
    assert type(slim.layer1[1]) is nn.Identity
    features = build_pruned(
        "knapsack_pruned", ChannelConfig("resnet18", {}, removed={"layer1.1": "identity"}),
        arguments={"features_only": True, "out_indices": (1,)},
    )  # fmt: skip
    assert features(torch.zeros(1, 3, 32, 32))[0].shape == (1, 64, 8, 8)
    assert not any("layer1.1." in name for name in features.state_dict())


def test_a_copy_lacks_the_modules_and_shares_the_weights():
    net = timm.create_model("resnet18")
    net.layer1.eval()
    shorter = without_modules(net, GONE)
    assert isinstance(net.layer1[1].conv1, nn.Conv2d), "the model itself is untouched"
    assert shorter.conv1.weight is net.conv1.weight and isinstance(shorter.layer3[1].conv2, Zero)
    assert not shorter.layer1[1].training and shorter.layer3[1].conv2.training


def test_what_takes_more_than_one_input_becomes_a_passage():
    vit = timm.create_model("test_vit")
    shorter = without_modules(vit, {"blocks.0": "identity", "blocks.1.norm1": "identity", "blocks.1.attn": "zero"})
    assert isinstance(shorter.blocks[0], Passage) and isinstance(shorter.blocks[1].norm1, nn.Identity)
    x = torch.randn(2, 3, 4)
    assert shorter.blocks[0](x, attn_mask=torch.ones(3, 3)) is x
    assert shorter(torch.zeros(1, 3, 160, 160)).shape == (1, 1000)
