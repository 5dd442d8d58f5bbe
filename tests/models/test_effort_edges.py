"""The count of what building takes, exactly, and the limits at their edges."""

import pytest
import torch
from torch import nn

from timm_knapsack.errors import ChannelConfigError
from timm_knapsack.models import effort
from timm_knapsack.models.effort import NOTHING, Effort, _Counting, build_within_limits

MORE = Effort(5_000, 2**28, 2**25)  # what is allowed for nothing


def test_each_call_and_each_element_counts_once():
    with _Counting() as count:
        torch.empty(2)
        torch.empty(3).size()
    assert count.effort == Effort(3, 5, 3)
    with _Counting() as count:
        for _ in range(5_010):
            torch.numel(torch.Tensor())
    assert count.largest == 0 and count.work == 0 and count.calls >= 5_010  # beyond the limit, where it looks


def test_arguments_reach_what_is_called():
    with _Counting():
        made = torch.zeros(2, dtype=torch.float64)
        assert made.sum(dim=0, keepdim=True).shape == (1,)
    assert made.dtype == torch.float64


def test_nothing_takes_nothing_and_all_limits_allow_themselves():
    assert NOTHING == Effort(0, 0, 0) and NOTHING.allowed() == MORE
    for _ in range(2):  # what is always allowed is not looked up, up to the last element
        with torch.device("meta"), _Counting(allowed=lambda: pytest.fail("looked up")) as count:
            torch.empty(2**25)
            for _ in range(7):
                torch.empty(2**25)
    assert count.work == 2**28


@pytest.mark.parametrize("size, fits", [(2**25 + 1, True), (2**25 + 2, False)])
def test_a_large_base_allows_more_up_to_the_last_element(size, fits):
    with torch.device("meta"), _Counting(allowed=lambda: Effort(10**6, 2**40, 2**25 + 1), what="it") as count:
        if fits:
            torch.empty(size)
            assert count.largest == size
        else:
            with pytest.raises(ChannelConfigError, match="it several times larger"):
                torch.empty(size)


class Made(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.empty(n, device="meta")) for n in sizes)
        self.register_buffer("table", torch.empty(4, device="meta"))


@pytest.fixture
def network(monkeypatch):
    """Stands for timm's; what its entrypoint was given is noted."""
    seen = []

    def of(build):
        def entrypoint(pretrained, **kwargs):
            seen.append(kwargs)
            return build(**kwargs) if kwargs else Made(8)

        monkeypatch.setattr(effort, "model_entrypoint", lambda base: entrypoint)
        return seen

    effort._plain_effort.cache_clear()
    yield of
    effort._plain_effort.cache_clear()


def test_many_parameters_that_existed_before_are_counted_together(network):
    made = Made(*[2**24] * 2), Made(*[2**24] * 3)
    network(lambda parts: made[parts])
    assert build_within_limits("net", {"parts": 0}) is made[0]
    with pytest.raises(ChannelConfigError, match=r"^parts=1 makes net several times larger than timm's own"):
        build_within_limits("net", {"parts": 1})


def test_the_device_alone_is_changed(network):
    seen = network(lambda **_: Made(1))
    build_within_limits("net", {"depth": 2})
    build_within_limits("net", {"depth": 2, "device": "cuda"})
    assert seen == [{"depth": 2}, {"depth": 2, "device": "meta"}]


@pytest.mark.parametrize(
    "error, said",
    [
        (ValueError(""), "ValueError"),
        (ValueError("  \n"), "ValueError"),
        (KeyError("a"), "'a'"),
        (ValueError("one\ntwo"), "one"),
        (ValueError("x" * 1000), "x" * 300),
    ],
)
def test_what_a_base_raises_is_said_in_its_first_line(network, error, said):
    def fail(**_):
        raise error

    network(fail)
    with pytest.raises(ChannelConfigError) as caught:
        build_within_limits("net", {"depth": 2})
    assert str(caught.value) == f"the base model 'net' can't be built with depth=2: {said}"


def test_of_long_arguments_the_first_300_characters_are_said():
    assert effort._shown({"a": 1, "b": "x"}) == "a=1, b='x'" and effort._shown({}) == "its defaults"
    assert effort._shown({"a": "x" * 1000}) == "a='" + "x" * 297
    with pytest.raises(ChannelConfigError) as caught:
        effort._check_image_size("net", [10**6] * 100)
    assert f"img_size={str([10**6] * 100)[:60]} is more" in str(caught.value)


def test_no_image_size_is_none_too_large():
    assert effort._check_image_size("net", None) is None
    with pytest.raises(ChannelConfigError, match="img_size=5000 is more than 4 times 256, the size that net"):
        effort._check_image_size("net", 5000)
