"""find_channel_groups: one trace → coupled channel groups, and what is frozen, with why."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from .attributes import holders, is_standard_layer
from .coupling import Coupling, couple
from .errors import KeepError, TraceError
from .labels import Axis, Labels, Use
from .tracing import Trace, copy_with, example_dtype, example_input, inputs_like, named_tensors, on_meta, run_trace


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that each unit of a group owns.

    ``index[u]`` are the indices of unit ``u`` in dim ``dim`` of ``param``. ``role`` is ``"out"`` where a conv or linear
    makes the channels, ``"in"`` where one sums over them, ``""`` elsewhere (norms, biases, gates).
    """

    param: str
    dim: int
    index: Tensor  # LongTensor [size, width]
    role: str = ""


@dataclass(frozen=True)
class ChannelGroup:
    """Units that can be chosen freely against each other, with every slice of every parameter that each owns.

    ResNet-50's ``layer1`` residual stream is one group of 256 units, named after the first layer that makes it;
    ``layer1.0.conv1`` is another, of 64: unit 5 of it owns filter 5 of ``layer1.0.conv1.weight``, entry 5 of each
    vector of ``layer1.0.bn1``, and input channel 5 of ``layer1.0.conv2.weight``.
    """

    name: str
    size: int
    slices: tuple[Slice, ...]
    hidden_slices: tuple[Slice, ...] = ()  # of buffers that are not in the state dict
    crosses_norm: bool = False  # a norm or softmax runs across these channels: zeroed is not the same as removed
    is_stream: bool = False  # a residual stream: several layers add their outputs into these channels

    def __repr__(self):
        return f"ChannelGroup({self.name!r}, size={self.size}, slices={len(self.slices)})"


@dataclass(frozen=True)
class Count:
    """How many indices of an axis are left: ``fixed`` + for each group its kept units × multiplicity."""

    fixed: int
    units: tuple[tuple[int, int], ...]  # (group number, multiplicity)

    def at(self, kept: Sequence[int]) -> int:
        return self.fixed + sum(kept[group] * multiplicity for group, multiplicity in self.units)


@dataclass(frozen=True)
class CostTerm:
    """MACs of one op at given widths: ``constant`` × the product of its counts."""

    module: str
    constant: int
    counts: tuple[Count, ...]

    def at(self, kept: Sequence[int]) -> int:
        result = self.constant
        for count in self.counts:
            result *= count.at(kept)
        return result


@dataclass(frozen=True)
class Attribute:
    """A number in a module that follows the widths."""

    module: str
    path: str
    constant: int
    counts: tuple[Count, ...]

    def at(self, kept: Sequence[int]) -> int:
        result = self.constant
        for count in self.counts:
            result *= count.at(kept)
        return result


@dataclass(frozen=True)
class ChannelGroups(Sequence):
    """The channel groups of one model.

    Attributes:
        frozen: ``{layer: reason}`` for layers whose output channels can't be removed.
        terms: MACs of each op as a function of the widths.
        attributes: numbers in modules that follow the widths.
        shapes: shape of every tensor of the model, to recognise the model again.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: Mapping[str, str]
    terms: tuple[CostTerm, ...]
    attributes: tuple[Attribute, ...]
    shapes: Mapping[str, tuple[int, ...]]
    input_shape: tuple[int, ...] | None = None
    by_name: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "by_name", {group.name: i for i, group in enumerate(self.groups)})

    def __len__(self):
        return len(self.groups)

    def __getitem__(self, key):
        return self.groups[self.by_name[key] if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[ChannelGroup]:
        return iter(self.groups)

    def __repr__(self):
        return f"ChannelGroups({len(self.groups)} groups, {sum(g.size for g in self)} units, {len(self.frozen)} frozen)"

    @property
    def sizes(self) -> list[int]:
        return [group.size for group in self.groups]

    def macs(self, kept: Sequence[int] | None = None) -> int:
        """MACs at the given number of kept units per group (all by default), batch 1."""
        kept = self.sizes if kept is None else kept
        return sum(term.at(kept) for term in self.terms)

    def check_keep(self, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same choice as sorted LongTensors for every group; a group that is not named keeps all."""
        unknown = [name for name in keep if name not in self.by_name]
        if unknown:
            raise KeepError(
                f"keep names the group {unknown[0]!r}, which is not among the {len(self)} groups of this model"
            )
        result = {}
        for group in self.groups:
            if group.name not in keep:
                result[group.name] = torch.arange(group.size)
                continue
            try:
                index = torch.as_tensor(keep[group.name], device="cpu")
            except (TypeError, ValueError, RuntimeError):
                index = torch.empty(0, 0)  # refused below
            if index.dtype == torch.bool and index.shape == (group.size,):
                index = index.nonzero().flatten()
            if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
                raise KeepError(f"keep[{group.name!r}] must be a list of unit indices, got {keep[group.name]!r:.80}")
            index = torch.unique(index.long())
            if index.numel() == 0:
                raise KeepError(f"keep[{group.name!r}] is empty; at least one of its {group.size} units must stay")
            if int(index[0]) < 0 or int(index[-1]) >= group.size:
                wrong = int(index[0]) if int(index[0]) < 0 else int(index[-1])
                raise KeepError(f"keep[{group.name!r}] holds {wrong}; its units are 0 to {group.size - 1}")
            result[group.name] = index
        return result


