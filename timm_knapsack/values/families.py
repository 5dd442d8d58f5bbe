"""Groups with the same readers are measured together: each could make up for the loss of the other, but not both.

The two padded halves of a CIFAR ResNet's stream are two groups that every block of a stage reads. Cut alone, either is
refitted from the other and looks free; cut together they are not. So their units are eliminated as one group, the loss
is measured with all of them cut, and then shared out by the error that each has caused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..slim.channel_groups import ChannelGroup, ChannelGroups, Slice
from .curves import GroupCurve


@dataclass(frozen=True)
class Family:
    """Groups that are measured as one.

    Attributes:
        group: all their units, one group after the other.
        members: the groups themselves; mostly just one.
    """

    group: ChannelGroup
    members: tuple[ChannelGroup, ...]

    def keep(self, units: Tensor) -> dict[str, Tensor]:
        """Which units of each member stay, given those of the family; each member keeps at least one."""
        result, start = {}, 0
        for member in self.members:
            own = units[(units >= start) & (units < start + member.size)] - start
            result[member.name] = own if len(own) else torch.zeros(1, dtype=torch.long)
            start += member.size
        return result

    def units(self, keep: dict[str, Tensor]) -> Tensor:
        """The family's units that stay, given those of each member."""
        starts = np.cumsum([0, *(member.size for member in self.members)])
        return torch.cat([keep[m.name] + int(start) for m, start in zip(self.members, starts, strict=False)])

    def split(self, curve: GroupCurve) -> dict[str, GroupCurve]:
        """The family's curve, shared out among its members."""
        if len(self.members) == 1:
            return {self.members[0].name: curve}
        steps = np.diff(curve.error[::-1])  # what the removal of each unit adds, in order
        parts, start = {}, 0
        for member in self.members:
            own = (curve.order >= start) & (curve.order < start + member.size)
            error = np.concatenate([[0.0], np.cumsum(steps[own])])[::-1]
            parts[member.name] = curve.order[own] - start, error
            start += member.size
        points: dict[str, dict[int, float]] = {member.name: {} for member in self.members}
        for count, loss in zip(curve.counts, curve.loss, strict=True):
            kept = self.keep(torch.from_numpy(curve.order[curve.size - count :].copy()))
            errors = {name: parts[name][1][len(units)] for name, units in kept.items()}
            total = max(sum(errors.values()), 1e-300)
            for member in self.members:
                if len(kept[member.name]) < member.size:
                    points[member.name][len(kept[member.name])] = float(loss * errors[member.name] / total)
        result = {}
        for member in self.members:
            order, error = parts[member.name]
            found = points[member.name]
            if not found:  # none of its units was among the removed: the family's scale holds for it too
                n, at = max(1, member.size // 2), curve.counts[0]
                found = {n: float(curve.loss[0] * error[n] / max(curve.error[at], 1e-300))}
            counts = np.array(sorted(found))
            result[member.name] = GroupCurve(order, error, counts, np.array([found[n] for n in counts]), curve.note)
        return result


def find_families(groups: ChannelGroups) -> list[Family]:
    """Groups that are read and made in the same places are one family.

    Example:
        >>> import timm_knapsack as tk, timm
        >>> families = find_families(tk.find_channel_groups(timm.create_model("cifar_resnet20")))
        >>> [[member.name for member in family.members] for family in families if len(family.members) > 1]
        [['layer2.0.conv2', 'layer2.0.conv2#2'], ['layer3.0.conv2', 'layer3.0.conv2#2']]
    """
    alike: dict[object, list[ChannelGroup]] = {}
    for group in groups:
        places = tuple((s.param, s.dim, s.role, s.index.shape[1]) for s in group.slices if s.role)
        reads = any(role == "in" for _, _, role, _ in places)
        alike.setdefault((places, group.crosses_norm) if reads else group.name, []).append(group)
    return [_family(members) for members in alike.values()]


def _family(members: Iterable[ChannelGroup]) -> Family:
    members = tuple(members)
    if len(members) == 1:
        return Family(members[0], members)
    first = members[0]
    slices = []
    for parts in zip(*([s for s in member.slices if s.role] for member in members), strict=True):
        slices.append(Slice(parts[0].param, parts[0].dim, torch.cat([part.index for part in parts]), parts[0].role))
    size = sum(member.size for member in members)
    return Family(ChannelGroup(first.name, size, tuple(slices), crosses_norm=first.crosses_norm), members)
