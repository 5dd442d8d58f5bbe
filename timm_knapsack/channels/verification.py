"""Is every group right? Remove units, look at what happens, and freeze what goes wrong, with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn

from ..errors import TraceError, first_line
from ..slim.attributes import is_standard_layer
from ..slim.channel_groups import Attribute, ChannelGroups, CostTerm, Count, MapTerm, fold
from .dry_run import ShapeCheck
from .grouping import groups_of
from .tracing import Assumptions, Trace, run_trace
from .value_check import ChoiceCheck, NoValues, ValueCheck, too_dear

MAX_RETRACES = 8
WAYS = ("auto", "values", "shapes", "none")


class Check(Protocol):
    """Removes units of chosen groups, others in each draw, and says what goes wrong."""

    groups: ChannelGroups
    draws: Sequence[int]
    words: str  # what a failure means
    most_runs: int  # of the search for the groups that fail; what is left then is frozen together

    def failure(self, chosen: Sequence[int], draw: int) -> Exception | None: ...


def verified(
    groups: ChannelGroups, model: nn.Module, shadow: nn.Module, inputs: tuple, trace: Trace, way: str
) -> ChannelGroups:
    """The groups that survive the dry run, and the comparison of values where ``way`` asks for it."""
    first = _verified(groups, model, shadow, inputs, trace, way)
    few_heads = any(heads.size < trace.labels.fewest_heads for heads in trace.labels.whole_heads)
    few_heads = few_heads or bool(trace.labels.narrower_heads)
    if not few_heads or len(first.frozen) <= len(groups.frozen):
        return first
    # Something was refused, perhaps the widths within heads: there whole heads may go, however few.
    trace = run_trace(shadow, inputs, Assumptions(fewest_heads=1))
    second = _verified(groups_of(model, shadow, trace, inputs), model, shadow, inputs, trace, way)
    return _freer(second, first) if second.verified == first.verified else first  # never freer for being less sure


def _verified(groups, model, shadow, inputs, trace, way: str) -> ChannelGroups:
    fitting, assuming = _fitting(groups, model, shadow, inputs, trace)
    if way == "shapes":
        return replace(fitting, verified="shapes", verified_note="as asked")
    why_not = too_dear(fitting) if way == "auto" else ""
    if why_not:
        return replace(fitting, verified="shapes", verified_note=why_not)
    try:
        result = _equal(fitting, model, inputs, assuming)
        if assuming.bound_classes:
            result = _by_whole_heads(result, model, shadow, inputs, assuming)
        return result
    except NoValues as error:
        if way == "values":
            name = type(model).__name__
            raise TraceError(f"the values of {name} can't be compared: {error}; pass verify='shapes'") from None
        return replace(fitting, verified="shapes", verified_note=str(error))


def _by_whole_heads(result, model, shadow, inputs, assuming: Assumptions) -> ChannelGroups:
    """Where code that reads widths had to be frozen, as nn.MultiheadAttention, which scales by the width of a head,
    whole heads may go with their channels of the stream."""
    assuming = replace(assuming, only_whole_heads=True, fewest_heads=1, narrower_heads=frozenset())
    trace = run_trace(shadow, inputs, assuming)
    groups = groups_of(model, shadow, trace, inputs)
    if len(groups.frozen) >= len(result.frozen):
        return result
    fitting = _surviving(ShapeCheck(groups, shadow, inputs, trace))
    try:
        return _freer(_equal(fitting, model, inputs, assuming), result)
    except NoValues:  # a second chance that can't be compared leaves the first, which could
        return result


def _fitting(groups, model, shadow, inputs, trace) -> tuple[ChannelGroups, Assumptions]:
    """The groups whose shapes fit, and what had to be assumed for it.

    Code that reads a width off its input (``B, N, C = x.shape; … .reshape(B, N, C)``) needs that its inner width stays
    equal to the input's. Where the dry run fails in such a module, its class is traced again with these sizes tied.
    """
    check = first = ShapeCheck(groups, shadow, inputs, trace)
    labels = trace.labels
    assuming = plain = Assumptions(fewest_heads=labels.fewest_heads, narrower_heads=labels.narrower_heads)
    error = _first_failure(check)
    for _ in range(MAX_RETRACES):
        if error is None:
            break
        culprit = _class_that_failed(shadow, getattr(error, "raised_in", ""))
        if culprit in assuming.bound_classes:
            break
        assuming = replace(assuming, bound_classes=assuming.bound_classes | {culprit})
        trace = run_trace(shadow, inputs, assuming)
        check = ShapeCheck(groups_of(model, shadow, trace, inputs), shadow, inputs, trace)
        error = _first_failure(check)
    result = _surviving(check, error is not None)
    if check is not first and error is not None:
        unbound = _surviving(first)
        if _freer(unbound, result) is unbound:
            return unbound, plain
    return result, assuming


def _equal(groups: ChannelGroups, model: nn.Module, inputs: tuple, assuming: Assumptions) -> ChannelGroups:
    """The groups without which the network computes what it should."""
    check = ValueCheck(groups, model, inputs, assuming)
    result = _surviving(check, _first_failure(check) is not None)
    exempt = {groups[i].name: why for i, why in check.exempt.items() if groups[i].name in result.by_name}
    note = "; ".join(f"but for {name}, by shapes: {why}" for name, why in exempt.items())
    return replace(result, verified="values", verified_note=note, basis=(inputs, assuming))


def differing(groups: ChannelGroups, model: nn.Module, keep: Mapping[str, Tensor]) -> dict[str, str]:
    """``{group: reason}`` of those with which this choice computes something else; nothing unless values were compared.

    `verified` draws three widths of each group. Code that asks for a fourth (``if x.shape[1] == 11``) is seen here, at
    the widths that a network is to be cut to.
    """
    if groups.basis is None or all(len(keep[group.name]) == group.size for group in groups):
        return {}
    try:
        check = ChoiceCheck(groups, model, keep)
        left = _surviving(check) if _first_failure(check) is not None else groups
    except NoValues as error:  # there were values at other widths
        return {group.name: f"{ChoiceCheck.words}: {error}" for group in groups if len(keep[group.name]) < group.size}
    return {name: left.frozen[name] for name in groups.by_name if name not in left.by_name}


def _first_failure(check: Check) -> Exception | None:
    chosen = _prunable(check.groups)
    return next(filter(None, (check.failure(chosen, draw) for draw in check.draws)), None)


def _prunable(groups: ChannelGroups) -> list[int]:
    return [i for i, group in enumerate(groups) if group.size > 1]


def _class_that_failed(model: nn.Module, name: str) -> str:
    """A layer fails because the module around it passed it the wrong shape."""
    modules = dict(model.named_modules())
    while name and is_standard_layer(modules[name]):
        name = name.rpartition(".")[0]
    return type(modules[name]).__name__


def _freer(first: ChannelGroups, second: ChannelGroups) -> ChannelGroups:
    """The groups with which more MACs can go; the second where both are as good."""
    return first if first.macs([1] * len(first)) < second.macs([1] * len(second)) else second


def _surviving(check: Check, fails: bool = True) -> ChannelGroups:
    """The groups that pass all draws; those that don't are found by halving, unless it is known that nothing fails."""
    refused: dict[int, str] = {}
    accepted: list[int] = []
    runs = 0

    def add(candidates: list[int], draw: int) -> None:
        nonlocal runs
        runs += 1
        problem = check.failure(accepted + candidates, draw)
        if problem is None:
            accepted.extend(candidates)
        elif len(candidates) == 1 or runs > check.most_runs:
            for i in candidates:
                refused[i] = f"{check.words}: {first_line(problem)}"
        else:
            middle = len(candidates) // 2
            add(candidates[:middle], draw)
            add(candidates[middle:], draw)

    accepted = _prunable(check.groups)
    for draw in check.draws if fails else ():
        survivors, accepted = accepted, []
        if survivors:
            add(survivors, draw)
    for i, group in enumerate(check.groups):
        if group.size == 1:
            refused[i] = "a single unit, which must stay"
    return without_groups(check.groups, refused) if refused else check.groups


