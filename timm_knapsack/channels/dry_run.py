"""Is every group right? Remove units on the meta device, run the model, and look at what happens.

Shapes that do not fit are one way to be wrong; a cut in the wrong place with shapes that happen to fit is another. So
the slim copy is traced with labels of its own, and each tie it makes must join channels that were one unit before; its
MACs must be those that the groups predict. What fails is frozen, with the reason.
"""

import random

import numpy as np
from torch import nn

from ..errors import first_line
from ..slim.attributes import is_standard_layer
from ..slim.channel_groups import Attribute, ChannelGroups, CostTerm, Count, MapTerm, fold
from ..slim.cutting import kept_indices, slice_model
from .coupling import couple
from .grouping import groups_of
from .tracing import Trace, run_trace

MAX_RETRACES = 8
MAX_RUNS = 60  # of the search for the groups that fail; what is left then is frozen together


def verified(groups: ChannelGroups, model: nn.Module, shadow: nn.Module, inputs: tuple, trace: Trace) -> ChannelGroups:
    """The groups that survive the dry run.

    Code that reads a width off its input (``B, N, C = x.shape; … .reshape(B, N, C)``) needs that its inner width stays
    equal to the input's. Where the dry run fails in such a module, its class is traced again with these sizes tied.
    """
    run = _DryRun(groups, shadow, inputs, trace)
    best = run
    bound: frozenset[str] = frozenset()
    error = run.first_failure()
    for _ in range(MAX_RETRACES):
        if error is None:
            break
        culprit = _class_that_failed(shadow, getattr(error, "raised_in", ""))
        if culprit in bound:
            break
        bound |= {culprit}
        trace = run_trace(shadow, inputs, bound)
        run = _DryRun(groups_of(model, shadow, trace, inputs), shadow, inputs, trace)
        error = run.first_failure()
    result = run.surviving(error)
    if run is not best and error is not None:
        first = best.surviving(best.first_failure())
        if first.macs([1] * len(first)) < result.macs([1] * len(result)):
            return first
    return result


def _class_that_failed(model: nn.Module, name: str) -> str:
    """A layer fails because the module around it passed it the wrong shape."""
    modules = dict(model.named_modules())
    while name and is_standard_layer(modules[name]):
        name = name.rpartition(".")[0]
    return type(modules[name]).__name__


