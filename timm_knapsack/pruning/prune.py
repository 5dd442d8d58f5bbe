"""prune(): scores and a budget in, a smaller ordinary model out."""

import fnmatch
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..channels.find_groups import find_channel_groups
from ..costs.counted import Cost, count_macs, count_params, macs_cost, params_cost
from ..costs.latency.cost import TimeLine
from ..errors import BudgetError, KnapsackError
from ..slim.channel_config import ChannelConfig, model_name
from ..slim.channel_groups import ChannelGroup, ChannelGroups
from ..slim.cutting import channel_config_of, kept_indices, kept_outputs, slice_model
from ..slim.kept_channels import composed
from ..values.taylor import check_scores, taylor_scores
from .budget import Budget
from .width_search import WidthSolution, ladder, search_widths

MAX_CORRECTIONS = 4
MISS = (0.975, 1.015)  # measured ÷ asked that needs no correction
PREDICTION_ERROR = 0.015  # of the time at widths near those that were measured, one standard deviation


@dataclass(frozen=True)
class CostLine:
    """One cost, before and after. ``counted`` is read off the real slim network, ``measured`` (time) on a device."""

    name: str
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
    corrections: int = 0  # times that a latency budget was measured, missed, and solved again
    times: tuple[TimeLine, ...] = ()  # with a latency budget: seconds layer by layer, predicted and measured
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


def prune(
    model: nn.Module,
    loader: Iterable | None = None,
    *,
    scores: Mapping[str, Tensor] | None = None,
    budget: Budget,
    round_to: int = 1,
    min_keep: float = 1,
    ignore: Sequence[str] = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
    groups: ChannelGroups | None = None,
    example_inputs=None,
    base_args: Mapping[str, Any] | None = None,
    **scoring,
) -> PruneResult:
    """Prune a model to a budget; the model itself is left untouched.

    Args:
        loader: images and labels to score the channels with, unless ``scores`` are given.
        scores: from `taylor_scores`; one scoring pass serves any number of budgets.
        budget: ``Budget(macs=0.5)``.
        round_to: keep multiples of this many channels, as some hardware likes.
        min_keep: least number of units to keep in each group, or a fraction below 1 of its size.
        ignore: patterns (``"layer4.*"``) of groups or layers to leave alone; ``":streams"`` stands for all residual
            streams, which are worth their MACs mostly where fine-tuning follows.
        bounds: ``{pattern: (least, most)}`` for single groups, as counts or fractions.
        groups: from `find_channel_groups`, to save tracing again.
        base_args: arguments of ``timm.create_model`` that the model was made with (``img_size=…``), for the config.
        scoring: passed to `taylor_scores`.

    Example:
        >>> result = prune(model, loader, budget=Budget(macs=0.5))
        >>> print(result.report)
        >>> smaller = result.model
    """
    if not isinstance(budget, Budget):
        raise BudgetError(f"budget must be a Budget, such as Budget(macs=0.5), got {budget!r}")
    if groups is None:
        groups = find_channel_groups(model, example_inputs)
    if scores is None:
        scores = taylor_scores(model, groups, loader, **scoring)
    return sweep(
        model,
        scores,
        [budget],
        round_to=round_to,
        min_keep=min_keep,
        ignore=ignore,
        bounds=bounds,
        groups=groups,
        base_args=base_args,
    )[0]


def sweep(
    model: nn.Module,
    scores: Mapping[str, Tensor],
    budgets: Sequence[Budget],
    *,
    round_to: int = 1,
    min_keep: float = 1,
    ignore: Sequence[str] = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
    groups: ChannelGroups | None = None,
    base_args: Mapping[str, Any] | None = None,
) -> list[PruneResult]:
    """A whole family of pruned models from one scoring pass: one result for each budget.

    Example:
        >>> results = sweep(model, scores, [Budget(macs=f) for f in (0.7, 0.5, 0.3)])
    """
    if groups is None:
        groups = find_channel_groups(model)
    values = check_scores(scores, groups)
    if not len(groups):
        why = "; ".join(f"{name}: {reason}" for name, reason in list(groups.frozen.items())[:3])
        raise BudgetError(f"{model_name(model)} has no channels that can be removed: {why}")
    limits_of = _Limits(groups, round_to, min_keep, ignore, bounds or {})
    return [_prune_once(model, groups, values, scores, limits_of, budget, base_args) for budget in budgets]


