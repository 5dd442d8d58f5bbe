"""Activation memory: the peak of the bytes of all maps that are alive at one time, for one image.

At every op of the forward pass the maps that it reads, those that it makes and those that a later op still needs (a
shortcut) are alive; the cost is the largest sum of their bytes over all ops. Bytes are those of each map's dtype:
float32 unless the model has another. What a map is, from when to when it lives and which tensors share memory is said
in ``channels.live_maps``; attention is taken apart into its matmuls, as for MACs. It is what a runtime that frees each
map after its last use needs besides the weights, and a little less than what eager PyTorch holds.

A map's bytes are a product of widths, so the cost is a maximum of sums of products; its slope is that of the ops at the
peak.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..channels.live_maps import LiveMaps
from ..channels.meta_shapes import meta_result
from ..errors import BudgetError
from ..slim.channel_groups import ChannelGroups, MapTerm
from ..slim.copying import copy_with, named_tensors, on_meta
from ..slim.example_inputs import example_dtype, example_input, inputs_like
from .cost import Cost
from .registry import Amount, CostKind, parse_count


class ActivationsCost(Cost):
    """The peak of the bytes of all live maps, as a function of the widths."""

    name, unit = "activations", "B"

    def __init__(self, maps: Sequence[MapTerm], groups: int):
        factors = max((len(m.counts) for m in maps), default=1) or 1
        # Factor f of map m is width[m, f] @ kept + base[m, f]; maps with fewer factors are padded with ones.
        self._width = np.zeros((len(maps), factors, groups))
        self._base = np.ones((len(maps), factors))
        for i, m in enumerate(maps):
            for f, count in enumerate(m.counts):
                self._base[i, f] = count.fixed
                for group, times in count.units:
                    self._width[i, f, group] += times
        self._constant = np.array([m.constant for m in maps], dtype=float)
        self._first = np.array([m.first for m in maps], dtype=int)
        self._last = np.array([m.last for m in maps], dtype=int)

    def at(self, kept):
        return float(peak(self._constant * self._sizes(kept).prod(axis=1), self._first, self._last)[0])

    def marginal(self, kept):
        """The slope of what is alive at the peak."""
        sizes = self._sizes(kept)
        _, when = peak(self._constant * sizes.prod(axis=1), self._first, self._last)
        alive = np.flatnonzero((self._first <= when) & (when <= self._last))
        slope = np.zeros(self._width.shape[2])
        for f in range(sizes.shape[1]):
            others = np.delete(sizes[alive], f, axis=1).prod(axis=1)
            slope += (self._constant[alive] * others) @ self._width[alive, f]
        return slope

    def _sizes(self, kept) -> np.ndarray:
        return self._width @ np.asarray(kept, dtype=float) + self._base


def peak(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[float, int]:
    """The largest sum of the sizes that are alive at one time, and the first time when it is reached.

    Example:
        >>> peak(np.array([3, 4, 5]), np.array([0, 1, 2]), np.array([1, 2, 3]))
        (9.0, 2)
    """
    change = np.zeros(int(last.max(initial=0)) + 2)
    np.add.at(change, first, sizes)
    np.subtract.at(change, last + 1, sizes)
    alive = np.cumsum(change)
    when = int(np.argmax(alive))
    return float(alive[when]), when


def activations_cost(groups: ChannelGroups) -> ActivationsCost:
    """Peak bytes of the maps for one image."""
    if groups.maps is None:
        raise BudgetError(
            "activations: a map of this model holds some channels of a group and not others, so that its size is no "
            "function of the widths; limit macs or params instead"
        )
    return ActivationsCost(groups.maps, len(groups))


class _Counter(TorchDispatchMode):
    def __init__(self, hold: bool):
        super().__init__()
        self.hold = hold
        self.maps = LiveMaps(lambda tensor: tensor.numel() * tensor.element_size(), hold)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Shapes as the trace finds them: what torch takes apart depends on strides, which are those of the trace then.
        namespace, op = func._schema.name.split("::")
        result = meta_result(op, args, kwargs) if self.hold and namespace == "aten" else None
        if result is None:
            result = func(*args, **kwargs)
        outputs = _tensors(result)
        if outputs:
            self.maps.follow(func, _tensors((args, kwargs)), outputs)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def count_activations(model: nn.Module, input_size=None) -> int:
    """Peak bytes of the maps that are alive at one time, for one image: counted in one pass on the meta device.

    Args:
        input_size: ``(channels, height, width)``; the model's own by default.

    Example:
        >>> import timm
        >>> count_activations(timm.create_model("resnet18"))
        6422528
    """
    example = torch.empty(example_input(model, input_size), device="meta", dtype=example_dtype(model))
    try:
        return _count(on_meta(model), inputs_like(example, "meta"), hold=True)
    except (RuntimeError, TypeError):  # a model that asks for values can't run on the meta device
        real = copy_with(model, lambda _, t: torch.zeros_like(t, device="cpu") if t.is_meta else t).eval()
        device = next((t.device for _, t in named_tensors(real)), torch.device("cpu"))
        with sdpa_kernel(SDPBackend.MATH):  # attention taken apart, as on the meta device
            return _count(real, (torch.zeros_like(example, device=device),), hold=False)


def _count(network: nn.Module, inputs: tuple, hold: bool) -> int:
    counter = _Counter(hold)
    counter.maps.start(_tensors(inputs))
    with torch.no_grad(), counter:
        output = network(*inputs)
    counter.maps.finish(_tensors(output))
    sizes, first, last = (np.array(row) for row in zip(*counter.maps.lives(), strict=True))
    return int(peak(sizes, first, last)[0])


def parse_bytes(name: str, value: Any) -> Amount:
    """A fraction, a number of bytes, or a size with its unit.

    Example:
        >>> parse_bytes("activations", "4MB"), parse_bytes("activations", "512 KiB").value
        (Amount(value=4000000.0, fraction=False), 524288.0)
    """
    if not isinstance(value, str):
        return parse_count(name, value)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kKMG]?)(i?)B\s*", value)
    if not match or float(match[1]) <= 0:
        raise BudgetError(f"budget {name}={value!r}: expected a fraction such as 0.5, or a size such as '4MB'")
    return Amount(float(match[1]) * (1024 if match[3] else 1000) ** " kMG".index(match[2].replace("K", "k") or " "))


KIND = CostKind(
    "activations",
    "activations",
    "B",
    make=lambda model, groups, table: activations_cost(groups),
    parse=parse_bytes,
    count=count_activations,
)