def find_channel_groups(model: nn.Module, example_inputs=None, *, verify: bool = True) -> ChannelGroups:
    """Find which channels of a model must be removed together, and which can't be removed.

    The model itself is not touched and not run: a copy runs once on the meta device, whatever its size.

    Args:
        example_inputs: a tensor (or tuple of them) the model can be called with; by default one image of the size in
            the model's timm config. Only shapes matter.
        verify: dry-run the model with units removed from every group; a group that fails is frozen.

    Example:
        >>> import timm
        >>> groups = find_channel_groups(timm.create_model("resnet18"))
        >>> groups["layer1.0.conv1"].size
        64
        >>> groups.frozen["fc"]
        "the model's output"
    """
    devices = {str(tensor.device) for _, tensor in named_tensors(model)}
    if len(devices) > 1:
        raise TraceError(
            f"the model is spread over {', '.join(sorted(devices))}; move it to one device first: model.to(…)"
        )
    if example_inputs is None:
        example_inputs = torch.empty(example_input(model), device="meta", dtype=example_dtype(model))
    shadow, inputs, trace = _shadow(model, example_inputs)
    groups = groups_of(model, shadow, trace, inputs)
    if not verify:
        return groups
    from .dry_run import verified

    return verified(groups, model, shadow, inputs, trace)


def _shadow(model: nn.Module, example_inputs) -> tuple[nn.Module, tuple, Trace]:
    """A copy to run in the model's place: on the meta device, or with real tensors where the model asks for values."""
    try:
        shadow = on_meta(model)
        inputs = inputs_like(example_inputs, "meta")
        return shadow, inputs, run_trace(shadow, inputs)
    except Exception as error:
        if isinstance(error, TraceError):
            raise
        on_meta_error = error
    try:
        device = next((tensor.device for _, tensor in named_tensors(model)), torch.device("cpu"))
        device = torch.device("cpu") if device.type == "meta" else device
        shadow = copy_with(model, lambda _, t: torch.zeros_like(t, device=device) if t.is_meta else t).eval()
        inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        inputs = tuple(torch.zeros_like(x, device=device) if x.is_meta else x.to(device) for x in inputs)
        return shadow, inputs, run_trace(shadow, inputs)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} can't be run on {_shapes(inputs_like(example_inputs, 'meta'))}: "
            f"{first_line(error)} (on the meta device: {first_line(on_meta_error)})"
        ) from error


def first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]


def _shapes(inputs) -> str:
    return ", ".join(str(list(x.shape)) for x in inputs if isinstance(x, Tensor))


# ---- from the trace to groups -----------------------------------------------------------------------------------


class _Columns:
    """Runs of labels that matter: parameter dims, axes that cost MACs, axes that attributes count."""

    def __init__(self):
        self.labels: list[np.ndarray] = []
        self._numbers: dict[int, int] = {}

    def number(self, labels: np.ndarray) -> int:
        key = id(labels)
        if key not in self._numbers:
            self._numbers[key] = len(self.labels)
            self.labels.append(labels)
        return self._numbers[key]