def _prune_once(model, groups, values, scores, limits_of, budget, base_args) -> PruneResult:
    start = time.perf_counter()
    costs = _costs(model, groups, budget)
    limits = budget.limits({cost.name: cost.at(groups.sizes) for cost in costs})
    ladders = []
    for number, group in enumerate(groups):
        step = math.lcm(limits_of.step(group), *(int(cost.steps[number]) for cost in costs if cost.steps is not None))
        ladders.append(ladder(values[group.name].numpy(), *limits_of.range(group, step), step))
    choices = _choices(model, groups, values, ladders, costs, limits, isinstance(budget.latency, str))
    choice = choices[0]
    solution, keep, slim = choice.solution, choice.keep, choice.slim
    config = _config(model, groups, keep, base_args)
    slim.channel_config = config
    report = PruneReport(
        model=model_name(model),
        input_size=tuple(groups.input_shape[1:]),
        costs=tuple(_lines(model, groups, costs, limits, choice)),
        layers=tuple(_layers(groups, keep)),
        value=solution.value,
        total_value=float(sum(v.sum() for v in values.values())),
        upper_bound=solution.upper_bound,
        rounds=solution.rounds,
        corrections=len(choices) - 1,
        times=_times(model, groups, costs, choice),
        seconds=time.perf_counter() - start,
        scores={key: getattr(scores, key) for key in ("criterion", "data", "samples") if hasattr(scores, key)},
        frozen=dict(groups.frozen),
        options={**limits_of.options, "budget": dict(budget.asked)},
    )
    return PruneResult(slim, keep, config, report, kept_outputs(groups, keep))


@dataclass(frozen=True)
class _Choice:
    """Widths that were solved for and cut, and what they take on the device if that was asked."""

    solution: WidthSolution
    keep: dict[str, Tensor]
    slim: nn.Module
    comparison: Any = None
    predicted: float = 1.0  # ÷ asked
    bias: float = 0.0  # log(measured ÷ predicted)

    def miss(self, all_choices: "Sequence[_Choice]") -> float:
        """Measured ÷ asked, as far as all that was measured tells: where noise is large, the others count too."""
        return self.predicted * math.exp(_bias(all_choices, self))

    def badness(self, all_choices: "Sequence[_Choice]") -> float:
        """How far from the budget; a result that is too slow counts double."""
        miss = math.log(self.miss(all_choices))
        return abs(miss) * (2 if miss > 0 else 1)


def _bias(choices: Sequence[_Choice], own: _Choice | None) -> float:
    """What to multiply predictions with, as a logarithm: each measurement counts by how sure it is.

    A measurement of other widths is at best as sure as the prediction that links them.
    """
    weights = []
    for choice in choices:
        noise = choice.comparison.uncertainty[1] / 1.96
        weights.append(1 / (noise**2 + (0 if choice is own else PREDICTION_ERROR**2) + 1e-12))
    return float(np.average([choice.bias for choice in choices], weights=weights))


def _choices(model, groups, values, ladders, costs, limits, absolute: bool) -> list[_Choice]:
    """Solve; where time is asked for, measure the result, correct what the search aims at, and solve again.

    The best choice comes first.
    """
    timed = next((cost for cost in costs if cost.name == "latency"), None)
    aim = dict(limits)
    choices: list[_Choice] = []
    while len(choices) <= MAX_CORRECTIONS:
        solution = search_widths(ladders, costs, aim)
        if solution is None:
            if not choices:
                raise _unreachable(model, groups, ladders, costs, limits)
            break
        keep = {}
        for group, count in zip(groups, solution.counts, strict=True):
            best = np.argsort(-values[group.name].numpy(), kind="stable")[:count]
            keep[group.name] = torch.from_numpy(np.sort(best).astype(np.int64))
        slim = slice_model(model, groups, keep)
        comparison = timed.compare(model, slim) if timed is not None else None
        if comparison is None:
            return [_Choice(solution, keep, slim)]
        predicted = timed.at(solution.counts)
        measured = comparison.latencies[1].median if absolute else comparison.ratios[1] * timed.at(groups.sizes)
        bias = math.log(measured / predicted)
        choices.append(_Choice(solution, keep, slim, comparison, predicted / limits[timed.name], bias))
        miss = choices[-1].miss(choices)
        idle = predicted < aim[timed.name] * 0.97  # another budget, or nothing left to keep, decides
        if MISS[0] <= miss <= MISS[1] or (miss < 1 and idle):
            break
        aim[timed.name] = limits[timed.name] / math.exp(_bias(choices, None))
    return sorted(choices, key=lambda choice: choice.badness(choices))


