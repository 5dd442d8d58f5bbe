"""MACs and parameters: exact, equal to torch's own count, before and after slicing and as a function of the widths."""

import numpy as np
import pytest
import timm
import torch
from nets import NETS, ReadsWidths, SkipConnections
from oracle import random_keep, torch_macs, widths_of
from torch import nn

import timm_knapsack as tk
from timm_knapsack.costs.counted import macs_cost, params_cost
from timm_knapsack.errors import TraceError
from timm_knapsack.slim.cutting import slice_model

IMAGE = (1, 3, 8, 8)


def test_known_models():
    """Published numbers: 4.09 GMACs and 25 557 032 parameters of ResNet-50, 1.82 GMACs of ResNet-18."""
    with torch.device("meta"):
        resnet50, resnet18 = timm.create_model("resnet50"), timm.create_model("resnet18")
    assert (tk.count_macs(resnet50), tk.count_params(resnet50)) == (4_089_184_256, 25_557_032)
    assert (tk.count_macs(resnet18), tk.count_params(resnet18)) == (1_814_073_344, 11_689_512)


def test_by_hand():
    convs = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3)
    model = nn.Sequential(*convs, nn.Flatten(), nn.Linear(216, 4))
    by_hand = 64 * 9 * 3 * 6 + 36 * 9 * 2 * 6 + 36 * 6 * 4
    assert tk.count_macs(model, (3, 8, 8)) == by_hand
    assert tk.count_params(model) == (27 * 6 + 6) + (2 * 9 * 6 + 6) + (216 * 4 + 4)


def test_the_input_size_matters_and_the_batch_does_not():
    model = nn.Conv2d(3, 6, 1)
    assert tk.count_macs(model, (3, 16, 16)) == 4 * tk.count_macs(model, (3, 8, 8)) == 4 * 64 * 18


def test_attention_is_counted():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = ReadsWidths(8, 2)

        def forward(self, x):
            return self.attn(x.flatten(2).transpose(1, 2))

    assert tk.count_macs(Tokens(), (8, 4, 4)) == 16 * (8 * 24 + 8 * 8) + 2 * (16 * 16 * 8)


def test_shared_parameters_count_once():
    assert tk.count_params(NETS["TiedWeights"].build()) == sum(
        p.numel() for p in {id(p): p for p in NETS["TiedWeights"].build().parameters()}.values()
    )
    layer = nn.Linear(4, 4, bias=False)
    assert tk.count_params(nn.Sequential(layer, layer)) == 16


def test_counting_changes_nothing_and_needs_no_memory():
    model = SkipConnections().train()
    versions = [p._version for p in model.parameters()]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert tk.count_macs(SkipConnections().to("meta", dtype), IMAGE[1:]) == tk.count_macs(model, IMAGE[1:])
    assert model.training and versions == [p._version for p in model.parameters()]


def test_a_model_that_asks_for_values_is_counted_on_real_tensors():
    class AsksForAValue(SkipConnections):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() >= 0 else 1.0)

    expected = tk.count_macs(SkipConnections(), IMAGE[1:])
    assert tk.count_macs(AsksForAValue(), IMAGE[1:]) == tk.count_macs(AsksForAValue().to("meta"), IMAGE[1:]) == expected


def test_a_model_without_an_input_size_is_told_so():
    with pytest.raises(TraceError, match="does not say its input size"):
        tk.count_macs(SkipConnections())


@pytest.mark.parametrize("name", ["SkipConnections", "VisionTransformer", "DenselyJoined", "FlattenedHead"])
def test_costs_predict_the_slim_model_exactly(name):
    net = NETS[name]
    model = net.build()
    groups = tk.find_channel_groups(model, torch.empty(net.shape))
    macs, params = macs_cost(groups), params_cost(groups, model)
    assert macs.at(groups.sizes) == tk.count_macs(model, net.shape[1:]) == torch_macs(model, net.shape)
    assert params.at(groups.sizes) == tk.count_params(model)
    for seed in range(3):
        keep = random_keep(groups, seed)
        slim, kept = slice_model(model, groups, keep), widths_of(groups, keep)
        assert macs.at(kept) == groups.macs(kept) == tk.count_macs(slim, net.shape[1:])
        assert params.at(kept) == tk.count_params(slim)


@pytest.mark.parametrize("name", ["SkipConnections", "VisionTransformer", "EqualChunks"])
def test_a_marginal_cost_is_the_slope(name):
    net = NETS[name]
    model = net.build()
    groups = tk.find_channel_groups(model, torch.empty(net.shape))
    for cost in (macs_cost(groups), params_cost(groups, model)):
        at = np.array(groups.sizes, dtype=float) * 0.7
        slope = cost.marginal(at)
        for g in range(len(groups)):
            step = np.eye(len(groups))[g] * 1e-3
            assert slope[g] == pytest.approx((cost.at(at + step) - cost.at(at - step)) / 2e-3, rel=1e-6)


def test_the_comparison_with_torch_can_fail():
    groups = tk.find_channel_groups(SkipConnections(), torch.empty(IMAGE))
    slim = slice_model(SkipConnections(), groups, {"stem": [0, 1]})
    assert groups.macs([3, 8, 5]) != torch_macs(slim, IMAGE) == groups.macs([2, 8, 5])


class AsksAndAttends(nn.Module):
    """Looks at a value, so that it can't run on the meta device, and uses fused attention."""

    def __init__(self):
        super().__init__()
        self.pretrained_cfg = {"input_size": (3, 4, 4)}
        self.embed, self.fc = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x.flatten(2).transpose(1, 2))
        if x.isnan().any():
            x = x.nan_to_num()
        x = x.unsqueeze(1)
        return self.fc(nn.functional.scaled_dot_product_attention(x, x, x).mean((1, 2)))


def test_attention_counts_in_a_model_that_asks_for_values_too():
    expected = 16 * 3 * 8 + 2 * 16 * 16 * 8 + 8 * 2
    assert tk.count_macs(AsksAndAttends()) == expected
    assert tk.find_channel_groups(AsksAndAttends()).macs() == expected