def groups_of(model: nn.Module, shadow: nn.Module, trace: Trace, inputs: tuple) -> ChannelGroups:
    labels = trace.labels
    coupling = couple(labels)
    tensors = dict(named_tensors(shadow))
    columns = _Columns()
    owners = []
    for (name, dim), first in trace.param_labels.items():
        owners.append((name, dim))
        columns.number(np.arange(first, first + tensors[name].shape[dim]))
    terms = [(term, [columns.number(a) for a in term.axes]) for term in labels.terms]
    uses = list(labels.uses) + list(_own_parameter_uses(shadow, trace, columns, owners))
    bound = _bindings(shadow, uses, columns, coupling)

    # An entry is one label in one column; a unit's signature is how often it stands in which column.
    sizes = np.array([column.size for column in columns.labels])
    flat = np.concatenate(columns.labels)
    column_of = np.repeat(np.arange(sizes.size), sizes)
    index_of = np.arange(flat.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    component = coupling.component[flat]
    reached = np.array([name in trace.reached for name, _ in owners] + [True] * (sizes.size - len(owners)))
    dead = coupling.frozen.copy()
    touched = np.zeros(dead.size, dtype=bool)
    makers = np.zeros(dead.size, dtype=bool)
    for array in labels.producers:
        makers[coupling.component[array]] = True
    touched[component[column_of < len(owners)]] = True
    free = ~dead & touched & makers
    # What the forward pass never reached shares no channels that we can see: leave it alone.
    free[np.unique(component[~reached[column_of]])] = False
    use = free[component]
    component, column_of, index_of = component[use], column_of[use], index_of[use]

    weights = np.random.default_rng(0).integers(1, 2**63, size=sizes.size, dtype=np.uint64)
    signature = np.zeros(dead.size, dtype=np.uint64)
    np.add.at(signature, component, weights[column_of])
    units = np.unique(component)
    _, group_of_unit = np.unique(signature[units], return_inverse=True)
    group_of = np.full(dead.size, -1)
    group_of[units] = group_of_unit

    parts = _parts(component, column_of, index_of, group_of)
    roles = _roles(trace, labels, owners)
    mixed = set(group_of[coupling.mixed].tolist())
    added = set().union(*(group_of[coupling.component[array]].tolist() for array in labels.added))
    groups, number_of = _name_groups(model, parts, owners, roles, mixed, added)
    counts = _counts(columns, parts, number_of)
    return ChannelGroups(
        groups=groups,
        frozen=_frozen_layers(tensors, trace, labels, coupling, roles, owners),
        terms=tuple(fold(CostTerm, (t.module,), t.constant, [counts[c] for c in cols]) for t, cols in terms),
        attributes=tuple(_attributes(bound, counts)),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        input_shape=tuple(inputs[0].shape) if inputs and isinstance(inputs[0], Tensor) else None,
    )


def fold(kind, key, constant, counts):
    """Counts that no group can change are part of the constant."""
    for count in counts:
        constant *= 1 if count.units else count.fixed
    return kind(*key, constant, tuple(count for count in counts if count.units))


def _parts(component, column_of, index_of, group_of) -> dict[tuple[int, int], np.ndarray]:
    """(group, column) → indices [units, width], units in the order of their component."""
    result = {}
    if component.size == 0:
        return result
    group = group_of[component]
    order = np.lexsort((index_of, component, column_of, group))
    group, column_of, index_of, component = (a[order] for a in (group, column_of, index_of, component))
    starts = np.flatnonzero(np.r_[True, (np.diff(group) != 0) | (np.diff(column_of) != 0)])
    for start, stop in zip(starts, [*starts[1:], group.size], strict=True):
        units = np.unique(component[start:stop]).size
        result[int(group[start]), int(column_of[start])] = index_of[start:stop].reshape(units, -1)
    return result


def _roles(trace: Trace, labels: Labels, owners) -> dict[tuple[str, int], str]:
    starts = np.array([trace.param_labels[owner] for owner in owners])
    result = {}
    for role, arrays in (("in", labels.consumers), ("out", labels.producers)):
        for array in arrays:
            position = int(np.searchsorted(starts, array[0], side="right")) - 1
            if position >= 0:
                result[owners[position]] = role
    return result


def _name_groups(model, parts, owners, roles, mixed: set[int], added: set[int]):
    """Groups in the order of the layers that make them, named after the first."""
    in_state = {name: tensor.shape for name, tensor in model.state_dict().items()}
    by_group = defaultdict(list)
    for (group, column), index in parts.items():
        if column < len(owners):
            by_group[group].append((column, index))
    order = []
    for group, members in by_group.items():
        made_by = [column for column, _ in members if roles.get(owners[column]) == "out"]
        order.append((min(made_by), group))
    order.sort()
    groups, number_of, taken = [], {}, {}
    for first, group in order:
        members = sorted(by_group[group])
        base = owners[first][0].rsplit(".", 1)[0] if "." in owners[first][0] else owners[first][0]
        taken[base] = taken.get(base, 0) + 1
        slices = [
            Slice(owners[c][0], owners[c][1], torch.from_numpy(index.astype(np.int64)), roles.get(owners[c], ""))
            for c, index in members
        ]
        number_of[group] = len(groups)
        groups.append(
            ChannelGroup(
                name=base if taken[base] == 1 else f"{base}#{taken[base]}",
                size=len(slices[0].index),
                slices=tuple(s for s in slices if s.param in in_state),
                hidden_slices=tuple(s for s in slices if s.param not in in_state),
                crosses_norm=group in mixed,
                is_stream=group in added and sum(_makes_channels(s, in_state) for s in slices) > 1,
            )
        )
    return tuple(groups), number_of


def _makes_channels(part: Slice, shapes) -> bool:
    """Whether a layer makes these channels of others; a depthwise conv only passes them on."""
    shape = shapes.get(part.param, ())
    return part.role == "out" and len(shape) > 1 and not (len(shape) == 4 and shape[1] == 1)


def _counts(columns: _Columns, parts, number_of) -> list[Count]:
    units = defaultdict(list)
    for (group, column), index in parts.items():
        if group in number_of:
            units[column].append((number_of[group], index.shape[1], index.size))
    return [
        Count(labels.size - sum(n for *_, n in units[c]), tuple((g, width) for g, width, _ in units[c]))
        for c, labels in enumerate(columns.labels)
    ]


def _frozen_layers(tensors, trace, labels, coupling, roles, owners) -> dict[str, str]:
    result = {}
    for name, dim in owners:
        if roles.get((name, dim)) == "out":
            first = trace.param_labels[name, dim]
            components = coupling.component[first : first + tensors[name].shape[dim]]
            frozen = [c for c in components.tolist() if coupling.frozen[c]]
            if frozen:
                layer = name.rsplit(".", 1)[0] if "." in name else name
                result.setdefault(layer, coupling.reason[frozen[0]])
    for name in tensors:
        if name not in trace.reached and tensors[name].dim() > 1:
            result.setdefault(name, "the forward pass does not use it")
    return result


# ---- attributes that follow ---------------------------------------------------------------------------------------


def _own_parameter_uses(shadow, trace, columns, owners):
    """A module's numbers may also be the sizes of its own parameters, or a head's of its classifier."""
    number = {owner: i for i, owner in enumerate(owners)}
    for module_name, module in shadow.named_modules():
        if is_standard_layer(module):
            continue
        for name, tensor in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            for dim, size in enumerate(tensor.shape):
                if (full, dim) in number and size > 1:
                    yield Use(module_name, size, (Axis(size, columns.labels[number[full, dim]]),))
        for child_name, child in module.named_children():
            full = f"{module_name}.{child_name}.weight" if module_name else f"{child_name}.weight"
            if isinstance(child, (nn.Linear, nn.Conv2d)) and (full, 1) in number:
                axis = Axis(child.weight.shape[1], columns.labels[number[full, 1]])
                yield Use(module_name, axis.size, (axis,), ("in_features", "num_features"))


def _bindings(shadow, uses, columns, coupling: Coupling) -> dict[tuple[str, str], list[tuple[int, list[int]]]]:
    """(module, attribute) → what it may count, the surest first."""
    modules = dict(shadow.named_modules())
    found = defaultdict(list)
    for use in sorted(uses, key=lambda use: not use.names):  # a use that names its attribute is surer
        module = modules[use.module]
        if not use.names and is_standard_layer(module):
            continue
        constant = 1
        numbers = []
        for axis in use.axes:
            if axis.labels is None:
                constant *= axis.size
            else:
                numbers.append(columns.number(axis.labels))
        dotted = [name for name in use.names if "." in name]
        first = use.axes[0].labels
        heads = len(use.axes) == 1 and first is not None and bool(coupling.heads[coupling.component[first[0]]])
        for path in dotted or holders(module, use.size, use.names, heads):
            found[use.module, path].append((constant, numbers))
    return found


def _attributes(bound, counts) -> Iterator[Attribute]:
    for key, candidates in bound.items():
        folded = (fold(Attribute, key, constant, [counts[c] for c in cols]) for constant, cols in candidates)
        attribute = next((a for a in folded if a.counts), None)  # a count that can't change explains nothing
        if attribute is not None:
            yield attribute
