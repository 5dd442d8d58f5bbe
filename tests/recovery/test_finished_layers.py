"""Finished layers return what they returned before: the segment's output is that of a plain run."""

import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.maps.walk import Walk, find_segments, watch_execution
from timm_knapsack.recovery.finished_layers import FinishedLayers


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
