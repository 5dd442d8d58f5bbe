"""What pruning gives back: the slim model, and a report of what was asked, what came out and how good it is."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from ..costs.cost import LayerCost
from ..slim.channel_config import ChannelConfig


@dataclass(frozen=True)
class CostLine:
    """One cost, before and after. ``counted`` is read off the real slim network, ``measured`` (time) on a device."""

    name: str
    label: str  # what people call it
    unit: str
    original: float
    asked: float | None
    counted: float
    original_measured: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class LayerLine:
    """Output channels of one conv or linear, before and after."""

    name: str
    original: int
    kept: int


@dataclass(frozen=True)
class PruneReport:
    """What was asked for, what came out, and how good the choice is."""

    model: str
    input_size: tuple[int, ...]
    costs: tuple[CostLine, ...]
    layers: tuple[LayerLine, ...]
    value: float  # importance kept
    total_value: float  # importance of the whole network
    upper_bound: float  # what the knapsack could have kept at most, at the final widths' costs
    rounds: int
    seconds: float
    corrections: int = 0  # times that a network was measured, missed the budget, and was solved for again
    layer_costs: dict[str, tuple[LayerCost, ...]] = field(default_factory=dict)  # {cost: layer by layer} where it tells
    scores: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def line(self, name: str) -> CostLine:
        """The cost of that name."""
        return next(line for line in self.costs if line.name == name)

    def __str__(self):
        rows = [f"{'cost':<10}{'original':>14}{'asked':>14}{'counted':>14}{'left':>9}"]
        for c in self.costs:
            asked = "" if c.asked is None else f"{c.asked:.6g}"
            rows.append(f"{c.name:<10}{c.original:>14.6g}{asked:>14}{c.counted:>14.6g}{c.counted / c.original:>9.1%}")
            if c.measured is not None:
                left = c.measured / c.original_measured
                rows.append(f"{'  measured':<10}{c.original_measured:>14.6g}{'':>14}{c.measured:>14.6g}{left:>9.1%}")
        rows.append(f"importance kept: {self.value / self.total_value if self.total_value else 1:.2%}")
        return "\n".join(rows)


@dataclass(frozen=True)
class PruneResult:
    """A pruned model and how it came about.

    Attributes:
        model: the slim model; an ordinary one, with its weights.
        keep: ``{group name: indices of the kept units}``.
        channel_config: rebuilds the architecture from its base model.
        report: asked, counted, kept importance, per layer.
        kept_channels: ``{layer: indices of its output channels that stay}``, counted in the model that was pruned;
            ``channel_config.kept`` counts in the base, also after a second pruning.
    """

    model: nn.Module
    keep: dict[str, Tensor]
    channel_config: ChannelConfig
    report: PruneReport
    kept_channels: dict[str, Tensor]