class _DryRun:
    def __init__(self, groups: ChannelGroups, shadow: nn.Module, inputs: tuple, trace: Trace):
        self.groups, self.shadow, self.inputs = groups, shadow, inputs
        self.prunable = [i for i, group in enumerate(groups) if group.size > 1]
        # With few units to draw from, widths that must not agree can agree by chance: draw more often.
        few = any(groups[i].size <= 4 for i in self.prunable)
        self.seeds = range(1, 7 if few else 3)
        self._component = couple(trace.labels).component
        self._first_label = trace.param_labels
        self._cuts = trace.labels.cuts
        self._expected = trace.output_shapes

    def first_failure(self) -> Exception | None:
        return next(filter(None, (self.failure(self.prunable, seed) for seed in self.seeds)), None)

    def failure(self, chosen: list[int], seed: int) -> Exception | None:
        """What goes wrong when some units of the chosen groups are removed, another number in each."""
        draw = random.Random(seed)
        keep = {}
        for i in chosen:
            group = self.groups[i]
            # One unit alone can turn a grouped conv into a plain or a depthwise one, with ties that only look wrong.
            least = max(min(2, group.size - 1), group.size // 4)
            most = group.size - 1 if seed <= 2 else group.size
            keep[group.name] = sorted(draw.sample(range(group.size), draw.randint(least, most)))
        try:
            slim = slice_model(self.shadow, self.groups, keep)
            trace = run_trace(slim, self.inputs, follow_maps=False)
        except Exception as error:  # whatever a foreign model raises: the group is left alone and the reason said
            return error
        if trace.output_shapes != self._expected:
            return ValueError(f"the output becomes {trace.output_shapes} instead of {self._expected}")
        return self._wrong_tie(trace, keep) or self._wrong_macs(trace, keep)

    def _wrong_tie(self, trace: Trace, keep) -> Exception | None:
        """A tie between channels that are not one unit in the full model, or a part that holds others than there."""
        kept = kept_indices(self.groups, self.groups.check_keep(keep))
        unit = np.full(trace.labels.count, -1)
        for (name, dim), first in trace.param_labels.items():
            index = kept.get(name, {}).get(dim)
            size = self.groups.shapes[name][dim] if index is None else len(index)
            index = np.arange(size) if index is None else index.numpy()
            unit[first : first + size] = self._component[self._first_label[name, dim] + index]
        for a, b in trace.labels.ties:
            wrong = (unit[a] != unit[b]) & (unit[a] >= 0) & (unit[b] >= 0)
            if wrong.any():
                return ValueError("channels meet that are not one unit in the full model")
        for full, slim in zip(self._cuts, trace.labels.cuts, strict=False):
            if full is not None and slim is not None:
                units = unit[slim][unit[slim] >= 0]
                if not np.isin(units, self._component[full]).all():
                    return ValueError("a cut falls in another place than in the full model")
        return None

    def _wrong_macs(self, trace: Trace, keep) -> Exception | None:
        sizes = [len(keep.get(group.name, range(group.size))) for group in self.groups]
        counted = sum(
            term.constant * int(np.prod([a.size for a in term.axes], dtype=np.int64)) for term in trace.labels.terms
        )
        if counted != self.groups.macs(sizes):
            return ValueError(f"{counted} MACs are left instead of {self.groups.macs(sizes)}")
        return None

    def surviving(self, error: Exception | None) -> ChannelGroups:
        refused: dict[int, str] = {}
        accepted: list[int] = []
        runs = 0

        def add(candidates: list[int], seed: int) -> None:
            nonlocal runs
            runs += 1
            problem = self.failure(accepted + candidates, seed)
            if problem is None:
                accepted.extend(candidates)
            elif len(candidates) == 1 or runs > MAX_RUNS:
                for i in candidates:
                    refused[i] = f"the dry run without some of its channels fails: {first_line(problem)}"
            else:
                middle = len(candidates) // 2
                add(candidates[:middle], seed)
                add(candidates[middle:], seed)

        accepted = list(self.prunable)
        for seed in self.seeds if error is not None else ():
            survivors, accepted = accepted, []
            if survivors:
                add(survivors, seed)
        for i, group in enumerate(self.groups):
            if group.size == 1:
                refused[i] = "a single unit, which must stay"
        return _without(self.groups, refused) if refused else self.groups


def _without(groups: ChannelGroups, refused: dict[int, str]) -> ChannelGroups:
    """The same groups less those that can't be pruned; their widths become constants."""
    sizes = groups.sizes
    number = {old: new for new, old in enumerate(i for i in range(len(groups)) if i not in refused)}

    def narrowed(count: Count) -> Count:
        fixed = count.fixed + sum(sizes[g] * m for g, m in count.units if g in refused)
        return Count(fixed, tuple((number[g], m) for g, m in count.units if g not in refused))

    terms = (fold(CostTerm, (t.module,), t.constant, [narrowed(c) for c in t.counts]) for t in groups.terms)
    attributes = (
        fold(Attribute, (a.module, a.path), a.constant, [narrowed(c) for c in a.counts]) for a in groups.attributes
    )
    maps = groups.maps
    if maps is not None:
        maps = tuple(fold(MapTerm, (m.first, m.last), m.constant, [narrowed(c) for c in m.counts]) for m in maps)
    return ChannelGroups(
        groups=tuple(group for i, group in enumerate(groups) if i not in refused),
        frozen={**groups.frozen, **{groups[i].name: reason for i, reason in refused.items()}},
        terms=tuple(terms),
        attributes=tuple(a for a in attributes if a.counts),
        shapes=groups.shapes,
        input_shape=groups.input_shape,
        maps=maps,
    )