def without_groups(groups: ChannelGroups, refused: dict[int, str]) -> ChannelGroups:
    """The same groups less those that can't be pruned; their widths become constants."""
    sizes = groups.sizes
    number = {old: new for new, old in enumerate(i for i in range(len(groups)) if i not in refused)}

    def narrowed(count: Count) -> Count:
        fixed = count.fixed + sum(sizes[g] * m for g, m in count.units if g in refused)
        return Count(fixed, tuple((number[g], m) for g, m in count.units if g not in refused))

    terms = (fold(CostTerm, (t.module,), t.constant, [narrowed(c) for c in t.counts]) for t in groups.terms)
    attributes = (
        fold(Attribute, (a.module, a.path), a.constant, [narrowed(c) for c in a.counts]) for a in groups.attributes
    )
    maps = groups.maps
    if maps is not None:
        maps = tuple(fold(MapTerm, (m.first, m.last), m.constant, [narrowed(c) for c in m.counts]) for m in maps)
    return replace(
        groups,
        groups=tuple(group for i, group in enumerate(groups) if i not in refused),
        frozen={**groups.frozen, **{groups[i].name: reason for i, reason in refused.items()}},
        terms=tuple(terms),
        attributes=tuple(a for a in attributes if a.counts),
        maps=maps,
    )
