"""MACs and parameters as functions of the widths, exact. The unit: MACs for one image, parameters one by one."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..channels.known_values import KnownValues
from ..channels.meta_shapes import meta_result
from ..slim.channel_groups import ChannelGroups, CostTerm, Count, fold
from ..slim.copying import copy_with, named_tensors, on_meta
from ..slim.example_inputs import example_dtype, example_input, inputs_like
from .cost import Cost
from .registry import CostKind, parse_count


class ProductCost(Cost):
    """A sum of products of widths, as MACs and parameters are."""

    def __init__(self, name: str, unit: str, terms: Sequence[CostTerm], groups: int):
        self.name, self.unit = name, unit
        self._fixed = sum(term.constant for term in terms if not term.counts)
        terms = [term for term in terms if term.counts]
        factors = max((len(term.counts) for term in terms), default=1)
        # Factor f of term t is width[t, f] @ kept + base[t, f]; terms with fewer factors are padded with ones.
        self._width = np.zeros((len(terms), factors, groups))
        self._base = np.ones((len(terms), factors))
        self._constant = np.array([term.constant for term in terms], dtype=float)
        for t, term in enumerate(terms):
            for f, count in enumerate(term.counts):
                self._base[t, f] = count.fixed
                for group, times in count.units:
                    self._width[t, f, group] += times

    def at(self, kept):
        sizes = self._width @ np.asarray(kept, dtype=float) + self._base
        return float(self._constant @ sizes.prod(axis=1) + self._fixed)

    def marginal(self, kept):
        sizes = self._width @ np.asarray(kept, dtype=float) + self._base
        slope = np.zeros(self._width.shape[2])
        for f in range(sizes.shape[1]):
            others = np.delete(sizes, f, axis=1).prod(axis=1)
            slope += (self._constant * others) @ self._width[:, f]
        return slope


def macs_cost(groups: ChannelGroups) -> ProductCost:
    """MACs for one image."""
    return ProductCost("macs", "MACs", groups.terms, len(groups))


def params_cost(groups: ChannelGroups, model: nn.Module) -> ProductCost:
    """Number of parameters."""
    units = defaultdict(lambda: defaultdict(list))
    for number, group in enumerate(groups):
        for s in group.slices:
            units[s.param][s.dim].append((number, s.index.shape[1], s.index.numel()))
    terms = []
    for name in (name for name, _ in model.named_parameters()):
        counts = []
        for dim, size in enumerate(groups.shapes[name]):
            members = units[name][dim]
            counts.append(Count(size - sum(n for *_, n in members), tuple((g, width) for g, width, _ in members)))
        terms.append(fold(CostTerm, (name,), 1, counts))
    return ProductCost("params", "parameters", terms, len(groups))


def count_macs(model: nn.Module, input_size=None) -> int:
    """MACs of one image: multiply-accumulates in convs, linears and attention; norms, activations, pooling count zero.

    It is ``torch.utils.flop_counter.FlopCounterMode`` / 2, on the meta device.

    Args:
        input_size: ``(channels, height, width)``; the model's own by default.

    Example:
        >>> import timm
        >>> count_macs(timm.create_model("resnet50"))
        4089184256
    """
    example = torch.empty(example_input(model, input_size), device="meta", dtype=example_dtype(model))
    shadow = on_meta(model).requires_grad_(False)
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), _ShapesAlone(), counter, _ShapesAlone(counter.flop_registry, KnownValues()):
            shadow(*inputs_like(example, "meta"))
    except (RuntimeError, TypeError):  # a model that asks for values can't run on the meta device
        real = copy_with(model, lambda _, t: torch.zeros_like(t, device="cpu") if t.is_meta else t).eval()
        device = next((t.device for _, t in named_tensors(real)), torch.device("cpu"))
        # attention taken apart, as on the meta device: torch has no formula for the CPU's fused one
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            real(torch.zeros_like(example, device=device))
    return counter.get_total_flops() // 2


class _ShapesAlone(TorchDispatchMode):
    """Meta tensors get the shapes of their results directly: torch's own way takes a millisecond for each op.

    Below the counter it serves the ops that are counted, above it all others (``but`` the counted ones), which the
    counter would take apart first; there it also answers code that asks for a value, where that is ``known``.
    """

    def __init__(self, but=(), known: KnownValues | None = None):
        super().__init__()
        self.but, self.known = but, known

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = None
        if self.known is not None and func is torch.ops.aten._local_scalar_dense.default:
            value = self.known.item(args[0])
            return func(*args) if value is None else value
        if func.namespace == "aten" and args and getattr(args[0], "is_meta", False):
            packet = func.overloadpacket
            result = None if packet in self.but else meta_result(packet.__name__, args, kwargs)
        result = func(*args, **kwargs) if result is None else result
        if self.known is not None:
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            self.known.note(func, args, kwargs, [y for y in outputs if isinstance(y, Tensor)])
        return result


def count_params(model: nn.Module) -> int:
    """Number of parameters, shared ones once.

    Example:
        >>> import timm
        >>> count_params(timm.create_model("resnet50"))
        25557032
    """
    return sum(parameter.numel() for parameter in model.parameters())


KINDS = (
    CostKind(
        "macs",
        "MACs",
        "MACs",
        make=lambda model, groups, table: macs_cost(groups),
        parse=parse_count,
        count=count_macs,
        always=True,
    ),
    CostKind(
        "params",
        "parameters",
        "parameters",
        make=lambda model, groups, table: params_cost(groups, model),
        parse=parse_count,
        count=lambda model, input_size: count_params(model),
        always=True,
    ),
)
