"""What pruning needs to know about values, whatever they come from.

`Scores` give every unit a number and a group keeps the best; value curves say what the network loses at each width. To
the search over widths both are a ladder: which counts of units a group offers, what each is worth, and who stays.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..slim.channel_groups import ChannelGroup, ChannelGroups


@dataclass(frozen=True)
class Ladder:
    """What one group offers.

    Attributes:
        counts: ascending numbers of units that may stay.
        value: what the group is worth with that many.
        order: all its units, the one to keep longest first; ``order[:n]`` stay where n do.

    Example:
        >>> rungs = Ladder(np.array([1, 2, 3]), np.array([5.0, 8.0, 9.0]), np.array([2, 0, 1]))
        >>> rungs.units(2)                    # units 2 and 0 stay, worth 8
        array([0, 2])
        >>> rungs.only(np.array([1, 3])).value
        array([5., 9.])
    """

    counts: np.ndarray
    value: np.ndarray
    order: np.ndarray

    def units(self, count: int) -> np.ndarray:
        """The units that stay where ``count`` of them do, sorted."""
        return np.sort(self.order[:count])

    def only(self, counts: np.ndarray) -> "Ladder":
        """The same ladder with these of its counts."""
        return Ladder(counts, self.value[np.searchsorted(self.counts, counts)], self.order)


class GroupValues(ABC):
    """Values of all groups of a model: `Scores`, or anything that offers a `Ladder` for each group."""

    @abstractmethod
    def checked(self, groups: ChannelGroups) -> "GroupValues":
        """Itself, fit for use with these groups; raises ScoreError if it belongs to others."""

    @abstractmethod
    def ladder(self, group: ChannelGroup) -> Ladder:
        """What a group offers; its last count is all of its units."""

    def loss_of(self, value: float) -> float | None:
        """What a network loses that is worth so much, groups added up; None where values say nothing about losses."""
        return None

    def joint_loss(self, losses: Iterable[float]) -> float | None:
        """What groups lose together that would lose so much one by one; None where values say nothing about losses."""
        return None

    @property
    def about(self) -> Mapping[str, Any]:
        """Where the values come from, as plain data for reports."""
        return {}
