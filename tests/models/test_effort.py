"""What building a stranger's model may take: each of the three limits by itself, and never on a real device."""

from contextlib import nullcontext

import pytest
import timm
import torch

from timm_knapsack.errors import ChannelConfigError
from timm_knapsack.models import effort
from timm_knapsack.models.effort import NOTHING, Effort, _Counting, build_within_limits


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


def test_what_is_allowed_beyond_a_base():
    assert Effort(10, 100, 20).allowed() == Effort(4 * 10 + 5_000, 4 * 100 + 2**28, 4 * 20 + 2**25)


@pytest.mark.parametrize("own, size, fits", [
    ((3, 512, 64), 2048, True), ((3, 512, 64), 2049, False), ((3, 64, 512), (2048, 2048), True),
    ((3, 64, 64), 1024, True), ((3, 64, 64), (16, 1025), False), (None, 1024, True), (None, 1025, False),
])  # fmt: skip
def test_an_image_is_at_most_four_times_the_largest_side_of_the_base(monkeypatch, own, size, fits):
    cfg = None if own is None else type("Cfg", (), {"input_size": own})
    monkeypatch.setattr(effort, "get_pretrained_cfg", lambda base: cfg)
    with nullcontext() if fits else pytest.raises(ChannelConfigError, match="is more than 4 times"):
        effort._check_image_size("net", size)


def test_what_the_base_says_about_its_arguments_is_repeated():
    with pytest.raises(ChannelConfigError, match=r"can't be built with nonsense=1: .*unexpected keyword argument"):
        build_within_limits("resnet18", {"nonsense": 1})


def test_the_base_is_looked_up_only_beyond_what_is_always_allowed():
    with torch.device("meta"), _Counting(allowed=lambda: pytest.fail("looked up")):
        torch.zeros(1000)


def test_what_a_large_base_takes_by_itself_is_counted_without_a_limit():
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    taken = effort._plain_effort.__wrapped__("vit_base_patch16_224")
    assert taken.largest == sum(t.numel() for t in (*model.parameters(), *model.buffers())) > 2**25
