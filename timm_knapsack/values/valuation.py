"""Values of all channels by any criterion: curves of what the network loses, or a score for every unit."""

import os
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import ScoreError
from ..slim.channel_groups import ChannelGroups
from . import curves, scores
from .criteria import CRITERIA, Criterion, register_criterion
from .gradient_pass import taylor_scores
from .group_values import GroupValues
from .measured_curves import value_curves
from .value_files import format_of

register_criterion(
    Criterion(
        "curves", "what the network loses at each width, its readers refitted; no labels, no gradients",
        needs_gradients=False, curves=value_curves,
    )
)  # fmt: skip

METHODS = {"curves": "curves", "paper": "abs"}  # what `prune` calls a method: the criterion behind it


def value_channels(
    model: nn.Module,
    groups: ChannelGroups,
    loader: Iterable | None = None,
    criterion: str = "curves",
    accelerator=None,
    **options: Any,
) -> GroupValues:
    """`value_curves`, or `taylor_scores` with another criterion; ``options`` are those of the one or the other.

    Example:
        >>> type(value_channels(model, groups, None, "magnitude")).__name__
        'Scores'
    """
    rule = CRITERIA.find(criterion)
    if rule.curves is None:
        return taylor_scores(model, groups, loader, criterion, accelerator, **options)
    if loader is None:
        raise ScoreError(f"criterion {criterion!r} needs data: pass a loader of images")
    known = {name: options.pop(name) for name in ("data", "progress") if name in options}
    for name in ("per_sample", "seed", "loss_fn"):
        if options.pop(name, None):
            raise ScoreError(f"{name} is for Taylor scores; criterion {criterion!r} has no use for it")
    return rule.curves(model, groups, loader, accelerator=accelerator, **known, **options)


def load_values(path: str | os.PathLike, groups: ChannelGroups | None = None) -> GroupValues:
    """Read scores or value curves, whichever the file holds."""
    container = curves.ValueCurves if format_of(path) == curves.FORMAT else scores.Scores
    return container.load(path, groups)
