"""A layer as a matrix product of what its output positions see."""

import pytest
import torch
from nets import LAYERS

from timm_knapsack.maps.patches import draw_positions, flat_weight, outputs, patches


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
