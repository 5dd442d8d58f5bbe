"""A layer as a matrix product of what its output positions see."""

import pytest
import torch
from torch import nn

from timm_knapsack.maps.patches import draw_positions, flat_weight, outputs, patches

LAYERS = {
    "3x3": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "stride": lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(6, 8, 3, dilation=2, padding=2),
    "1x1 stride": lambda: nn.Conv2d(6, 8, 1, stride=2, bias=False),
    "oblong": lambda: nn.Conv2d(6, 8, (1, 5), padding=(0, 2)),
    "groups": lambda: nn.Conv2d(6, 9, 3, padding=1, groups=3),
    "depthwise": lambda: nn.Conv2d(6, 6, 5, padding=2, groups=6),
    "linear": lambda: nn.Linear(12, 7),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_patches_times_weight_is_the_layer(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    x = torch.randn(2, 5, 12) if kind == "linear" else torch.randn(2, 6, 11, 12)
    y = layer(x).detach()
    at = draw_positions(layer, y, most=6, seed=0)
    for positions in (None, at):
        made = patches(layer, x, positions) @ flat_weight(layer)
        if layer.bias is not None:
            made = made + layer.bias.detach().reshape(made.shape[0], 1, -1)
        assert torch.allclose(made, outputs(layer, y, positions), atol=1e-5)
    assert len(at) == 3  # 6 positions over 2 images
