"""Do the shapes fit when units are removed? On the meta device, where nothing is computed.

Shapes that do not fit are one way to be wrong; a cut in the wrong place with shapes that happen to fit is another. So
the slim copy is traced with labels of its own, and each tie it makes must join channels that were one unit before; each
part that is cut out must hold what is left of that part; its MACs must be those that the groups predict. What a
network calculates is not seen here: see ``value_check``.
"""

import random
from collections.abc import Sequence

import numpy as np
from torch import nn

from ..slim.channel_groups import ChannelGroups
from ..slim.cutting import kept_indices, slice_model
from .coupling import couple
from .tracing import Trace, run_trace


class ShapeCheck:
    """Cuts units out of a model on the meta device and traces what is left."""

    words = "the dry run without some of its channels fails"
    most_runs = 60

    def __init__(self, groups: ChannelGroups, shadow: nn.Module, inputs: tuple, trace: Trace):
        self.groups, self.shadow, self.inputs = groups, shadow, inputs
        # With few units to draw from, widths that must not agree can agree by chance: draw more often.
        few = any(group.size <= 4 for group in groups if group.size > 1)
        self.draws = range(1, 7 if few else 3)
        self._component = couple(trace.labels).component
        self._first_label = trace.param_labels
        self._cuts = trace.labels.cuts
        self._expected = trace.output_shapes

    def failure(self, chosen: Sequence[int], draw: int) -> Exception | None:
        """What goes wrong when some units of the chosen groups are removed, another number in each."""
        choose = random.Random(draw)
        keep = {}
        for i in chosen:
            group = self.groups[i]
            # One unit alone can turn a grouped conv into a plain or a depthwise one, with ties that only look wrong.
            least = max(min(2, group.size - 1), group.size // 4)
            most = group.size - 1 if draw <= 2 else group.size
            keep[group.name] = sorted(choose.sample(range(group.size), choose.randint(least, most)))
        try:
            slim = slice_model(self.shadow, self.groups, keep)
            trace = run_trace(slim, self.inputs, follow_maps=False)
            if trace.output_shapes != self._expected:
                return ValueError(f"the output becomes {trace.output_shapes} instead of {self._expected}")
            return self._wrong_tie(trace, keep) or self._wrong_macs(trace, keep)
        except Exception as error:  # whatever a foreign model raises: the group is left alone and the reason said
            return error

    def _wrong_tie(self, trace: Trace, keep) -> Exception | None:
        """A tie between channels that are not one unit in the full model, or a part that holds others than there."""
        kept = kept_indices(self.groups, self.groups.check_keep(keep))
        unit = np.full(trace.labels.count, -1)
        for (name, dim), first in trace.param_labels.items():
            index = kept.get(name, {}).get(dim)
            full = self._first_label[name, dim]
            own = self._component[full : full + self.groups.shapes[name][dim]]
            own = own if index is None else own[index.numpy()]
            unit[first : first + len(own)] = own
        if trace.labels.ties:
            a, b = (unit[np.concatenate(side)] for side in zip(*trace.labels.ties, strict=True))
            if ((a != b) & (a >= 0) & (b >= 0)).any():
                return ValueError("channels meet that are not one unit in the full model")
        return self._wrong_cut(trace, unit, kept)

    def _wrong_cut(self, trace: Trace, unit: np.ndarray, kept) -> Exception | None:
        """A part that is cut out must hold the same units as in the full model, less those that are gone."""
        gone = np.zeros(self._component.max(initial=0) + 1, dtype=bool)
        for name, dims in kept.items():
            for dim, stays in dims.items():
                removed = np.ones(self.groups.shapes[name][dim], dtype=bool)
                removed[stays.numpy()] = False
                first = self._first_label[name, dim]
                gone[self._component[first : first + removed.size][removed]] = True
        if len(trace.labels.cuts) != len(self._cuts):
            return ValueError(f"channels are cut into {len(trace.labels.cuts)} parts instead of {len(self._cuts)}")
        for full, slim in zip(self._cuts, trace.labels.cuts, strict=True):
            if full is None or slim is None:
                continue
            left = self._component[full]
            left = left[~gone[left]]
            known = unit[slim] >= 0
            if len(left) != len(slim) or (left[known] != unit[slim][known]).any():
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
