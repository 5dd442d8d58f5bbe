"""The choice: values and a budget in, the model cut to the best widths that fit out. Nothing is refitted here."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..channels.find_groups import find_channel_groups
from ..costs.kinds import COSTS
from ..errors import BudgetError
from ..slim.channel_config import ChannelConfig, features_of, model_name
from ..slim.channel_groups import ChannelGroups
from ..slim.cutting import channel_config_of, kept_outputs
from ..slim.example_inputs import own_image_size
from ..slim.kept_channels import composed
from ..slim.turned_heads import turned_of
from ..slim.wrappers import bare
from ..values.group_values import GroupValues
from ..values.scores import Scores
from .budget import Budget, read_amounts
from .limits import Limits
from .one_budget import OneBudget, unreachable
from .reporting import report_of
from .result import PruneResult
from .shortening import Shorter


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
    return [_pruned(shorter, values, limits, budget, base_args) for budget in budgets]


def _pruned(shorter: Shorter, values: GroupValues, limits: Limits, budget: Budget, base_args) -> PruneResult:
    start = time.perf_counter()
    search = OneBudget(shorter, values, limits, budget)
    found = search.best()
    config = search.shorter.recorded(_config(search.model, search.groups, found.keep, base_args))
    found.slim.channel_config = config
    report = report_of(search, found, time.perf_counter() - start)
    kept_channels = kept_outputs(search.groups, found.keep, found.slim)
    return PruneResult(found.slim, found.keep, config, report, kept_channels)


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
        raise unreachable(model, originals, groups.frozen, least, costs, allowed)


def _seen_args(model: nn.Module) -> dict[str, Any]:
    """Arguments of create_model that can be read off the model."""
    size = own_image_size(model)
    return {} if size is None else {"img_size": size[0] if size[0] == size[1] else size}


def _config(model: nn.Module, groups: ChannelGroups, keep, base_args) -> ChannelConfig:
    """The config from the original base, also when the model had been pruned before."""
    earlier = getattr(model, "channel_config", None)
    if not isinstance(earlier, ChannelConfig):
        args = {**_seen_args(model), **(base_args or {})}
        return channel_config_of(groups, keep, model_name(model), args, features_of(model), turned_of(model))
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