class _Limits:
    """How many units of each group may stay."""

    def __init__(self, groups, round_to, min_keep, ignore, bounds):
        if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
            raise KnapsackError(f"round_to={round_to!r}: expected a whole number of channels, such as 8")
        if isinstance(min_keep, bool) or not isinstance(min_keep, (int, float)) or not min_keep > 0:
            raise KnapsackError(f"min_keep={min_keep!r}: expected a count from 1, or a fraction between 0 and 1")
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        for pattern in (*ignore, *bounds):
            if pattern != STREAMS and not any(_matches(group, pattern) for group in groups):
                raise KnapsackError(f"the pattern {pattern!r} matches no group; names are like {groups[0].name!r}")
        self.round_to, self.min_keep, self.ignore, self.bounds = round_to, min_keep, ignore, bounds
        self.options = {"round_to": round_to, "min_keep": min_keep, "ignore": list(ignore), "bounds": dict(bounds)}

    def range(self, group: ChannelGroup, step: int) -> tuple[int, int]:
        if any(_matches(group, pattern) for pattern in self.ignore):
            return group.size, group.size
        least, most = _count(self.min_keep, group.size), group.size
        if group.crosses_norm:  # a norm over a single channel leaves nothing of it
            least = max(least, min(2, group.size))
        for pattern, (low, high) in self.bounds.items():
            if _matches(group, pattern):
                least, most = _count(low, group.size), _count(high, group.size)
                if least > most:
                    raise KnapsackError(f"bounds[{pattern!r}]: {low} is more than {high}")
        return min(-(-least // step) * step, group.size), most

    def step(self, group: ChannelGroup) -> int:
        """Units in a bundle of ``round_to`` channels."""
        width = next(s.index.shape[1] for s in group.slices if s.role == "out")
        return self.round_to // int(np.gcd(self.round_to, width))


def _count(value: float, size: int) -> int:
    count = int(np.ceil(value * size)) if isinstance(value, float) and value <= 1 else int(value)
    return min(max(count, 1), size)


STREAMS = ":streams"  # no layer's name has a colon


def _matches(group: ChannelGroup, pattern: str) -> bool:
    if pattern == STREAMS:
        return group.is_stream
    names = {group.name, *(s.param.rsplit(".", 1)[0] for s in group.slices if s.role == "out")}
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _costs(model: nn.Module, groups: ChannelGroups, budget: Budget) -> list[Cost]:
    costs = []
    if budget.macs is not None:
        costs.append(macs_cost(groups))
    if budget.params is not None:
        costs.append(params_cost(groups, model))
    if budget.latency is not None:
        costs.append(budget.table.cost(model, groups))
    return costs


def _unreachable(model, groups, ladders, costs, limits) -> BudgetError:
    least = [rung.counts[0] for rung in ladders]
    cost = next(cost for cost in costs if cost.at(least) > limits[cost.name])
    frozen = "; ".join(f"{name} ({reason})" for name, reason in list(groups.frozen.items())[:4])
    return BudgetError(
        f"{model_name(model)} can't be pruned to {limits[cost.name]:.6g} {cost.unit}: the smallest reachable is "
        f"{cost.at(least):.6g} of {cost.at(groups.sizes):.6g}. Frozen: {frozen or 'nothing'}. Ask for more, or relax "
        "min_keep, round_to, bounds and ignore"
    )


def _lines(model, groups, costs, limits, choice: _Choice):
    size = tuple(groups.input_shape[1:])
    slim, counts, measured = choice.slim, choice.solution.counts, choice.comparison
    yield CostLine("macs", "MACs", count_macs(model, size), limits.get("macs"), count_macs(slim, size))
    yield CostLine("params", "parameters", count_params(model), limits.get("params"), count_params(slim))
    for cost in costs:
        if cost.name not in ("macs", "params"):
            times = [latency.median for latency in measured.latencies] if measured else [None, None]
            yield CostLine(cost.name, cost.unit, cost.at(groups.sizes), limits[cost.name], cost.at(counts), *times)


def _times(model, groups, costs, choice: _Choice) -> tuple[TimeLine, ...]:
    timed = next((cost for cost in costs if cost.name == "latency"), None)
    return timed.layer_lines(model, choice.slim, groups.sizes, choice.solution.counts) if timed is not None else ()


def _layers(groups: ChannelGroups, keep: Mapping[str, Tensor]):
    outputs: dict[tuple[str, int], int] = {}
    for group in groups:
        for s in group.slices:
            if s.role == "out":
                outputs[s.param, s.dim] = groups.shapes[s.param][s.dim]
    kept = kept_indices(groups, keep)
    for (param, dim), size in outputs.items():
        index = kept.get(param, {}).get(dim)
        yield LayerLine(param.rsplit(".", 1)[0], size, size if index is None else len(index))


def _config(model: nn.Module, groups: ChannelGroups, keep, base_args) -> ChannelConfig:
    """The config from the original base, also when the model had been pruned before."""
    earlier = getattr(model, "channel_config", None)
    if not isinstance(earlier, ChannelConfig):
        return channel_config_of(groups, keep, model_name(model), base_args)
    new = channel_config_of(groups, keep, earlier.base, earlier.base_args)

    def merged(old, new):
        return {name: {**old.get(name, {}), **new.get(name, {})} for name in {*old, *new}}

    return ChannelConfig(
        earlier.base,
        merged(earlier.widths, new.widths),
        merged(earlier.attributes, new.attributes),
        earlier.base_args,
        kept=composed(earlier, new.kept),
    )
