"""Activation memory: the formula against counts on the physical slim network, one by a counter that shares no code."""

import random
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from nets import NETS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import timm_knapsack as tk
from timm_knapsack.channels.grouping import _count_in_axis
from timm_knapsack.costs.activations import activations_cost, count_activations, parse_bytes, peak
from timm_knapsack.errors import BudgetError
from timm_knapsack.slim.channel_groups import Count

CONVS = ["resnet18", "cifar_resnet20", "mobilenetv3_small_050", "efficientnet_lite0", "densenet121"]
NAMES = [*CONVS, "vit_tiny_patch16_224"]


class StorageCounter(TorchDispatchMode):
    """Every op's storages on the meta device; a copy is the map that it copies."""

    def __init__(self, image):
        super().__init__()
        self.held, self.ops = [image], []
        self.map_of = {self.storage(image): self.storage(image)}  # storage → the map it holds

    @staticmethod
    def storage(x):
        return x.untyped_storage()._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_flatten(t)[0] if torch.is_tensor(x)] for t in ((args, kwargs), result))
        self.held += outputs
        read = [self.map_of[s] for s in map(self.storage, inputs) if s in self.map_of]
        copies = func in (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)
        for y in outputs:
            if read and self.storage(y) not in self.map_of:
                self.map_of[self.storage(y)] = read[0] if copies else self.storage(y)
        self.ops.append((read, {self.map_of[s] for s in map(self.storage, outputs) if s in self.map_of}))
        return result

    def peak(self, output):
        bytes_of = {self.storage(x): x.untyped_storage().nbytes() for x in self.held}
        last = {m: t for t, (read, _) in enumerate(self.ops) for m in read}
        last[self.map_of[self.storage(output)]] = len(self.ops)
        first = {self.storage(self.held[0]): 0}
        for t, (_, made) in enumerate(self.ops):
            for m in made:
                first.setdefault(m, t)
        alive = [
            sum(bytes_of[m] for m in first if first[m] <= t <= last.get(m, -1)) for t in range(len(self.ops))
        ]
        return max(alive)


def counted_apart(model, size):
    image = torch.empty(1, *size, device="meta")
    with torch.no_grad(), StorageCounter(image) as counter:
        output = model.to("meta").eval()(image)
    return counter.peak(output)


def widths(groups, seed):
    draw = random.Random(seed)
    return [draw.randint(min(2, g.size), g.size) for g in groups]


def slim_of(model, groups, counts, seed=0):
    draw = random.Random(seed)
    keep = {g.name: sorted(draw.sample(range(g.size), n)) for g, n in zip(groups, counts, strict=True)}
    return tk.slice_model(model, groups, keep)


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_is_what_the_slim_network_holds(name):
    model = timm.create_model(name)
    groups = tk.find_channel_groups(model)
    cost, size = activations_cost(groups), groups.input_shape[1:]
    assert cost.at(groups.sizes) == count_activations(model)
    for seed in range(2):
        counts = widths(groups, seed)
        slim = slim_of(model, groups, counts, seed)
        assert cost.at(counts) == count_activations(slim, size) == counted_apart(slim, size)


@pytest.mark.parametrize("name", sorted(NETS))
def test_the_formula_on_small_networks(name):
    net = NETS[name]
    model = net.build()
    groups = tk.find_channel_groups(model, torch.empty(net.shape))
    cost = activations_cost(groups)
    for seed in range(3):
        counts = widths(groups, seed)
        assert cost.at(counts) == count_activations(slim_of(model, groups, counts, seed), net.shape[1:])


def test_a_map_that_is_no_function_of_the_widths_is_said():
    """Half of a group's channels take another way: how many of them stay does not follow from the group's width."""
    groups = tk.find_channel_groups(timm.create_model("cifar_resnet20"))
    with pytest.raises(BudgetError, match="no function of the widths"):
        activations_cost(replace(groups, maps=None))
    first = np.arange(4)  # four units of one group of eight, in one axis
    assert _count_in_axis(first, np.zeros(8, dtype=int), {0: 0}, [8]) is None
    assert _count_in_axis(np.arange(8).repeat(2), np.zeros(8, dtype=int), {0: 0}, [8]) == Count(0, ((0, 2),))


def test_a_network_by_hand():
    """3 × 8 × 8 → 4 channels → 6 channels, pooled: what lives at each op, in bytes of float32."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 6, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        torch.nn.Linear(6, 2),
    )  # fmt: skip
    assert count_activations(model, (3, 8, 8)) == (4 + 6) * 64 * 4
    groups = tk.find_channel_groups(model, torch.zeros(1, 3, 8, 8))
    cost = activations_cost(groups)
    assert cost.at([2, 1]) == (3 + 2) * 64 * 4  # the first op is the peak now
    assert cost.marginal([4, 6]).tolist() == [256, 256] and cost.marginal([2, 1]).tolist() == [256, 0]


def test_a_shortcut_is_alive_until_it_is_added():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Conv2d(3, 8, 1), torch.nn.Conv2d(8, 8, 1)

        def forward(self, x):
            x = self.a(x)
            return (x + self.b(self.b(x)).relu_()).mean((2, 3))

    # x, the first b(x) and the second are alive together: relu_ is in place
    assert count_activations(Block(), (3, 4, 4)) == 3 * 8 * 16 * 4


def test_half_precision_takes_half():
    model = timm.create_model("cifar_resnet20")
    assert count_activations(model.half()) == count_activations(model.float()) / 2


def test_the_slope_is_a_subgradient():
    """From below and above: no step up costs less than the slope says, where widths enter one by one."""
    groups = tk.find_channel_groups(timm.create_model("cifar_resnet20"))
    cost = activations_cost(groups)
    for seed in range(4):
        here = np.array(widths(groups, seed), dtype=float)
        slope = cost.marginal(here)
        for other in (np.array(widths(groups, seed + 10), dtype=float), here + 1, np.maximum(here - 1, 1)):
            assert cost.at(other) >= cost.at(here) + slope @ (other - here) - 1e-6


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_budget_of_it_is_met(share):
    model = timm.create_model("cifar_resnet20")
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="magnitude")
    result = tk.prune(model, scores=scores, budget=tk.Budget(activations=share), groups=groups)
    line = result.report.line("activations")
    assert line.counted == count_activations(result.model) <= line.asked == share * line.original
    assert line.counted > (share - 0.04) * line.original  # a unit of the stream is 3 % of it


def test_peak_counts_first_and_last_op():
    assert peak(np.array([3, 4, 5]), np.array([0, 1, 2]), np.array([1, 2, 3])) == (9.0, 2)


@pytest.mark.parametrize(("text", "size"), [("4MB", 4e6), ("1.5 GB", 1.5e9), ("512KiB", 2**19), ("2000B", 2000)])
def test_sizes_are_read_with_their_unit(text, size):
    amount = parse_bytes("activations", text)
    assert amount.value == size and not amount.fraction
    assert tk.Budget.parse(f"activations={text}").limits({"activations": 9e9}) == {"activations": size}


@pytest.mark.parametrize("text", ["4", "MB", "0MB", "-4MB", "4 megabytes"])
def test_sizes_without_sense_are_refused(text):
    with pytest.raises(BudgetError, match="a size such as '4MB'"):
        tk.Budget(activations=text)
