"""Weights from a file that somebody sent: they fit, or one line says what is wrong."""

import pytest
import torch
from torch import nn

import timm_knapsack  # noqa: F401  (before timm)
from timm_knapsack.errors import CheckpointError
from timm_knapsack.models.model_source import load_weights


def test_wrapped_weights_are_unwrapped(tmp_path):
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    wrapped = {f"module.{name}": tensor for name, tensor in other.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, tmp_path / "a.pth")
    load_weights(net, tmp_path / "a.pth")
    assert torch.equal(net.weight, other.weight) and torch.equal(net.bias, other.bias)


@pytest.mark.parametrize("data", [[1, 2], torch.ones(3), {"weight": 1}, {1: torch.ones(2)}, {"state_dict": {"a": "b"}}])
def test_a_file_that_holds_no_weights_is_named(tmp_path, data):
    torch.save(data, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"a\.pth holds no weights: expected .name: tensor., as state_dict"):
        load_weights(nn.Linear(3, 2), tmp_path / "a.pth")


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_a_file_that_is_empty_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{name} can't be read as weights .*write or download it again"):
        load_weights(nn.Linear(3, 2), tmp_path / name)
