"""The choice: values and a budget in, the model cut to the best widths that fit out. Nothing is refitted here."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..channels.find_groups import find_channel_groups
from ..channels.verification import differing
from ..costs.cost import Candidate, Cost
from ..costs.kinds import COSTS
from ..errors import BudgetError
from ..human_numbers import human
from ..slim.channel_config import ChannelConfig, features_of, model_name
from ..slim.channel_groups import ChannelGroups
from ..slim.cutting import channel_config_of, kept_indices, kept_outputs, slice_model
from ..slim.example_inputs import own_image_size
from ..slim.kept_channels import composed, shared_too
from ..slim.turned_heads import turned_of
from ..slim.wrappers import bare, inputs_of
from ..values.group_values import GroupValues, Ladder
from ..values.scores import Scores
from .budget import Budget, read_amounts
from .limits import Limits
from .result import CostLine, LayerLine, PruneReport, PruneResult
from .shortening import Shorter
from .width_search import ladder, search_widths


def sweep(
    model: nn.Module,
    scores: GroupValues | Mapping[str, Tensor],
    budgets: Sequence[Budget],
    *,
    round_to: int = 1,
    min_keep: float = 1,
    ignore: Sequence[str] = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
    groups: ChannelGroups | None = None,
    base_args: Mapping[str, Any] | None = None,
    shorter: Shorter | None = None,
) -> list[PruneResult]:
    """A whole family of pruned models from one set of values: one result for each budget. Nothing is refitted.

    Args:
        scores: from `value_curves` or `taylor_scores`; one pass over the images serves any number of budgets.
        budgets: ``[Budget(macs=0.5)]``.
        round_to: keep multiples of this many channels, as some hardware likes.
        min_keep: least number of units to keep in each group, or a fraction below 1 of its size.
        ignore: patterns (``"layer4.*"``) of groups or layers to leave alone; ``":streams"`` for all residual streams.
        bounds: ``{pattern: (least, most)}`` for single groups, as counts or fractions.
        groups: from `find_channel_groups`, to save tracing again.
        base_args: arguments of ``timm.create_model`` that the model was made with (``img_size=…``), for the config.
        shorter: from `shorten`: cut this network, which lacks some blocks; ``scores`` are those of its groups, and
            budgets are parts of what ``model``, which has them, costs.

    Example:
        >>> results = sweep(model, scores, [Budget(macs=f) for f in (0.7, 0.5, 0.3)])
        >>> len(results)
        3
    """
    for budget in budgets:
        if not isinstance(budget, Budget):
            raise BudgetError(f"budget must be a Budget, such as Budget(macs=0.5), got {budget!r}")
    model = bare(model)
    if shorter is None:
        shorter = Shorter.of_whole(model, find_channel_groups(model) if groups is None else groups)
    groups = shorter.groups
    values = (scores if isinstance(scores, GroupValues) else Scores(scores)).checked(groups)
    if not len(groups):
        why = "; ".join(f"{name}: {reason}" for name, reason in list(groups.frozen.items())[:3])
        raise BudgetError(f"{model_name(model)} has no channels that can be removed: {why}")
    limits = Limits(groups, round_to, min_keep, ignore, bounds or {})
    ladders = [values.ladder(group) for group in groups]
    return [_prune_once(shorter, values, ladders, limits, budget, base_args) for budget in budgets]


def _prune_once(shorter: Shorter, values, ladders: Sequence[Ladder], limits: Limits, budget, base_args) -> PruneResult:
    start = time.perf_counter()
    original, model, groups = shorter.original, shorter.model, shorter.groups
    costs, originals = shorter.costs(budget)
    allowed = budget.limits(originals)
    offered = []
    for number, (group, whole) in enumerate(zip(groups, ladders, strict=True)):
        step = math.lcm(limits.step(group), *(int(cost.steps[number]) for cost in costs if cost.steps is not None))
        offered.append(ladder(whole, *limits.range(group, step), step))

    def solve(aims: Mapping[str, float]) -> Candidate | None:
        solution = search_widths(offered, costs, aims)
        if solution is None:
            return None
        rungs = zip(groups, offered, solution.counts, strict=True)
        keep = {group.name: torch.from_numpy(rung.units(count)).long() for group, rung, count in rungs}
        return Candidate(solution.counts, keep, slice_model(model, groups, keep), solution)

    def settled(aims: Mapping[str, float], waiting: Sequence[Cost]) -> Candidate | None:
        """Each cost in turn may measure what the others have settled on, and aim elsewhere."""
        if not waiting:
            return solve(aims)
        cost, *others = waiting
        absolute = not budget.amounts[cost.name].fraction
        return cost.settle(
            lambda aim: settled({**aims, cost.name: aim}, others),
            aims[cost.name],
            original,
            originals[cost.name],
            absolute,
        )

    frozen = dict(groups.frozen)
    while True:
        found = settled(allowed, costs)
        if found is None:
            raise _unreachable(model, originals, frozen, [rung.counts[0] for rung in offered], costs, allowed)
        wrong = differing(groups, model, found.keep)
        if not wrong:
            break
        frozen.update(wrong)
        for name, reason in wrong.items():  # it keeps all its units, and the rest is chosen again
            number, size = groups.by_name[name], groups[name].size
            if limits.range(groups[name], 1)[1] < size:
                raise BudgetError(f"bounds do not leave {name} its {size} units, but {reason}")
            offered[number] = ladders[number].only(np.array([size]))
    solution, keep, slim = found.solution, found.keep, found.slim
    config = shorter.recorded(_config(model, groups, keep, base_args))
    slim.channel_config = config
    layers = {cost.name: cost.layer_costs(original, slim, groups.sizes, found.counts) for cost in costs}
    group_losses = _group_losses(values, groups, offered, found.counts)
    predicted = values.joint_loss(group_losses.values())
    alike = partial(_in_proportion, values, predicted, solution.value)
    with_more = None if predicted is None else _value_with_more(originals, offered, costs, allowed)
    report = PruneReport(
        model=model_name(model),
        input_size=tuple(groups.input_shape[1:]),
        costs=tuple(_lines(shorter, costs, originals, allowed, found)),
        layers=(*_layers(groups, keep), *_layers_gone(shorter)),
        blocks=shorter.blocks,
        value=solution.value,
        total_value=float(sum(whole.value[-1] for whole in ladders)),
        upper_bound=solution.upper_bound,
        rounds=solution.rounds,
        corrections=found.corrections,
        layer_costs={name: lines for name, lines in layers.items() if lines},
        seconds=time.perf_counter() - start,
        scores=dict(values.about),
        predicted_loss=predicted,
        loss_gap=None if predicted is None else predicted - alike(solution.upper_bound),
        group_losses=group_losses,
        loss_with_more=None if with_more is None else alike(with_more),
        frozen=frozen,
        verified=groups.verified,
        verified_note=groups.verified_note,
        options={**limits.options, "budget": dict(budget.asked)}
        | {f"{cost.name} conditions": dict(cost.about) for cost in costs if cost.about},
    )
    return PruneResult(slim, keep, config, report, shared_too(kept_outputs(groups, keep), slim))


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


def _value_with_more(originals: Mapping[str, float], ladders, costs: Sequence[Cost], limits) -> float | None:
    """The value of the best choice if one more percent of what the original costs were allowed."""
    more = {name: limit + 0.01 * originals[name] for name, limit in limits.items()}
    solution = search_widths(ladders, costs, more)
    return None if solution is None else solution.value


def check_reachable(
    model: nn.Module,
    groups: ChannelGroups,
    asked: Mapping[str, float | str],
    *,
    round_to: int = 1,
    min_keep: float = 1,
    ignore: Sequence[str] = (),
) -> None:
    """An error where no widths meet a budget, before anything is measured; costs that need a table are left out.

    Args:
        asked: the limits as they were given: ``{"macs": 0.5}``.

    Example:
        >>> check_reachable(model, find_channel_groups(model), {"macs": "50%"}, min_keep=0.1)
    """
    limits = Limits(groups, round_to, min_keep, ignore, {})
    amounts = {name: amount for name, amount in read_amounts(asked).items() if not COSTS[name].needs_table}
    costs = [COSTS[name].cost(model, groups) for name in amounts]
    originals = {cost.name: cost.at(groups.sizes) for cost in costs}
    allowed = {name: amounts[name].of(whole) for name, whole in originals.items()}
    least = [limits.range(group, limits.step(group))[0] for group in groups]
    if any(cost.at(least) > allowed[cost.name] for cost in costs):
        raise _unreachable(model, originals, groups.frozen, least, costs, allowed)


def _unreachable(
    model, originals: Mapping[str, float], reasons: Mapping[str, str], least: Sequence[int], costs, limits
) -> BudgetError:
    cost = next(cost for cost in costs if cost.at(least) > limits[cost.name])
    frozen = "; ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:4])
    asked, smallest, original = (
        f"{human(n)} {cost.unit}" if cost.unit == COSTS[cost.name].label else human(n, cost.unit)
        for n in (limits[cost.name], cost.at(least), originals[cost.name])
    )
    return BudgetError(
        f"{model_name(model)} can't be pruned to {asked}: the smallest reachable is {smallest} of {original}. Frozen: "
        f"{frozen or 'nothing'}. Ask for more, or relax min_keep, round_to, bounds and ignore"
    )


def _lines(shorter: Shorter, costs: Sequence[Cost], originals: Mapping[str, float], limits, found: Candidate):
    """What every report shows comes first, then what else was asked for."""
    model, groups = shorter.original, shorter.groups
    size = tuple(groups.input_shape[1:])
    asked = {cost.name: cost for cost in costs}
    for name in dict.fromkeys([*(name for name, kind in COSTS.items() if kind.always), *asked]):
        kind = COSTS[name]
        if kind.count is not None and len(inputs_of(model)) <= 1:
            numbers = kind.count(model, size), kind.count(found.slim, size)
        else:  # by a formula: nothing to count, or nothing to count with, where one image is not enough
            cost = asked.get(name) or kind.cost(shorter.model, groups, None)
            whole = originals.get(name) or kind.cost(model, shorter.original_groups, None).at(
                shorter.original_groups.sizes
            )
            numbers = whole, cost.at(found.counts)
        measured = found.measured.get(name, (None, None))
        yield CostLine(name, kind.label, kind.unit, numbers[0], limits.get(name), numbers[1], *measured)


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


def _seen_args(model: nn.Module) -> dict[str, Any]:
    """Arguments of create_model that can be read off the model."""
    size = own_image_size(model)
    return {} if size is None else {"img_size": size[0] if size[0] == size[1] else size}


def _config(model: nn.Module, groups: ChannelGroups, keep, base_args) -> ChannelConfig:
    """The config from the original base, also when the model had been pruned before."""
    earlier = getattr(model, "channel_config", None)
    if not isinstance(earlier, ChannelConfig):
        args = {**_seen_args(model), **(base_args or {})}
        config = channel_config_of(groups, keep, model_name(model), args, features_of(model))
        return replace(config, turned=tuple(turned_of(model)))
    new = channel_config_of(groups, keep, earlier.base, earlier.base_args)

    def merged(old, new):
        return {name: {**old.get(name, {}), **new.get(name, {})} for name in {*old, *new}}

    return ChannelConfig(
        earlier.base,
        merged(earlier.widths, new.widths),
        merged(earlier.attributes, new.attributes),
        earlier.base_args,
        kept=composed(earlier, new.kept),
        features=earlier.features,
        builder=earlier.builder,
        removed=earlier.removed,
        turned=tuple(turned_of(model)),
    )
