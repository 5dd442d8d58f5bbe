"""Values of a network's groups, measured on a copy that has been cut already."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ScoreError
from ..slim.channel_groups import ChannelGroup, ChannelGroups
from .curves import ValueCurves
from .group_values import GroupValues, Ladder

GONE = 1e-3  # what units that are gone already count for, of what they counted for before


class RemainingValues(GroupValues):
    """Curves of a slim network, in the units of the whole network that it was cut from.

    Limits and costs are those of the whole network, so that ``min_keep=0.3`` means the same in every step. Units that
    are gone count for next to nothing: they come back only where there is room for nothing better.

    Args:
        before: the values by which the slim network was chosen.
        curves: of the slim network's groups, which have the names of the whole network's; a group without a curve
            stays as it is.
        keep: ``{group name: units of the whole network that the slim one still has}``.

    Example:
        >>> from timm_knapsack.values.curves import GroupCurve
        >>> whole = GroupCurve(np.array([1, 0, 2]), np.array([9.0, 3, 1, 0]), np.array([1]), np.array([0.2]))
        >>> slim = GroupCurve(np.array([1, 0]), np.array([4.0, 1.0, 0.0]), np.array([1]), np.array([0.1]))
        >>> before, after = ValueCurves({"fc1": whole}), ValueCurves({"fc1": slim})
        >>> rungs = RemainingValues(before, after, {"fc1": np.array([0, 2])}).ladder(ChannelGroup("fc1", 3, ()))
        >>> rungs.counts, rungs.order         # of what is left, unit 0 stays longest; unit 1 is gone
        (array([1, 2, 3]), array([0, 2, 1]))
    """

    def __init__(self, before: GroupValues, curves: ValueCurves, keep: Mapping[str, Tensor]):
        self.before, self.curves, self.keep = before, curves, keep

    def checked(self, groups: ChannelGroups) -> "RemainingValues":
        for group in groups:
            if group.name in self.curves and self.curves[group.name].size != len(self.keep[group.name]):
                raise ScoreError(f"the curves of the slim network do not fit what is left of {group.name!r}")
        return self

    def ladder(self, group: ChannelGroup) -> Ladder:
        before, left = self.before.ladder(group), np.asarray(self.keep[group.name])
        gone = before.order[~np.isin(before.order, left)]
        curve = self.curves.get(group.name)
        if curve is None:  # what is left of it stays
            return Ladder(np.array([len(left)]), np.zeros(1), np.concatenate([left, gone]))
        back = before.value[before.counts >= len(left)]
        value = np.concatenate([-curve.hull(self.curves.power)[1:], GONE * (back[1:] - back[0])])
        return Ladder(np.arange(1, group.size + 1), value, np.concatenate([left[curve.order[::-1]], gone]))

    def loss_of(self, value: float) -> float:
        return self.curves.loss_of(value)

    def joint_loss(self, losses: Iterable[float]) -> float:
        return self.curves.joint_loss(losses)

    @property
    def about(self) -> Mapping[str, Any]:
        return self.curves.about
