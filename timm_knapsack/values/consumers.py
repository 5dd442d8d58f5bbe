"""The layers that read a group's channels, and the Gram matrices of what they see.

A layer is a matrix product of its patches (`maps.patches`), so what it loses when channels go, and the weights that
lose least, follow from the mean of x xᵀ over positions alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..maps.gram import add_gram, mirror
from ..maps.patches import draw_positions, flat_weight, outputs, patches
from ..maps.walk import Execution, hooked
from ..slim.channel_groups import ChannelGroup
from .elimination import RIDGE, WIDE

POSITIONS = 20_000  # of a layer's map, at most, that its Gram matrix is made of
WIDE_LAYERS = 4  # but at least this many for each input of the layer
PENALTIES = (RIDGE, 1e-1, 1.0)


@dataclass(frozen=True)
class Reader:
    """One layer that reads a group.

    Attributes:
        layer: its name.
        index: [units, width], its input channels that belong to each unit.
        why_not: why it can't be refitted in closed form; empty where it can.
    """

    layer: str
    index: Tensor
    why_not: str = ""


def readers_of(group: ChannelGroup, modules: Mapping[str, nn.Module], execution: Execution) -> list[Reader]:
    """The convs and linears that sum over the group's channels.

    Example:
        >>> import timm_knapsack as tk
        >>> from timm_knapsack.maps.walk import watch_execution
        >>> execution = watch_execution(model, torch.zeros(1, 3, 64, 64))
        >>> group = tk.find_channel_groups(model)["layer1.0.conv1"]
        >>> [reader.layer for reader in readers_of(group, dict(model.named_modules()), execution)]
        ['layer1.0.conv2']
    """
    readers = []
    for s in group.slices:
        if s.role != "in":
            continue
        name, _, kind = s.param.rpartition(".")
        layer = modules.get(name)
        why = ""
        if kind != "weight" or s.dim != 1 or not isinstance(layer, (nn.Conv2d, nn.Linear)):
            why = "it is neither a conv nor a linear"
        elif execution.calls.get(name) != 1:
            why = f"it runs {execution.calls.get(name, 0)} times in one forward pass"
        elif sum(layer.weight is getattr(other, "weight", None) for other in modules.values()) > 1:
            why = "it shares its weights with another layer"
        readers.append(Reader(name, s.index, why))
    return readers


def rows_of(layer: nn.Module, index: Tensor) -> Tensor:
    """[units, k]: the rows of the layer's flat weight that belong to each unit; 9 for each channel of a 3×3 conv."""
    taps = layer.weight[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
    return (index[:, :, None] * taps + torch.arange(taps)).reshape(len(index), -1)


class GramSums:
    """Sums of x xᵀ and of x over positions, [groups, inputs, inputs]; products in float32, sums in float64.

    Two halves of the images are summed apart, so that the penalty of a refit can be chosen by what a fit on one half
    is worth on the other.
    """

    def __init__(self, layer: nn.Module):
        groups, inputs, _ = flat_weight(layer).shape
        zeros = layer.weight.new_zeros
        self.count = zeros(2, dtype=torch.float64)
        self.gram = zeros(2, groups, inputs, inputs, dtype=torch.float64)
        self.input = zeros(2, groups, inputs, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Patches of a few images, image by image: [groups, positions, inputs]."""
        middle = (x.shape[1] + 1) // 2
        for half, part in enumerate((x[:, :middle], x[:, middle:])):
            self.count[half] += part.shape[1]
            add_gram(self.gram[half], part)
            self.input[half] += part.sum(1)

    def reduce(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Add up what several processes have seen."""
        self.count, self.gram, self.input = add_up(self.count), add_up(self.gram), add_up(self.input)

    def means(self, centred: bool, half: int | None = None) -> tuple[Tensor, Tensor]:
        """Gram matrix and mean of the inputs, over all images or one half of them."""
        parts = slice(None) if half is None else slice(half, half + 1)
        count = self.count[parts].sum().clamp_min(1)
        gram, mean = mirror(self.gram[parts].sum(0)).div_(count), self.input[parts].sum(0) / count
        return gram.sub_(mean.unsqueeze(2) * mean.unsqueeze(1)) if centred else gram, mean


def collect_grams(
    model: nn.Module,
    layers: Iterable[str],
    batches: Sequence[Tensor],
    seeds: Sequence[int],
    total: int,
    step: Callable[[], None],
) -> tuple[dict[str, GramSums], dict[str, str]]:
    """One pass over the images: the Gram sums of each layer's inputs, and why some have none.

    Args:
        seeds: a number for each batch, to draw its positions with.
        total: batches on all processes.
        step: called after each batch.
    """
    modules = dict(model.named_modules())
    sums = {name: GramSums(modules[name]) for name in layers}
    why_not: dict[str, str] = {}
    current: dict[str, Tensor] = {}
    seed = 0

    def entered(name):
        def keep(x):
            current[name] = x

        return keep

    def left(name):
        layer = modules[name]
        share = max(POSITIONS, WIDE_LAYERS * flat_weight(layer).shape[1]) // total + 1

        def add(y):
            x = current.pop(name)
            if name in why_not:
                return
            at = draw_positions(layer, y, share, seed)
            try:
                seen = patches(layer, x, at).float()
            except ValueError as error:
                why_not[name] = str(error)
                return
            if float(sums[name].count.sum()) == 0 and not _is_product(layer, seen, outputs(layer, y, at).float()):
                why_not[name] = "its weights are computed while it runs (weight standardisation or the like)"
            sums[name].add(seen)

        return add

    hooks = [
        (modules[name], side, make(name)) for name in sums for side, make in (("input", entered), ("output", left))
    ]
    with torch.no_grad():
        for seed, images in zip(seeds, batches, strict=True):  # noqa: B007  (read by the hooks)
            with hooked(*hooks):
                model(images)
            step()
    return sums, why_not


def _is_product(layer: nn.Module, seen: Tensor, made: Tensor) -> bool:
    product = seen @ flat_weight(layer).float()
    if layer.bias is not None:
        product = product + layer.bias.float().reshape(product.shape[0], 1, -1)
    return torch.allclose(product, made, rtol=1e-2, atol=1e-3 * float(made.abs().max().clamp_min(1e-6)))


def choose_penalty(sums: GramSums, weight: Tensor, rows: Tensor, centred: bool) -> float:
    """The ridge with which a refit after the loss of every other unit, made on one half of the images, suits the other.

    Where there are many positions for each input, the smallest; it matters for layers that see few (a classifier). Of a
    wide layer, one half alone is fitted, in float32.
    """
    if float(sums.count.sum()) > 20 * weight.shape[1]:
        return PENALTIES[0]
    gone = rows[::2].reshape(-1)
    stay = torch.ones(weight.shape[1], dtype=torch.bool)
    stay[gone] = False
    stay = stay.nonzero().flatten()
    halves = [sums.means(centred, half)[0] for half in (0, 1)]
    wide = weight.shape[1] >= WIDE
    if wide:
        halves = [half.float() for half in halves]
    weight = weight.to(halves[0])
    errors = [0.0] * len(PENALTIES)
    for fitted, other in (halves,) if wide else (halves, halves[::-1]):
        rows_left = fitted[:, stay]
        inner, wanted = rows_left[:, :, stay], rows_left[:, :, gone] @ weight[:, gone]
        level = fitted.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
        own = inner.diagonal(dim1=1, dim2=2)
        change = torch.zeros_like(weight)
        change[:, gone] = -weight[:, gone]
        added = torch.zeros_like(level)
        for place, ridge in enumerate(PENALTIES):
            own += (ridge * level - added)[:, None]  # the diagonal is a view of the matrix
            added = ridge * level
            factor, failed = torch.linalg.cholesky_ex(inner)
            if failed.any():  # singular, and the penalty is below rounding
                errors[place] = math.inf
                continue
            change[:, stay] = torch.cholesky_solve(wanted, factor)
            errors[place] += float((change * (other @ change)).sum())
    least = min(range(len(PENALTIES)), key=errors.__getitem__)
    return PENALTIES[least] if math.isfinite(errors[least]) else PENALTIES[-1]
