"""What building a stranger's model may take: each of the three limits by itself, and never on a real device."""

import pytest
import torch

from timm_knapsack.errors import ChannelConfigError
from timm_knapsack.models.effort import NOTHING, _Counting, build_within_limits


def counting():
    return _Counting(allowed=NOTHING.allowed, what="this makes it")


def test_calls_that_give_no_tensor_are_counted_too():
    x = torch.empty(2)
    with counting():
        for _ in range(5000):
            x.size()
        with pytest.raises(ChannelConfigError, match="this makes it several times larger"):
            x.size()


def test_the_elements_of_all_results_together_are_limited():
    """None of them is large, and calls are few: 2**28 in all."""
    with torch.device("meta"), counting():
        for _ in range(16):
            torch.empty(2**24)
        with pytest.raises(ChannelConfigError, match="several times larger"):
            torch.empty(1)


def test_the_largest_result_is_limited():
    with torch.device("meta"), counting():
        torch.empty(2**25)
        with pytest.raises(ChannelConfigError, match="several times larger"):
            torch.empty(2**25 + 1)


def test_a_device_in_the_arguments_is_not_used():
    model = build_within_limits("vit_tiny_patch16_224", {"device": "cpu", "depth": 1})
    assert {p.device.type for p in model.parameters()} == {"meta"}
