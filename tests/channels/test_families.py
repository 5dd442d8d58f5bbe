"""A quick sample of timm families, and models that are not timm's, through the checks of benchmarks/coverage.py.

Small images and shallow variants: the whole list, at full size, is ``make sweep``.
"""

import pytest
import timm
import torch
import torchvision
from oracle import check_pruned, random_keep, seeded, shapes_of
from torch import nn

import timm_knapsack as tk
from timm_knapsack.slim.cutting import channel_config_of, resize_model

# name → arguments of create_model; images are 64 × 64 unless img_size says otherwise
FAMILIES = {
    "resnet18": {},
    "skresnet18": {},
    "ecaresnet26t": {},
    "regnety_002": {},
    "mobilenetv3_small_050": {},
    "mixnet_s": {},
    "ghostnet_050": {},
    "ese_vovnet19b_dw": {},
    "cs3darknet_focus_s": {},
    "nf_regnet_b0": {},
    "convnext_atto": {"depths": (1, 1, 2, 1)},
    "convnextv2_atto": {"depths": (1, 1, 2, 1)},
    "edgenext_xx_small": {},
    "mobilevit_xxs": {},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 2, 1, 1), "embed_dim": 24, "num_heads": (2,) * 4},
    "mixer_s32_224": {"img_size": 64},
    "poolformerv2_s12": {"layers": (1, 1, 1, 1)},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_timm_family(name):
    arguments = FAMILIES[name]
    size = arguments.get("img_size", 64)
    model = seeded(timm.create_model(name, num_classes=10, **arguments))
    shape = (1, 3, size, size)
    groups = tk.find_channel_groups(model, torch.empty(shape))
    assert groups.macs([1] * len(groups)) < 0.6 * groups.macs(), "at least 40 % of the MACs can go"
    keep = random_keep(groups, 1)
    slim = check_pruned(model, groups, keep, shape, name)
    with torch.device("meta"):
        base = timm.create_model(name, num_classes=10, **arguments)
    rebuilt = resize_model(base, tk.ChannelConfig.from_json(channel_config_of(groups, keep, name).to_json()))
    assert shapes_of(rebuilt) == shapes_of(slim) and all(t.is_meta for t in rebuilt.state_dict().values())


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_torchvision_model(name):
    model = seeded(getattr(torchvision.models, name)(num_classes=10))
    groups = tk.find_channel_groups(model, torch.empty(1, 3, 64, 64))
    assert groups.macs([1] * len(groups)) < 0.6 * groups.macs()
    check_pruned(model, groups, random_keep(groups, 1), (1, 3, 64, 64), name)


class UNet(nn.Module):
    """Neither timm's nor torchvision's: an encoder and a decoder with joins across, and two outputs."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)])
        self.deep = nn.Conv2d(8, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 7, 2, stride=2)
        self.join = nn.Conv2d(15, 5, 3, padding=1)
        self.mask, self.label = nn.Conv2d(5, 2, 1), nn.Linear(12, 3)

    def forward(self, x):
        x = self.down[0](x).relu()
        side = self.down[1](x).relu()
        deep = self.deep(nn.functional.max_pool2d(side, 2)).relu()
        return self.mask(self.join(torch.cat([side, self.up(deep)], 1)).relu()), self.label(deep.mean((2, 3)))


def test_hand_written_model():
    model = seeded(UNet())
    groups = tk.find_channel_groups(model, torch.empty(1, 3, 8, 8))
    sizes = {"down.0": 6, "down.1": 8, "deep": 12, "up": 7, "join": 5}
    assert {g.name: g.size for g in groups} == sizes and set(groups.frozen) == {"mask", "label"}
    slim = check_pruned(model, groups, random_keep(groups, 1), (1, 3, 8, 8))
    mask, label = slim.eval()(torch.randn(2, 3, 8, 8))
    assert mask.shape == (2, 2, 8, 8) and label.shape == (2, 3)
