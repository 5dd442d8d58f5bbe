"""Cost: what the pruned network costs as a function of its widths, and how far a prediction was from the device.

A `Cost` answers two questions for a vector of kept units, one number per group: what does the network cost there, and
what would one more unit of each group add. A cost that can be measured also says what to aim at instead, where the
measured network misses the budget.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor, nn


@dataclass(frozen=True)
class Candidate:
    """A network that was solved for and cut.

    Attributes:
        counts: kept units of each group.
        keep: ``{group name: indices of the kept units}``.
        slim: the network itself.
        solution: how the solver came to it.
        measured: ``{cost: (original, slim)}`` where both were measured, in the cost's unit.
        corrections: how often a measurement led to another try.
    """

    counts: Sequence[int]
    keep: Mapping[str, Tensor]
    slim: nn.Module
    solution: Any = None
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    corrections: int = 0


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer: of the original and of the slim network as measured, and as predicted for the slim one."""

    name: str
    original: float
    predicted: float
    measured: float | None = None


class Cost(ABC):
    """A cost of the pruned network, as a function of the kept units of each group.

    Example:
        >>> class Width(Cost):
        ...     '''The number of units that are left.'''
        ...     name, unit = "width", "units"
        ...
        ...     def at(self, kept):
        ...         return float(sum(kept))
        ...
        ...     def marginal(self, kept):
        ...         return np.ones(len(kept))
        >>> Width().at([3, 4])
        7.0
    """

    name: str
    unit: str
    steps: Sequence[int] | None = None  # units of each group that are best kept together, where that matters
    about: Mapping[str, Any] = MappingProxyType({})  # what its numbers depend on besides the network, for reports

    @abstractmethod
    def at(self, kept: Sequence[float]) -> float:
        """The cost at these widths."""

    @abstractmethod
    def marginal(self, kept: Sequence[float]) -> np.ndarray:
        """What one more unit of each group adds at these widths."""

    def settle(
        self,
        solve: Callable[[float], Candidate | None],
        limit: float,
        model: nn.Module,
        whole: float,
        absolute: bool = False,
    ) -> Candidate | None:
        """The network to take: what ``solve`` finds within the limit, unless measuring it tells otherwise.

        Args:
            solve: gives the best network whose cost, as ``at`` says, is at most a number; None if there is none.
            limit: what the budget allows.
            model: the original.
            whole: what the original costs, as ``at`` says.
            absolute: whether the budget was given as a number, and not as a part of the original's cost.
        """
        return solve(limit)

    def shortened(self, removed: Collection[str], left: Sequence[int], sizes: Sequence[int]) -> "Cost | None":
        """The same cost of the network less some of its modules; None where it has to be made of that network anew.

        Args:
            removed: modules that are gone, with all that is inside of them.
            left: for each group of the shorter network, its number among the groups of this one.
            sizes: units of each group of this one; those that are not left no longer change.
        """
        return None

    def layer_costs(
        self, model: nn.Module, slim: nn.Module, sizes: Sequence[int], kept: Sequence[int]
    ) -> tuple[LayerCost, ...]:
        """Layer by layer, where the cost can tell."""
        return ()
