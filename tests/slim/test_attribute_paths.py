"""Numbers in modules: layers agree with their weights, and paths lead to what is there or are a KeyError."""

import pytest
import timm
from torch import nn

from timm_knapsack.slim.attributes import get_attribute, holders, sync_layer

LAYERS = {
    "linear": lambda n: nn.Linear(n, 2 * n),
    "batch norm": lambda n: nn.BatchNorm2d(n),
    "instance norm": lambda n: nn.InstanceNorm2d(n, affine=True),
    "group norm": lambda n: nn.GroupNorm(2, n),
    "layer norm": lambda n: nn.LayerNorm(n),
    "embedding": lambda n: nn.Embedding(n, 3 * n),
    "prelu": lambda n: nn.PReLU(n),
    "bilinear": lambda n: nn.Bilinear(n, 2 * n, 3 * n),
    "lstm": lambda n: nn.LSTM(n, 2 * n),
    "conv": lambda n: nn.Conv2d(n, 2 * n, 3),
    "grouped conv": lambda n: nn.Conv2d(2 * n, 4 * n, 3, groups=2),
    "transposed conv": lambda n: nn.ConvTranspose2d(n, 3 * n, 2),
    "grouped transposed conv": lambda n: nn.ConvTranspose2d(2 * n, 4 * n, 2, groups=2),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_with_the_weights_of_a_smaller_one_has_its_numbers(kind):
    layer, smaller = LAYERS[kind](8), LAYERS[kind](4)
    before = repr(layer)
    for name, parameter in smaller.named_parameters():
        setattr(layer, name, parameter)
    for name, buffer in smaller.named_buffers():
        setattr(layer, name, buffer)
    sync_layer(layer)
    assert repr(layer) == repr(smaller) != before


class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes, self.table, self.width = [4, 8, 4], {"inner": 4}, 4


@pytest.mark.parametrize("path, value", [("sizes.0", 4), ("sizes.2", 4), ("table.inner", 4), ("width", 4)])
def test_a_path_leads_to_its_number(path, value):
    assert get_attribute(Sized(), path) == value


@pytest.mark.parametrize("path", ["sizes.3", "sizes.9", "sizes.-1", "sizes.x", "table.outer", "height", "forward"])
def test_a_path_that_leads_nowhere_is_a_key_error(path):
    with pytest.raises(KeyError):
        get_attribute(Sized(), path)


def test_a_path_through_timms_feature_info():
    model = timm.create_model("resnet18", features_only=True)
    assert [get_attribute(model, f"feature_info.{i}.num_chs") for i in range(5)] == [64, 64, 128, 256, 512]


def test_of_a_list_only_the_part_that_was_asked_for_holds_a_number():
    assert list(holders(Sized(), 4)) == ["sizes.0", "sizes.2", "width"]
    assert list(holders(Sized(), 4, part=(2, 3))) == ["sizes.2", "width"]
    assert list(holders(Sized(), 4, part=(1, 3))) == ["width"]
    assert list(holders(Sized(), 4, part=(1, 2))) == ["sizes.0", "sizes.2", "width"]  # a list of another length
    assert list(holders(Sized(), 4, names=("width",))) == ["width"]
