"""The report of a choice: what was asked, counted and measured, what each group loses, and what more would buy."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from ..costs.cost import Candidate
from ..costs.kinds import COSTS
from ..slim.channel_config import model_name
from ..slim.channel_groups import ChannelGroups
from ..slim.cutting import kept_indices
from ..slim.wrappers import inputs_of
from ..values.group_values import Ladder
from .one_budget import OneBudget
from .result import CostLine, LayerLine, PruneReport
from .shortening import Shorter
from .width_search import search_widths


def report_of(search: OneBudget, found: Candidate, seconds: float) -> PruneReport:
    """What there is to say about a network that was found; what it lost is measured later."""
    shorter, values, solution = search.shorter, search.values, found.solution
    layers = {
        cost.name: cost.layer_costs(search.original, found.slim, search.groups.sizes, found.counts)
        for cost in search.costs
    }
    group_losses = _group_losses(values, search.groups, search.offered, found.counts)
    predicted = values.joint_loss(group_losses.values())
    alike = partial(_in_proportion, values, predicted, solution.value)
    with_more = None if predicted is None else _value_with_more(search)
    return PruneReport(
        model=model_name(search.model),
        input_size=tuple(search.groups.input_shape[1:]),
        costs=tuple(_lines(search, found)),
        layers=(*_layers(search.groups, found.keep), *_layers_gone(shorter)),
        blocks=shorter.blocks,
        value=solution.value,
        total_value=float(sum(whole.value[-1] for whole in search.ladders)),
        upper_bound=solution.upper_bound,
        rounds=solution.rounds,
        corrections=found.corrections,
        layer_costs={name: lines for name, lines in layers.items() if lines},
        seconds=seconds,
        scores=dict(values.about),
        predicted_loss=predicted,
        loss_gap=None if predicted is None else predicted - alike(solution.upper_bound),
        group_losses=group_losses,
        loss_with_more=None if with_more is None else alike(with_more),
        frozen=search.frozen,
        verified=search.groups.verified,
        verified_note=search.groups.verified_note,
        options={**search.limits.options, "budget": dict(search.budget.asked)}
        | {f"{cost.name} conditions": dict(cost.about) for cost in search.costs if cost.about},
    )


def _group_losses(values, groups: ChannelGroups, ladders: Sequence[Ladder], counts: Sequence[int]) -> dict[str, float]:
    """What each group alone loses at the chosen widths, the most first; empty where values say nothing about losses."""
    worth = {
        group.name: float(rung.value[np.searchsorted(rung.counts, count)])
        for group, rung, count in zip(groups, ladders, counts, strict=True)
    }
    losses = {name: loss for name, value in worth.items() if (loss := values.loss_of(value)) is not None}
    return dict(sorted(losses.items(), key=lambda item: -item[1]))


def _in_proportion(values, predicted: float | None, chosen: float, other: float) -> float | None:
    """The loss of another value than the chosen one, where that is predicted to lose so much."""
    lost = values.loss_of(chosen)
    return None if predicted is None else predicted * values.loss_of(other) / lost if lost else 0.0


def _value_with_more(search: OneBudget) -> float | None:
    """The value of the best choice if one more percent of what the original costs were allowed."""
    more = {name: limit + 0.01 * search.originals[name] for name, limit in search.allowed.items()}
    solution = search_widths(search.offered, search.costs, more)
    return None if solution is None else solution.value


def _lines(search: OneBudget, found: Candidate):
    """What every report shows comes first, then what else was asked for."""
    shorter, originals, model, groups = search.shorter, search.originals, search.original, search.groups
    size = tuple(groups.input_shape[1:])
    asked = {cost.name: cost for cost in search.costs}
    for name in dict.fromkeys([*(name for name, kind in COSTS.items() if kind.always), *asked]):
        kind = COSTS[name]
        if kind.count is not None and len(inputs_of(model)) <= 1:
            numbers = shorter.counted_original(kind), kind.count(found.slim, size)
        else:  # by a formula: nothing to count, or nothing to count with, where one image is not enough
            cost = asked.get(name) or kind.cost(shorter.model, groups, None)
            whole = originals.get(name) or kind.cost(model, shorter.original_groups, None).at(
                shorter.original_groups.sizes
            )
            numbers = whole, cost.at(found.counts)
        measured = found.measured.get(name, (None, None))
        yield CostLine(name, kind.label, kind.unit, numbers[0], search.allowed.get(name), numbers[1], *measured)


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


def _layers_gone(shorter: Shorter):
    for group in shorter.original_groups:
        for s in group.slices:
            if s.role == "out" and s.param not in shorter.groups.shapes:
                yield LayerLine(s.param.rsplit(".", 1)[0], shorter.original_groups.shapes[s.param][s.dim], 0)
