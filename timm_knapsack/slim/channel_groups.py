"""Channel groups: units that are removed together, every slice they own, and what the network costs at any widths."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import KeepError
from ..human_numbers import human
from ..human_tables import html_table


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

    @property
    def makers(self) -> str:
        """The layers that make these channels, in words, the first three by name."""
        names = [s.param.rsplit(".", 1)[0] for s in self.slices if s.role == "out"]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
class MapTerm:
    """A map of the forward pass: alive from op ``first`` to op ``last``, ``constant`` × the product of counts bytes."""

    first: int
    last: int
    constant: int
    counts: tuple[Count, ...]


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
        maps: the maps of the forward pass as functions of the widths; None where they are no such functions.
        verified: how every group was tried: by "values", by "shapes" alone, or "none".
        verified_note: why not by values, or for which groups not.
        basis: what values were compared with, to compare them again at the widths that are chosen; None elsewhere.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: Mapping[str, str]
    terms: tuple[CostTerm, ...]
    attributes: tuple[Attribute, ...]
    shapes: Mapping[str, tuple[int, ...]]
    input_shape: tuple[int, ...] | None = None
    maps: tuple[MapTerm, ...] | None = None
    verified: str = "none"
    verified_note: str = ""
    basis: Any = field(default=None, repr=False, compare=False)
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
        units, frozen = sum(g.size for g in self), len(self.frozen)
        return f"ChannelGroups({len(self.groups)} groups, {units} units, {frozen} frozen, verified: {self.verified})"

    def _repr_html_(self) -> str:
        rows = [[group.name, group.size, group.makers] for group in self]
        frozen = f"frozen: {', '.join(self.frozen)}" if self.frozen else ""
        title = f"{len(self)} channel groups, {human(self.macs())} MACs"
        return html_table(title, ["group", "units", "layers that make it"], rows, frozen[:200])

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


def fold(kind, key, constant, counts):
    """Counts that no group can change are part of the constant."""
    for count in counts:
        constant *= 1 if count.units else count.fixed
    return kind(*key, constant, tuple(count for count in counts if count.units))
