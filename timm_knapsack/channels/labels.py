"""Labels: which index of which tensor dim belongs to which channel.

Every dim of every parameter gets one label per index. Ops carry labels along and tie two labels together where they
meet: what is tied lives and dies together.

A tensor dim is a tuple of **axes**. Usually one axis: a conv's output has ``(Axis(64, labels),)`` as its dim 1. A dim
that a view has merged has several: ``[heads, head_dim] -> heads * head_dim`` gives ``(Axis(3, …), Axis(64, …))``. An
index of the dim goes if any of its axes' labels goes, so what is left is always rectangular. An axis without labels is
a batch, token or pixel axis; a dim of size 1 has no axes at all.

Where a view splits a labelled axis (64 channels into 4 heads of 16), each new axis gets fresh labels, and a **split**
remembers the relation. Which of the new axes carries the channels is decided after the trace, when it is known what
became of each (``coupling`` does it).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np


class Axis:
    """One factor of a tensor dim: its size and one label per index, or None where indices are not channels.

    ``uniform`` marks an axis made by broadcasting or filling: the same value at every index, so any index may go.
    """

    __slots__ = ("labels", "size", "uniform")

    def __init__(self, size: int, labels: np.ndarray | None = None, uniform: bool = False):
        self.size, self.labels, self.uniform = size, labels, uniform

    def __repr__(self):
        return f"Axis({self.size}{'' if self.labels is None else f', from {self.labels[0]}'})"


Dim = tuple  # of Axis


@dataclass(slots=True)
class Layout:
    """The dims of one tensor. ``weight`` is true for parameters and what is computed from parameters alone."""

    dims: list[Dim]
    weight: bool = False


@dataclass(slots=True)
class Split:
    """A flat run of labels seen as a product of axes: ``flat.reshape(sizes)``."""

    flat: np.ndarray
    axes: tuple[Axis, ...]
    place: str
    narrower: bool = False  # of heads and the widths within them, the latter shall carry the channels


@dataclass(slots=True)
class Use:
    """A size that the code of ``module`` passed to an op, and the axes whose kept indices it counts."""

    module: str
    size: int
    axes: Dim
    names: tuple[str, ...] = ()  # attributes that can hold it; any when empty
    part: tuple[int, int] | None = None  # (2, 3): the last of three sizes in one call


@dataclass(slots=True)
class Term:
    """MACs of one op: ``constant`` × the product of the kept indices of each axis."""

    module: str
    constant: int
    axes: tuple[np.ndarray, ...]


@dataclass
class Labels:
    """Everything that a trace learns, in the order in which it learns it."""

    count: int = 0
    only_whole_heads: bool = False
    fewest_heads: int = 1  # heads go one by one where there are at least so many
    narrower_heads: frozenset[str] = frozenset()  # and not in these modules
    place: str = "the input"  # where the trace is now, for reasons: "aten.cat in layer1.0"
    module: str = ""
    # The module whose code is running: another than the one whose forward is, where that calls a method of it.
    code_owner: Callable[[], str] = lambda: ""
    # Sizes that the running module reads off its input or its attributes → the dim that first had that size.
    bound: dict[int, Dim | None] = field(default_factory=dict)
    ties: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    frozen: list[tuple[np.ndarray, str]] = field(default_factory=list)
    mixed: list[np.ndarray] = field(default_factory=list)
    shunned: list[np.ndarray] = field(default_factory=list)  # of these those that shall rather not carry a split
    added: list[np.ndarray] = field(default_factory=list)  # where two activations are added
    heads: list[np.ndarray] = field(default_factory=list)
    whole_heads: list[np.ndarray] = field(default_factory=list)  # heads that may go one by one
    splits: list[Split] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    cuts: list[np.ndarray | None] = field(default_factory=list)  # labels in each part that a slice or split takes
    producers: list[np.ndarray] = field(default_factory=list)
    consumers: list[np.ndarray] = field(default_factory=list)
    _pieces: dict = field(default_factory=dict)  # (id of the labels, sizes) → (labels, axes): cut once, reused
    _wholes: dict = field(default_factory=dict)  # ids of axes → the labels that were cut into them

    def new(self, size: int) -> np.ndarray:
        labels = np.arange(self.count, self.count + size)
        self.count += size
        return labels

    def new_dim(self, size: int, uniform: bool = False) -> Dim:
        return () if size == 1 else (Axis(size, self.new(size), uniform),)

    def freeze(self, axes: Dim, why: str) -> None:
        for axis in axes:
            if axis.labels is not None:
                self.frozen.append((axis.labels, f"{why} ({self.place})"))

    def mix(self, axes: Dim, shun: bool = True) -> None:
        """Values at different indices of these axes are combined by a norm or the like.

        ``shun``: where one of these axes is a part of a dim, the channels shall rather be carried by another part.
        """
        found = [axis.labels for axis in axes if axis.labels is not None]
        self.mixed.extend(found)
        self.shunned.extend(found if shun else ())

    def count_macs(self, dims: list[Dim], constant: int = 1) -> None:
        """What an op costs: every index of its outputs times every index it sums over, times a constant."""
        axes = []
        for axis in (axis for dim in dims for axis in dim):
            if axis.labels is None:
                constant *= axis.size
            else:
                axes.append(axis.labels)
        self.terms.append(Term(self.module, constant, tuple(axes)))

    def make_channels(self, produces: Dim, consumes: Dim) -> None:
        """Which dim of a weight an op turns into channels, and which it sums over."""
        self.producers.extend(axis.labels for axis in produces if axis.labels is not None)
        self.consumers.extend(axis.labels for axis in consumes if axis.labels is not None)

    def use(self, size: int, axes: Dim, *names: str, part: tuple[int, int] | None = None) -> None:
        """The running module passed ``size`` to an op; it must follow ``axes`` when they shrink."""
        if any(axis.labels is not None for axis in axes):
            for module in dict.fromkeys((self.module, self.code_owner() or self.module)):
                self.uses.append(Use(module, int(size), tuple(axes), names, part))
            if size in self.bound and not names:
                first = self.bound[size]
                self.bound[size] = tuple(axes) if first is None else first
                self.tie(tuple(axes), self.bound[size])

    def split(self, axis: Axis, sizes: list[int]) -> list[Axis]:
        """Cut one axis into a product of axes."""
        if axis.labels is None:
            return [Axis(size) for size in sizes]
        key = (id(axis.labels), tuple(sizes))
        if key not in self._pieces:
            self._remember(axis.labels, tuple(Axis(size, self.new(size), axis.uniform) for size in sizes))
        return list(self._pieces[key][1])

    def _remember(self, flat: np.ndarray, axes: tuple[Axis, ...]) -> None:
        self.splits.append(Split(flat, axes, self.place, self.module in self.narrower_heads))
        self._pieces[(id(flat), tuple(axis.size for axis in axes))] = (flat, axes)  # held, so that ids stay theirs
        self._wholes[tuple(id(axis) for axis in axes)] = flat

    def _joined(self, dim: Dim) -> Dim:
        """One axis again, if the dim is exactly what one axis was once cut into."""
        flat = self._wholes.get(tuple(id(axis) for axis in dim)) if len(dim) > 1 else None
        return dim if flat is None else (Axis(flat.size, flat),)

    def flatten(self, dim: Dim) -> np.ndarray | None:
        """One label for each index of the dim, or None where it has no channels."""
        if all(axis.labels is None for axis in dim):
            return None
        dim = self._joined(dim)
        if len(dim) == 1:
            return dim[0].labels
        flat = self.new(size_of(dim))
        self._remember(flat, tuple(Axis(x.size, self._dead(x.size)) if x.labels is None else x for x in dim))
        return flat

    def _dead(self, size: int) -> np.ndarray:
        labels = self.new(size)
        self.frozen.append((labels, f"no channels ({self.place})"))
        return labels

    def tie(self, a: Dim, b: Dim) -> Dim:
        """Two dims of equal size meet index by index; returns the dim that comes out."""
        if not a or not b:
            return a or b  # size 1 broadcasts
        if len(a) == len(b) == 1:
            return (self._tie_axes(a[0], b[0]),)
        aligned = self._align(a, b)
        if aligned is None:
            self.freeze(a, "two ways of splitting channels that do not fit each other meet")
            self.freeze(b, "two ways of splitting channels that do not fit each other meet")
            return (Axis(prod(axis.size for axis in a)),)
        return tuple(self._tie_axes(x, y) for x, y in zip(*aligned, strict=True))

    def _tie_axes(self, x: Axis, y: Axis) -> Axis:
        if x is y or (x.labels is None and y.labels is None):
            return x
        if x.labels is None or y.labels is None:
            labelled, plain = (y, x) if x.labels is None else (x, y)
            self.freeze((labelled,), "meets a dim that holds no channels")
            return plain if labelled.uniform else labelled
        if x.labels is not y.labels:
            self.ties.append((x.labels, y.labels))
        return y if x.uniform else x

    def _align(self, a: Dim, b: Dim) -> tuple[list[Axis], list[Axis]] | None:
        """Cut both dims at each other's boundaries."""
        left, right = [], []
        xs, ys = list(a), list(b)
        while xs and ys:
            x, y = xs[0], ys[0]
            if x.size == y.size:
                left.append(x)
                right.append(y)
                del xs[0], ys[0]
                continue
            longer, other = (xs, ys) if x.size > y.size else (ys, xs)
            sizes, covered = [], 1
            for axis in other:
                if covered == longer[0].size:
                    break
                sizes.append(axis.size)
                covered *= axis.size
            if covered == longer[0].size:
                longer[:1] = self.split(longer[0], sizes)
            elif longer[0].size % other[0].size == 0:
                longer[:1] = self.split(longer[0], [other[0].size, longer[0].size // other[0].size])
            else:
                return None
        return (left, right) if not xs and not ys else None

    def view(self, dims: list[Dim], shape: list[int]) -> list[Dim]:
        """What a reshape makes of the dims: axes are merged into dims or cut into pieces."""
        axes: list[Axis] = []
        for axis in (axis for dim in dims for axis in dim):
            if axes and axis.labels is None and axes[-1].labels is None:
                axes[-1] = Axis(axes[-1].size * axis.size)  # pixels and tokens: any cut will do
            else:
                axes.append(axis)
        pieces: list[list[int]] = [[] for _ in axes]
        plan: list[list[tuple[int, int]]] = []
        at, left = -1, 1
        for size in shape:
            parts, need = [], size
            while need > 1:
                if left == 1:
                    at += 1
                    left = axes[at].size
                if need % left == 0:
                    step = left
                elif left % need == 0:
                    step = need
                else:
                    return self.view([tuple(self._without_labels(axes, at, shape))], shape)
                parts.append((at, len(pieces[at])))
                pieces[at].append(step)
                left //= step
                need //= step
            plan.append(parts)
        cut = [[axis] if len(sizes) <= 1 else self.split(axis, sizes) for axis, sizes in zip(axes, pieces, strict=True)]
        result = [self._joined(_merge_plain([cut[i][j] for i, j in parts])) for parts in plan]
        for dim, size in zip(result, shape, strict=True):
            self.use(size, dim)
        for first, second in pairwise(result):  # heads × (channels // heads)
            if size_of(first) * size_of(second) in self.bound and first and second:
                self.use(size_of(first) * size_of(second), (*first, *second))
        return result

    def _without_labels(self, axes: list[Axis], at: int, shape: list[int]) -> list[Axis]:
        """The axes, with those frozen and merged that a cut across axis ``at`` concerns; no others.

        Old and new dims meet again where the products of their sizes agree: what lies beyond is not touched.
        """
        ends = np.cumprod([axis.size for axis in axes]).tolist()
        common = {1, *ends} & {1, *np.cumprod(shape).tolist()}
        low = max(end for end in common if end <= ends[at] // axes[at].size)
        high = min(end for end in common if end >= ends[at])
        first, last = 0 if low == 1 else ends.index(low) + 1, ends.index(high)
        for axis in axes[first : last + 1]:
            self.freeze((axis,), "a view cuts across channels")
        return [*axes[:first], Axis(high // low), *axes[last + 1 :]]


def _merge_plain(axes: list[Axis]) -> Dim:
    merged: list[Axis] = []
    for axis in axes:
        if merged and axis.labels is None and merged[-1].labels is None:
            merged[-1] = Axis(merged[-1].size * axis.size)
        else:
            merged.append(axis)
    return tuple(merged)


def size_of(dim: Dim) -> int:
    return prod(axis.size for axis in dim)
