"""Which layers of a network are timed, and at which widths.

A layer is timed inside the network it belongs to, so one pass through one slim copy gives a time for every layer at
once. The copies are chosen so that together they show every layer at every pair of its widths on a grid: 25 copies for
a 5 × 5 grid, however many layers the network has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...errors import LatencyError, first_line
from ...slim.channel_groups import ChannelGroups, Count
from .layer_timing import Conditions

LEVELS = (5, 7, 11)  # primes: see grid_plan
STAIR_OFFSETS = (-16, -15, -12, -9, -8, -7, -4, -1, 0)  # channels from a width that is a multiple of 16


@dataclass(frozen=True)
class TimedLayer:
    """A conv, linear or attention with what follows it, up to the next one.

    ``layer1.0.conv2`` of ResNet-50 with its norm and activation: ``widths`` are dims 0 and 1 of its weight as functions
    of the kept units; layers with the same ``shape`` do the same work at the same widths.
    """

    name: str
    kind: str  # "conv", "pointwise", "depthwise", "grouped", "linear", or the class of anything else
    shape: str
    widths: tuple[Count, Count]


def find_timed_layers(model: nn.Module, groups: ChannelGroups, conditions: Conditions) -> list[TimedLayer]:
    """The layers that do multiply-accumulates, in the order in which they run."""
    modules = dict(model.named_modules())
    weights = {}
    for name in dict.fromkeys(term.module for term in groups.terms):
        own = {} if not name else dict(modules[name].named_parameters(recurse=False))
        matrices = [(tensor.numel(), param) for param, tensor in own.items() if tensor.dim() >= 2]
        if matrices:
            weights[name] = f"{name}.{max(matrices)[1]}"
    order, inputs, followers = _run_once(conditions.copied(model), set(weights), conditions)
    return [_timed_layer(name, modules[name], weights[name], inputs[name], followers[name], groups) for name in order]


def _run_once(network, layers: set[str], conditions: Conditions):
    """Order of the layers, the shape of what goes into each, and the modules that run before the next."""
    inputs: dict[str, tuple[int, ...]] = {}
    followers: dict[str, list[str]] = {}
    running = [""]

    def watch(name: str):
        def hook(module, args):
            if name in layers:
                running[0] = name
                first = next((x for x in args if isinstance(x, torch.Tensor)), None)
                inputs.setdefault(name, tuple(first.shape) if first is not None else ())
                followers.setdefault(name, [])
            elif running[0]:
                followers[running[0]].append(type(module).__name__)

        return hook

    for name, module in network.named_modules():
        if name in layers or not any(module.children()):
            module.register_forward_pre_hook(watch(name))
    with conditions.active():
        images = conditions.images()
        try:
            network(images)
        except (RuntimeError, ValueError) as error:
            size, name = " × ".join(map(str, images.shape)), type(network).__name__
            raise LatencyError(f"{name} does not run on images of {size}: {first_line(error)}") from error
    return list(inputs), inputs, followers


def _timed_layer(name, module, weight, input_shape, followers, groups: ChannelGroups) -> TimedLayer:
    shape = groups.shapes[weight]
    units: dict[int, list[tuple[int, int, int]]] = {0: [], 1: []}
    for number, group in enumerate(groups):
        for s in group.slices:
            if s.param == weight and s.dim in units:
                units[s.dim].append((number, s.index.shape[1], s.index.numel()))
    widths = tuple(
        Count(shape[dim] - sum(n for *_, n in units[dim]), tuple((g, w) for g, w, _ in units[dim])) for dim in (0, 1)
    )
    return TimedLayer(name, _kind(module), f"{_describe(module, shape, input_shape)} > {','.join(followers)}", widths)


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.modules.conv._ConvNd):
        if module.groups > 1:
            return "depthwise" if module.weight.shape[1] == 1 else "grouped"
        return "pointwise" if max(module.kernel_size) == 1 else "conv"
    return "linear" if isinstance(module, nn.Linear) else type(module).__name__


def _describe(module: nn.Module, shape, input_shape) -> str:
    details = []
    for attribute in ("kernel_size", "stride", "dilation"):
        value = getattr(module, attribute, None)
        if isinstance(value, tuple) and max(value) > 1:
            details.append(f"{attribute} {'x'.join(map(str, value))}")
    if getattr(module, "groups", 1) != 1 and isinstance(module, nn.modules.conv._ConvNd):
        details.append(f"groups {module.groups}")
    sizes = "x".join(map(str, input_shape))
    return f"{type(module).__name__} {'x'.join(map(str, shape[:2]))} {' '.join(details)} on {sizes}".replace("  ", " ")


# ---- plans: for each copy, the kept units of every group ----------------------------------------------------------


def stairs_plan(groups: ChannelGroups) -> list[list[int]]:
    """Copies whose widths differ by a few channels: groups of 32 single channels or more, near 5/8 of their size."""
    plan = []
    for offset in STAIR_OFFSETS:
        counts = []
        for group in groups:
            middle = max(group.size * 5 // 8 // 16 * 16, 32)
            moves = _channels_per_unit(group) == 1 and middle <= group.size
            counts.append(middle + offset if moves else group.size)
        plan.append(counts)
    return plan


def grid_plan(groups: ChannelGroups, layers: Sequence[TimedLayer], steps: Sequence[int]) -> list[list[int]]:
    """Copies that show every layer at every pair of levels of its two widths.

    Groups that meet in a layer get different colours. With G levels, G prime, copy (i, j) puts a group of colour c at
    level (i + c·j) mod G: for any two colours, the G² copies hold every pair of levels exactly once. With j = 0 all
    groups are at the same level, so the ends of widths that sum over many groups are there too.
    """
    colours = _colours(layers, len(groups))
    count = max(colours, default=0) + 1
    levels = next((g for g in LEVELS if count <= g), LEVELS[0])
    random = np.random.default_rng(0).integers(levels, size=(levels**2, count))
    plan = []
    for i in range(levels):
        for j in range(levels):
            copy = []
            for group, step, colour in zip(groups, steps, colours, strict=True):
                # More colours than the design can tell apart (dense connections): a random choice.
                level = (i + colour * j) % levels if colour < levels or j == 0 else random[i * levels + j, colour]
                copy.append(_level(group.size, step, level / (levels - 1)))
            plan.append(copy)
    return plan


def _level(size: int, step: int, fraction: float) -> int:
    least = min(step, size)
    count = least + round((size - least) * fraction / step) * step
    return size if fraction == 1 else min(max(count, least), size)


def _colours(layers: Sequence[TimedLayer], groups: int) -> list[int]:
    """Neighbours differ; the busiest group first."""
    neighbours = [set() for _ in range(groups)]
    for layer in layers:
        first, second = ({g for g, _ in width.units} for width in layer.widths)
        for a in first:
            for b in second - {a}:
                neighbours[a].add(b)
                neighbours[b].add(a)
    colours = [-1] * groups
    for g in sorted(range(groups), key=lambda g: -len(neighbours[g])):
        taken = {colours[n] for n in neighbours[g]}
        colours[g] = next(c for c in range(groups + 1) if c not in taken)
    return colours


def group_steps(groups: ChannelGroups, layers: Sequence[TimedLayer], stairs: Mapping[str, int]) -> list[int]:
    """Units of each group that the device takes together, given the stairs of each kind of layer in channels.

    Narrow groups get half or a quarter of a stair, two steps at least, so that they can be pruned.
    """
    wanted = [1] * len(groups)
    for layer in layers:
        for width in layer.widths:
            for g, channels in width.units:
                step = stairs.get(layer.kind, 1)
                wanted[g] = max(wanted[g], step // int(np.gcd(step, channels)))
    for g, group in enumerate(groups):
        while wanted[g] > 1 and group.size < 2 * wanted[g]:
            wanted[g] //= 2
    return wanted


def _channels_per_unit(group) -> int:
    return next((s.index.shape[1] for s in group.slices if s.role == "out"), 1)
