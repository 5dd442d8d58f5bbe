"""prune(): a model, images and a budget in; a smaller ordinary model out, refitted, and what it lost, measured."""

import difflib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..channels.find_groups import find_channel_groups
from ..errors import BudgetError, KnapsackError
from ..maps.batches import example_of
from ..pruning.budget import Budget
from ..pruning.result import PruneResult
from ..recovery.closed_form import recover_layers
from ..recovery.refinement import images_to_fit, refine_steps
from ..slim.channel_groups import ChannelGroups
from ..slim.wrappers import bare, for_images, in_full_precision, like_precision
from ..values.gradient_pass import taylor_scores
from ..values.group_values import GroupValues
from ..values.valuation import CRITERIA, METHODS, value_channels
from .blocks import choose_by_trial
from .measured_loss import collapse_warning, measure_loss, recovered_if_better
from .narrower_heads import turn_heads
from .steps import choose_in_steps


def prune(
    model: nn.Module,
    loader: Iterable | None = None,
    *,
    scores: GroupValues | Mapping[str, Tensor] | None = None,
    budget: Budget,
    method: str | None = None,
    recover: bool | None = None,
    refine: bool = False,
    blocks: bool = False,
    steps: int = 1,
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

    A wrapper (DataParallel, DistributedDataParallel, torch.compile, transformers' TimmWrapper) is taken off, and the
    network inside comes back smaller. One in half precision is worked on in float32 and comes back as it was.

    Attention heads become narrower where that can be done (`turn_heads`), and go as a whole elsewhere.

    What each width of each group would cost the network is measured on the images (`value_curves`); how these losses
    add up in this network is found out by trial; the widths that lose least within the budget are cut out, what is left
    is refitted (`recover`), and what was lost is measured. A network that has collapsed is a warning with the way out.

    Args:
        loader: images, with labels or without; a few hundred do. Labels are used for the last measurement only.
        budget: ``Budget(macs=0.5)``.
        scores: from `value_curves` or `taylor_scores`, instead of measuring now; they serve any number of budgets.
        method: "curves" (the default), or "paper" for the paper's: Taylor scores ("abs"), nothing refitted.
        recover: refit what is left on the images; by default wherever images are given, except with the paper's method.
        refine: then a few hundred gradient steps on the same images, without labels (`refine`): minutes, and closer
            to the original.
        blocks: residual branches may go as a whole, where images show that this loses less than thinner layers do;
            meant for budgets of time. ``result.report.blocks`` says which are gone.
        steps: in how many steps the network is cut, refitted in between and its curves measured again.
        round_to: keep multiples of this many channels, as some hardware likes.
        min_keep: least number of units to keep in each group, or a fraction below 1 of its size.
        ignore: patterns (``"layer4.*"``) of groups or layers to leave alone; ``":streams"`` for all residual streams.
        bounds: ``{pattern: (least, most)}`` for single groups, as counts or fractions.
        groups: from `find_channel_groups`, to save tracing again.
        base_args: arguments of ``timm.create_model`` that the model was made with (``img_size=…``), for the config.
        scoring: ``criterion="sum"`` for values by another criterion, and arguments of `taylor_scores` with it.

    Example:
        >>> result = prune(model, loader, budget=Budget(macs=0.5))
        >>> print(result.report)
        cost            original         asked       counted     left
        MACs         ...
        >>> smaller = result.model
        >>> more = [torch.randn(16, 3, 32, 32)]
        >>> report = prune(model, more, budget=Budget(macs=0.4), blocks=True).report
        >>> set(report.blocks) <= set(report.block_losses)
        True
    """
    if not isinstance(budget, Budget):
        raise BudgetError(f"budget must be a Budget, such as Budget(macs=0.5), got {budget!r}")
    _check_scoring(scoring, scores, method)
    for name, wanted in (("recover", recover), ("refine", refine)):
        if wanted and loader is None:
            raise KnapsackError(f"{name}=True needs images: prune(model, loader, …)")
    if isinstance(loader, Iterator):
        loader = list(loader)  # an iterator would be used up by the values
    own = bare(model)
    model = in_full_precision(own) if loader is None else for_images(own)
    if groups is None:
        example = example_of(model, loader) if example_inputs is None else example_inputs
        if scores is None and loader is not None and _by_curves(method, scoring):
            model = turn_heads(model, loader)
        groups = find_channel_groups(model, example)
    if scores is None:
        criterion = scoring.pop("criterion", None) or METHODS[method or "curves"]
        scores = value_channels(model, groups, loader, criterion, **scoring)
    options = {"round_to": round_to, "min_keep": min_keep, "ignore": ignore, "bounds": bounds}
    recover = loader is not None and method != "paper" if recover is None else recover
    choice = choose_by_trial(
        model, scores, budget, loader if recover else None, groups=groups, blocks=blocks, **options
    )
    result = choose_in_steps(
        model, choice.values, budget, loader if recover else None, groups=choice.groups, steps=steps,
        base_args=base_args, shorter=choice.shorter, **options,
    )  # fmt: skip
    if loader is None:
        return replace(result, model=_as_it_was(result.model, model, own))
    slim, kept = result.model, result.kept_channels
    loss = None
    if recover:
        fitted = images_to_fit(loader) if refine else loader
        loss, warning = recovered_if_better(
            slim, model, loader, partial(recover_layers, slim, model, fitted, kept=kept)
        )
        if warning:
            warnings.warn(warning, stacklevel=2)
    if refine:
        refine_steps(slim, model, loader, kept=kept)
    if loss is None or refine:
        loss = measure_loss(slim, model, loader, recovered=recover)
    report = replace(choice.noted(result.report), loss=loss)
    if warning := collapse_warning(report.model, report.loss, report.group_losses):
        warnings.warn(warning, stacklevel=2)
    return replace(result, report=report, model=_as_it_was(slim, model, own))


def _by_curves(method: str | None, scoring: Mapping[str, Any]) -> bool:
    return CRITERIA.find(scoring.get("criterion") or METHODS.get(method or "curves", "curves")).curves is not None


def _as_it_was(slim: nn.Module, worked_on: nn.Module, own: nn.Module) -> nn.Module:
    """Half precision where the model that was given has it."""
    return slim if worked_on is own else like_precision(slim, own)


def _check_scoring(scoring: Mapping[str, Any], scores: Any, method: str | None) -> None:
    """A keyword that neither `prune` nor `taylor_scores` has is a slip, and one without effect is said."""
    own = list(inspect.signature(prune).parameters)[:-1]
    passed_on = [name for name in inspect.signature(taylor_scores).parameters if name not in ("model", *own)]
    for name in scoring:
        if name not in passed_on:
            near = difflib.get_close_matches(name, [*own, *passed_on], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*own, *passed_on])}"
            raise KnapsackError(f"prune has no argument {name!r}; {hint}")
        if scores is not None:
            raise KnapsackError(f"{name}={scoring[name]!r} is for scoring, and scores are given; leave one of them out")
    if method is not None and method not in METHODS:
        raise KnapsackError(f"method={method!r} is none of {', '.join(METHODS)}")
    if method is not None and (scores is not None or "criterion" in scoring):
        given = "scores are" if scores is not None else "a criterion is"
        raise KnapsackError(f"method={method!r} says how channels are valued, and {given} given; leave one of them out")
