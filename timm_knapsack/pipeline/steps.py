"""The choice in several steps: cut a part, refit, measure anew what is worth what, cut on.

Curves say what the whole network loses when one group is cut, and far from the whole network other layers may matter.
Measuring again on the way did not pay on the networks that it was tried on (docs/results.md): one step is the default.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..channels.find_groups import find_channel_groups
from ..errors import KnapsackError
from ..maps.batches import image_batches
from ..pruning.budget import Budget
from ..pruning.choose import sweep
from ..pruning.result import PruneResult
from ..recovery.closed_form import recover_layers
from ..slim.channel_groups import ChannelGroups
from ..slim.cutting import kept_indices
from ..slim.example_inputs import example_dtype
from ..values.curves import ValueCurves
from ..values.group_values import GroupValues
from ..values.measured_curves import split_held_out, value_curves
from ..values.remaining_values import RemainingValues
from .measured_loss import measure_loss

log = logging.getLogger(__name__)

IMAGES_ON_THE_WAY = 512  # at most: differences on the way are larger than those of the first curves, and time counts


def choose_in_steps(
    model: nn.Module,
    values: GroupValues | Mapping[str, Tensor],
    budget: Budget,
    loader: Iterable | None,
    *,
    groups: ChannelGroups,
    steps: int = 1,
    images: int | None = None,
    **options: Any,
) -> PruneResult:
    """The network cut to a budget, to be refitted; in between it is refitted and its curves are measured again.

    Args:
        values: of the whole network; scores other than value curves are taken as they are, in one step.
        loader: images to refit and measure with; without them there is one step.
        steps: how many.
        images: use at most this many.
        options: of `sweep`: limits of widths, ``base_args``.

    Example:
        >>> curves = value_curves(model, groups, loader)
        >>> result = choose_in_steps(model, curves, Budget(macs=0.5), loader, groups=groups, steps=2)
        >>> result.report.steps
        2
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise KnapsackError(f"steps={steps!r}: give a whole number from 1")
    result = sweep(model, values, [budget], groups=groups, **options)[0]
    if steps == 1:
        return result
    if loader is None or not isinstance(values, ValueCurves):
        raise KnapsackError(f"steps={steps} measures value curves again and again: it needs curves, and images")
    macs, lost, power = result.report.line("macs"), 0.0, values.power
    few = min(IMAGES_ON_THE_WAY, images or IMAGES_ON_THE_WAY)
    batches = image_batches(loader, few)
    fitted, held = split_held_out(batches)  # what curves are measured on, no refit may see
    for step in range(1, steps):
        share = (macs.counted / macs.original) ** (step / steps)
        part = sweep(model, values, [Budget(macs=share)], groups=groups, **options)[0]
        recover_layers(part.model, model, fitted, kept=part.kept_channels)
        lost = measure_loss(part.model, model, held, recovered=True).measured
        log.info("step %d of %d: %.1f %% of the MACs, loss %.3g", step, steps, 100 * share, lost)
        shape = groups.input_shape
        example = None if shape is None else torch.empty(shape, device="meta", dtype=example_dtype(model))
        left = find_channel_groups(part.model, example, verify="none")
        found = value_curves(part.model, left, batches, original=model, progress=False)
        curves = {name: found[name] for name in _alike(groups, part.keep, left)}
        curves = ValueCurves(curves, samples=found.samples, power=power)
        values = RemainingValues(values, curves, part.keep)
    result = sweep(model, values, [budget], groups=groups, **options)[0]
    report = replace(result.report, predicted_loss=lost + result.report.predicted_loss, steps=steps)
    return replace(result, report=report)


def _alike(groups: ChannelGroups, keep: Mapping[str, Tensor], left: ChannelGroups) -> list[str]:
    """Groups of a slim network whose units are, one by one, those that were kept of the whole network's.

    The others (a group of which too little is left to be cut) stay as they are.
    """
    kept = kept_indices(groups, keep)
    names = []
    for group in groups:
        if group.name not in left.by_name or left[group.name].size != len(keep[group.name]):
            continue
        before = {(s.param, s.dim): s.index[keep[group.name]] for s in group.slices if s.role}
        now = {(s.param, s.dim): s.index for s in left[group.name].slices if s.role}
        for (param, dim), index in now.items():
            if dim in kept.get(param, {}):  # a dim of which nothing was cut is counted as before
                now[param, dim] = kept[param][dim][index]
        if before.keys() == now.keys() and all(torch.equal(now[place], before[place]) for place in before):
            names.append(group.name)
    return names
