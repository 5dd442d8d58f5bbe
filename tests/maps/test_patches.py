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


def test_positions_of_a_depthwise_channel_lie_side_by_side():
    """With strides between them each of its many small products takes ten times as long and more."""
    conv = torch.nn.Conv2d(6, 6, 3, padding=1, groups=6)
    for x in (torch.randn(2, 6, 5, 5), torch.randn(2, 6, 5, 5).contiguous(memory_format=torch.channels_last)):
        assert patches(conv, x).stride(1) == 1
        assert patches(conv, x, torch.tensor([0, 7, 24])).stride(1) == 1
