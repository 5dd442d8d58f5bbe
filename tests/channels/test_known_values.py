"""Code that asks for values runs on the meta device where they are made of nothing, and only there."""

import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.channels.known_values import KnownValues
from timm_knapsack.channels.tracing import run_trace
from timm_knapsack.costs.counted import count_macs
from timm_knapsack.slim.copying import on_meta

IMAGE = torch.zeros(1, 3, 8, 8)


class AsksForValues(nn.Module):
    """A wide branch where the mask has a gap, a narrow one where it has none."""

    def __init__(self, change=None):
        super().__init__()
        self.stem, self.narrow, self.wide = nn.Conv2d(3, 6, 3), nn.Linear(6, 5), nn.Linear(6, 50)
        self.change = change

    def forward(self, x):
        valid = torch.ones(len(x), 4, dtype=torch.bool, device=x.device)
        if self.change is not None:
            valid = self.change(valid, x)
        gap = (~valid.unsqueeze(0).expand(2, -1, -1)).any()
        x = self.stem(x).relu().mean((2, 3))
        return self.wide(x)[:, :5] if gap else self.narrow(x)


def in_place(valid, x):
    valid[:, 1:].fill_(False)
    return valid


CHANGES = {
    "cut": lambda valid, x: torch.arange(4, device=x.device)[None] < 2,
    "in place": in_place,
    "by the image": lambda valid, x: valid & (x.sum() > 0),
    "by chance": lambda valid, x: torch.rand(1, 4, device=x.device) > 2,
    "like the image": lambda valid, x: torch.ones_like(x[:, 0, 0, :4], dtype=torch.bool) & valid,
}


def macs_by_hand(outputs: int) -> int:
    return 36 * 27 * 6 + 6 * outputs


@pytest.mark.parametrize("change, outputs", [(None, 5), ("cut", 50)])
def test_known_values_decide_on_the_meta_device(change, outputs):
    net = AsksForValues(CHANGES.get(change))
    trace = run_trace(on_meta(net), (IMAGE.to("meta"),))
    assert trace.on_meta and trace.output_shapes == [(1, 5)]
    assert ("wide.weight" in trace.reached) == (outputs == 50)
    assert count_macs(net, (3, 8, 8)) == macs_by_hand(outputs)


@pytest.mark.parametrize("change", ["in place", "by the image", "by chance", "like the image"])
def test_what_is_changed_in_place_or_depends_on_something_is_not_known(change):
    with pytest.raises(RuntimeError):
        run_trace(on_meta(AsksForValues(CHANGES[change])), (IMAGE.to("meta"),))


@pytest.mark.parametrize("change, outputs", [("in place", 50), ("like the image", 5)])
def test_such_a_network_is_traced_with_real_tensors(change, outputs):
    net = AsksForValues(CHANGES[change])
    assert tk.find_channel_groups(net, IMAGE)["stem"].size == 6
    assert count_macs(net, (3, 8, 8)) == macs_by_hand(outputs)


def test_parts_of_a_result_are_known_by_their_number():
    known, whole = KnownValues(), torch.empty(4, device="meta", dtype=torch.int64)
    known.note(torch.ops.aten.arange.default, (4,), {"device": torch.device("meta")}, [whole])
    parts = [torch.empty(2, device="meta", dtype=torch.int64) for _ in range(2)]
    known.note(torch.ops.aten.split.Tensor, (whole, 2), {}, parts)
    assert known.tensor(parts[1]).tolist() == [2, 3]
    assert known.item(torch.empty(1, device="meta")) is None
