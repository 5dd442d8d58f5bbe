"""From a trace to channel groups: units with the same slices are one group, and numbers in modules follow them."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ..slim.attributes import holders, is_standard_layer
from ..slim.channel_groups import Attribute, ChannelGroup, ChannelGroups, CostTerm, Count, MapTerm, Slice, fold
from ..slim.copying import named_tensors
from .coupling import Coupling, couple
from .labels import Axis, Labels, Use
from .tracing import Trace


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
    bound = _bindings(shadow, labels, uses, columns, coupling)

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
        maps=_maps(trace, coupling.component, group_of, number_of, [group.size for group in groups]),
    )


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
        units = np.count_nonzero(np.diff(component[start:stop])) + 1  # they are sorted
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


def _maps(trace: Trace, component, group_of, number_of, sizes) -> tuple[MapTerm, ...] | None:
    """The maps as functions of the widths; None where one holds some units of a group and not others."""
    counts: dict[int, Count | None] = {}
    terms = []
    for (constant, dims), first, last in trace.maps.lives():
        own = []
        for axis in (axis for dim in dims for axis in dim):
            if axis.labels is None:
                constant *= axis.size
                continue
            if id(axis.labels) not in counts:
                counts[id(axis.labels)] = _count_in_axis(component[axis.labels], group_of, number_of, sizes)
            own.append(counts[id(axis.labels)])
        if None in own:
            return None
        terms.append(fold(MapTerm, (first, last), constant, own))
    return tuple(terms)


def _count_in_axis(components: np.ndarray, group_of, number_of, sizes) -> Count | None:
    units, often = np.unique(components, return_counts=True)
    groups = group_of[units]
    fixed, kept = 0, []
    for group in np.unique(groups).tolist():
        members = often[groups == group]
        if group not in number_of:
            fixed += int(members.sum())
        elif len(members) != sizes[number_of[group]] or members.min() != members.max():
            return None
        else:
            kept.append((number_of[group], int(members[0])))
    return Count(fixed, tuple(kept))


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


def _bindings(
    shadow, labels: Labels, uses, columns, coupling: Coupling
) -> dict[tuple[str, str], list[tuple[int, list[int]]]]:
    """(module, attribute) → what it may count, the most certain first."""
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
        for path in dotted or holders(module, use.size, use.names, _counts_heads(use, coupling), use.part):
            found[use.module, path].append((constant, numbers))
    # A number that counts channels alone is not also one of channels and pixels, even where that one would change.
    channels = _channel_components(labels, coupling)
    return {key: _surest(counts, columns, channels, coupling) for key, counts in found.items()}


def _surest(candidates, columns: _Columns, channels: np.ndarray, coupling: Coupling):
    """Of what a number may count: channels alone, or else what has no pixels in it, or else everything."""
    alone = [
        (constant, numbers)
        for constant, numbers in candidates
        if constant == 1 and len(numbers) == 1 and channels[coupling.component[columns.labels[numbers[0]]]].all()
    ]
    return alone or [c for c in candidates if c[0] == 1] or candidates


def _channel_components(labels: Labels, coupling: Coupling) -> np.ndarray:
    """bool [components]: made or summed over by an op with a weight."""
    result = np.zeros(coupling.frozen.size, dtype=bool)
    for array in (*labels.producers, *labels.consumers):
        result[coupling.component[array]] = True
    return result


def _counts_heads(use: Use, coupling: Coupling) -> bool:
    """Whether each index that the number counts is an attention head."""
    labels = use.axes[0].labels if len(use.axes) == 1 else None
    if labels is None:
        return False
    components = coupling.component[labels]
    return bool(coupling.heads[components[0]]) and np.unique(components).size == components.size


def _attributes(bound, counts) -> Iterator[Attribute]:
    for key, candidates in bound.items():
        folded = (fold(Attribute, key, constant, [counts[c] for c in cols]) for constant, cols in candidates)
        attribute = next((a for a in folded if a.counts), None)  # a count that can't change explains nothing
        if attribute is not None:
            yield attribute
