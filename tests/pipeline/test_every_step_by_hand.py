"""Networks written by hand take every default step: prune, refine, finetune, evaluate (all: plain_calls_by_hand.py)."""

import pytest
import torch

import timm_knapsack as tk
from benchmarks.nasty_nets import Nasty
from benchmarks.plain_calls_by_hand import every_step
from timm_knapsack.maps import precision
from timm_knapsack.slim.kept_channels import of_layers, shared_too

# weights that are computed, used both ways, shared; a layer that autocast does not know; values taken off the device
TAKES_EVERY_STEP = (
    "weight_norm", "spectral_norm", "tied_weights_used_backwards", "linear_over_pixels_of_each_channel",
    "through_numpy_values", "one_conv_called_three_times",
)  # fmt: skip


@pytest.mark.parametrize("name", TAKES_EVERY_STEP)
def test_it_takes_every_step(name):
    assert every_step(Nasty(name).eval()) == "right"


def test_a_layer_that_autocast_does_not_know_stays_in_float32(monkeypatch):
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda device: device.type == "cpu")
    monkeypatch.setattr(precision, "LEAST_MACS", 0)
    model = Nasty("bilinear_layer").eval()
    images = torch.randn(2, 3, 6, 6)
    with pytest.raises(RuntimeError, match="same dtype"), precision.fast_passes(images.device):
        model(images)
    assert not precision.passes_gain(model, images)
    assert precision.passes_gain(Nasty("layer_scale").eval(), images)
    assert every_step(model) == "right"


def test_a_layer_whose_weight_is_computed_is_left_alone_by_recovery():
    model = Nasty("weight_norm").eval()
    loader = [torch.randn(16, 3, 6, 6)] * 2
    result = tk.prune(model, loader, budget=tk.Budget(macs=0.6), recover=False)
    before = {name: value.clone() for name, value in result.model.conv.state_dict().items()}
    assert "conv" in result.kept_channels
    tk.recover(result.model, model, loader, kept=result.kept_channels)
    assert all(torch.equal(value, before[name]) for name, value in result.model.conv.state_dict().items())


def test_channels_of_a_weight_that_is_used_both_ways():
    model = Nasty("tied_weights_used_backwards")
    kept = {"conv.weight": {1: torch.tensor([2])}, "stem.weight": {0: torch.tensor([1])}}
    assert list(of_layers(kept, model)) == ["stem"]
    computed = Nasty("weight_norm")
    assert list(shared_too({"conv": torch.tensor([1])}, computed)) == ["conv"]
