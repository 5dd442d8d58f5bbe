"""Finished layers return what they returned before: the segment's output is that of a plain run."""

import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.maps.walk import Walk, find_segments, watch_execution
from timm_knapsack.recovery.closed_form import planned_layers
from timm_knapsack.recovery.finished_layers import FinishedLayers
from timm_knapsack.recovery.plans import layers_of_other_positions


class Shared(nn.Module):
    """A residual block whose 1×1 conv runs twice, on maps of two sizes, as CoaT's parallel blocks share an MLP."""

    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.mix, self.conv2 = (nn.Conv2d(width, width, k, padding=k // 2) for k in (3, 1, 3))

    def forward(self, x):
        y = self.mix(self.conv1(x).relu())
        small = self.mix(nn.functional.avg_pool2d(x, 2))
        return x + self.conv2(y.relu()) + nn.functional.interpolate(small, scale_factor=2)


def network():
    torch.manual_seed(0)
    stem, tail = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(stem, nn.Sequential(Shared(), Shared()), tail).eval()


def images(count=24):
    return list(torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)).split(8))


def test_a_layer_that_runs_twice_returns_each_of_its_outputs():
    model, batches = network(), images()
    walk = Walk(model, batches, find_segments(model, watch_execution(model, batches[0]).order))
    while "mix" not in " ".join(walk.segment.layers):
        walk.advance()
    finished = FinishedLayers(walk)
    for name in walk.segment.layers:
        finished.add(name, is_written=False)
    for batch in range(len(batches)):
        plain = walk.run(batch)
        for _ in range(2):  # the first run fills in, the second plays
            torch.testing.assert_close(finished.run(batch), plain, rtol=0, atol=0)
    calls = {name: len(known) for name, known in finished.outputs.items()}
    assert sorted(calls.values()) == [3, 3, 6], "each batch once, and twice where a layer runs twice"


def test_a_network_with_shared_layers_is_recovered():
    model, loader = network(), images()
    result = tk.prune(model, loader, budget=tk.Budget(macs=0.6), recover=False)
    before = (result.model(loader[0]) - model(loader[0])).norm()
    tk.recover(result.model, model, loader, kept=result.kept_channels)
    assert (result.model(loader[0]) - model(loader[0])).norm() < before


class PooledHeads(nn.Module):
    """A depthwise conv over each head by itself, the heads being images to it, as in MViTv2's pooled attention."""

    def __init__(self, heads, width=16, head=4):
        super().__init__()
        self.head = head
        self.enter, self.leave = nn.Conv2d(width, heads * head, 1), nn.Conv2d(heads * head, width, 1)
        self.pool = nn.Conv2d(head, head, 3, padding=1, groups=head)

    def forward(self, x):
        y = self.enter(x)
        heads = y.reshape(-1, self.head, *y.shape[2:])
        return x + self.leave(self.pool(heads).reshape(y.shape).relu())


def of_heads(heads):
    stem, tail = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(stem, nn.Sequential(PooledHeads(heads), PooledHeads(4)), tail).eval()


def test_a_conv_that_runs_on_each_head_is_left_alone_where_heads_are_gone():
    torch.manual_seed(0)
    model, slim, loader = of_heads(4), of_heads(3), images()
    weights = model.state_dict() | {f"1.0.enter.{name}": model.get_parameter(f"1.0.enter.{name}")[:12]
                                    for name in ("weight", "bias")}  # fmt: skip
    slim.load_state_dict(weights | {"1.0.leave.weight": model[1][0].leave.weight[:, :12]})
    kept = {"1.0.enter": torch.arange(12)}
    assert layers_of_other_positions(slim, model, loader[0][:2]) == ["1.0.pool"]
    assert "on each head" in planned_layers(slim, model, loader[0][:2], kept=kept, images=24)["1.0.pool"]
    with torch.no_grad():
        before = (slim(loader[0]) - model(loader[0])).norm()
        tk.recover(slim, model, loader, kept=kept)
        assert (slim(loader[0]) - model(loader[0])).norm() < before
