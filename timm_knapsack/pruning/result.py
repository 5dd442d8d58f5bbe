"""What pruning gives back: the slim model, and a report of what was asked, what came out and how good it is."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from ..costs.cost import LayerCost
from ..human_numbers import COST_COLUMNS, cost_text, human
from ..human_tables import html_table
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
class LossLine:
    """What the network lost, measured on images after the cut (and after recovery, where there was one).

    Attributes:
        kind: "KL divergence" from the original's outputs in nats, or "squared error" where there are no class scores.
        images: that it was measured on; they were used for recovery too, so the figures are a little too good.
        recovered: whether the network was refitted before.
        agreement: share of the images on which original and slim network see the same class.
        top1_before, top1_after: accuracy in percent, where the images have labels.
    """

    kind: str
    measured: float
    images: int
    recovered: bool
    agreement: float | None = None
    top1_before: float | None = None
    top1_after: float | None = None

    MOST_IMAGES: ClassVar[int] = 512  # that are compared, of all that were given

    @property
    def collapsed(self) -> bool:
        """More than half of what the original sees is gone."""
        if self.top1_before is not None:
            return self.top1_after < 0.5 * self.top1_before
        return self.agreement < 0.5 if self.agreement is not None else self.measured > 0.5

    def __str__(self):
        images = f"the {'first ' * (self.images == self.MOST_IMAGES)}{self.images} images given"
        if self.top1_before is not None:
            return f"top-1 {self.top1_after:.1f} % (original {self.top1_before:.1f} %) on {images}"
        if self.agreement is not None:
            return f"the same class as the original on {self.agreement:.1%} of {images}"
        return f"{self.kind} {self.measured:.4g} on {images}"


@dataclass(frozen=True)
class PruneReport:
    """What was asked for, what came out, and how good the choice is."""

    model: str
    input_size: tuple[int, ...]
    costs: tuple[CostLine, ...]
    layers: tuple[LayerLine, ...]
    value: float  # importance kept; with value curves, minus a power of the predicted loss
    total_value: float  # importance of the whole network
    upper_bound: float  # what the knapsack could have kept at most, at the final widths' costs
    rounds: int
    seconds: float
    corrections: int = 0  # times that a network was measured, missed the budget, and was solved for again
    layer_costs: dict[str, tuple[LayerCost, ...]] = field(default_factory=dict)  # {cost: layer by layer} where it tells
    predicted_loss: float | None = None  # with value curves: what the groups' losses come to, on the trials' scale
    loss_gap: float | None = None  # no other choice can be predicted to lose less by more than this: it is proven
    group_losses: dict[str, float] = field(default_factory=dict)  # of each group alone, the largest first
    loss_with_more: float | None = None  # predicted, had one more percent of the original's cost been allowed
    trials: dict[str, float] = field(default_factory=dict)  # {power of the groups' losses: what was lost by it}
    blocks: tuple[str, ...] = ()  # residual branches that are gone as a whole
    block_losses: dict[str, float] = field(default_factory=dict)  # of each branch that could go, alone, not refitted
    block_trials: dict[str, float] = field(default_factory=dict)  # {number of branches removed: what was lost by it}
    steps: int = 1  # with value curves: how often they were measured on the way
    loss: LossLine | None = None  # what was lost in fact, where images were given
    scores: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    verified: str = "none"  # how each group was tried, and the chosen widths with it: by "values", "shapes" or "none"
    verified_note: str = ""  # why not by values, or for which groups not
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def line(self, name: str) -> CostLine:
        """The cost of that name."""
        return next(line for line in self.costs if line.name == name)

    def __str__(self):
        rows = [f"{'cost':<12}{'original':>10}{'asked':>10}{'counted':>10}{'left':>8}"]
        for c in self.costs:
            name, original, asked, counted, left, _ = cost_text(asdict(c))
            asked = "" if c.asked is None else asked
            rows.append(f"{name:<12}{original:>10}{asked:>10}{counted:>10}{left:>8}")
            if c.measured is not None:
                original, measured = human(c.original_measured, c.unit), human(c.measured, c.unit)
                left = c.measured / c.original_measured
                rows.append(f"{'  measured':<12}{original:>10}{'':>10}{measured:>10}{left:>8.1%}")
        rows.append(self.outcome)
        if self.blocks:
            rows.append(f"blocks removed: {', '.join(self.blocks)}")
        if self.verified != "values" or self.verified_note:
            rows.append(f"verified by {self.verified}{f' ({self.verified_note})' if self.verified_note else ''}")
        return "\n".join(rows)

    def __repr__(self):
        left = ", ".join(f"{c.name} {c.counted / c.original:.1%}" for c in self.costs)
        return f"PruneReport({self.model}: {left} left)"

    def _repr_html_(self) -> str:
        rows = [cost_text(asdict(c)) for c in self.costs]
        return html_table(f"{self.model}, pruned", COST_COLUMNS, rows, self.outcome)

    @property
    def _more(self) -> str:
        if not self.predicted_loss or self.loss_with_more is None:
            return ""
        saved = 1 - self.loss_with_more / self.predicted_loss
        return f"; one more percent of the original's cost would save {saved:.0%} of that"

    @property
    def outcome(self) -> str:
        """What the network lost, in one line."""
        if self.loss is not None:
            predicted = "" if self.predicted_loss is None else f", predicted {self.predicted_loss:.3g}"
            if predicted and self.trials:  # another figure than the one before it: images that were not fitted on
                predicted = f" ({self.predicted_loss:.3g} in its trial: a quick refit, on images and views held out)"
            how = "recovered" if self.loss.recovered else "not recovered"
            return f"{how}: {self.loss}; {self.loss.kind} {self.loss.measured:.3g}{predicted}{self._more}"
        if self.predicted_loss is not None:
            return f"predicted loss: {self.predicted_loss:.3g}; not measured, not recovered"
        return f"importance kept: {self.value / self.total_value if self.total_value else 1:.2%}"


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

    def __repr__(self):
        left = ", ".join(f"{c.name} {c.counted / c.original:.1%}" for c in self.report.costs)
        return f"PruneResult({self.report.model}: {left} left; {self.report.outcome.partition(';')[0]})"

    def _repr_html_(self) -> str:
        layers = [line for line in self.report.layers if line.kept < line.original]
        rows = [[line.name, line.original, line.kept, f"{line.kept / line.original:.0%}"] for line in layers]
        title = f"{len(layers)} of {len(self.report.layers)} layers are thinner"
        return self.report._repr_html_() + html_table(title, ["layer", "original", "kept", "left"], rows)
