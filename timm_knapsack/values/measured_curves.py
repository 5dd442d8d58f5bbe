"""value_curves: what the network really loses at each width of each group, its readers refitted.

1. One pass over three quarters of the images gives the Gram matrix of what every reader of a group sees.
2. Backward elimination in closed form gives the order in which a group's units go, and the error at every width.
3. That error has the right shape but no scale. So at a few widths of each group the real loss is measured, that group
   alone cut out of the network and its readers refitted, on the other quarter of the images, which no fit has seen,
   from the segment on where the group begins.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ScoreError
from ..maps.batches import image_batches
from ..maps.channels_last import side_by_side
from ..maps.distance import gives_logits, output_distance
from ..maps.patches import flat_weight
from ..maps.precision import passes_gain
from ..maps.walk import Execution, Segment, Walk, find_segments, hooked, kept_bytes, watch_execution
from ..slim.channel_config import model_name
from ..slim.channel_groups import ChannelGroup, ChannelGroups
from ..slim.cutting import slice_model
from ..slim.example_inputs import example_dtype
from ..slim.modes import eval_mode
from ..slim.wrappers import for_images
from .consumers import GramSums, Reader, choose_penalty, collect_grams, readers_of, rows_of
from .curves import GroupCurve, ValueCurves
from .elimination import Consumer, Elimination, eliminate
from .families import find_families

WIDTHS = (0.75, 0.45, 0.2)  # of a group's units, at which the loss is measured
HELD_OUT = 4  # one in so many images is held out
MOST_HELD_OUT = 192


def value_curves(
    model: nn.Module,
    groups: ChannelGroups,
    loader: Iterable,
    *,
    original: nn.Module | None = None,
    images: int | None = None,
    widths: Sequence[float] = WIDTHS,
    accelerator=None,
    data: str = "",
    progress: bool | None = None,
) -> ValueCurves:
    """Measure what the network loses at each width of each group; no labels, no gradients.

    Several processes give the curves of one: each takes its share of the loader's batches.

    Args:
        loader: images, (images, labels) or dicts with pixel_values; labels are not used. A few hundred do.
        original: the network whose outputs count as right; ``model`` itself by default. With a pruned and recovered
            model, the curves say what is lost beyond what it has lost already.
        images: use at most this many.
        widths: shares of each group's units at which the loss is measured.
        data: words about the data, kept with the curves.
        progress: show a bar; by default on a terminal.

    Example:
        >>> curves = value_curves(model, find_channel_groups(model), loader)
        >>> bool(curves["layer1.0.conv1"].losses()[8] < curves["layer1.0.conv1"].losses()[1])
        True
    """
    model, original = for_images(model), None if original is None else for_images(original)
    device = next(model.parameters()).device
    batches = image_batches(loader, images, device, example_dtype(model))
    count = sum(map(len, batches))
    if not len(groups):
        why = "; ".join(f"{name}: {reason}" for name, reason in list(groups.frozen.items())[:3])
        raise ScoreError(f"{model_name(model)} has no channels that can be removed: {why}")
    if count < 2:
        raise ScoreError("value curves need at least two images, one to fit on and one to measure on; a few hundred do")
    networks = [model] if original is None else [model, original]
    fitted, held = split_held_out(side_by_side(batches, *networks))
    with eval_mode(*networks), torch.no_grad(), _bar(progress) as bar:
        pass_ = _Measuring(model, groups, original, fitted, held, widths, accelerator, bar)
        curves = pass_.run()
    return ValueCurves(curves, model=model_name(model), data=data, samples=count)


def split_held_out(batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Images to fit on and images to measure on: every fourth is held out, at most 192.

    Example:
        >>> [sum(map(len, part)) for part in split_held_out([torch.zeros(8, 3, 4, 4)] * 2)]
        [12, 4]
    """
    size = max(map(len, batches))
    images = torch.cat(list(batches))
    every = max(HELD_OUT if len(images) >= HELD_OUT else 2, -(-len(images) // MOST_HELD_OUT))
    mask = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    mask[every - 1 :: every] = True
    return list(images[~mask].split(size)), list(images[mask].split(size))


@dataclass
class _Cut:
    """What is known about a group after its elimination: the weights of its readers at each width to be measured."""

    readers: list[Reader]
    elimination: Elimination
    weights: dict[int, dict[str, tuple[Tensor, Tensor | None]]]  # {units kept: {layer: (weight, shift)}}
    note: str


class _Measuring:
    def __init__(self, model, groups, original, fitted, held, widths, accelerator, bar):
        self.model, self.groups, self.bar, self.accelerator = model, groups, bar, accelerator
        self.modules = dict(model.named_modules())
        self.families = {family.group.name: family for family in find_families(groups)}
        self.measured_groups = [family.group for family in self.families.values()]
        self.execution: Execution = watch_execution(model, fitted[0][:2])
        self.probe = fitted[0][:8]  # the same on every process
        self.fast = passes_gain(model, self.probe)
        self.fitted, self.seeds, self.total = *self._own(fitted), len(fitted)
        self.held, _ = self._own(held)
        self.readers = {g.name: readers_of(g, self.modules, self.execution) for g in self.measured_groups}
        self.counts = {group.name: _counts(group.size, widths) for group in self.measured_groups}
        self.references = [(original or model)(images) for images in self.held]
        self.logits = gives_logits(original or model, (original or model)(held[0][:1]))

    def _own(self, batches: list[Tensor]) -> tuple[list[Tensor], list[int]]:
        """This process's share of the batches, and their numbers among all."""
        numbers = range(len(batches))
        if self.accelerator is not None:
            numbers = numbers[self.accelerator.process_index :: self.accelerator.num_processes]
        return [batches[number] for number in numbers], list(numbers)

    def _add_up(self, value: Tensor) -> Tensor:
        return value if self.accelerator is None else self.accelerator.reduce(value, "sum")

    def run(self) -> dict[str, GroupCurve]:
        chunks = list(self._chunks())
        widths = sum(len(counts) for counts in self.counts.values())
        self.bar.total(len(chunks) * len(self.fitted) + len(self.measured_groups) + widths * max(len(self.held), 1))
        cuts: dict[str, _Cut] = {}
        for chunk in chunks:
            cuts |= self._eliminated(chunk)
        losses = self._measured(cuts)
        curves = {}
        for group in self.measured_groups:
            found, counts = cuts[group.name].elimination, self.counts[group.name]
            loss = np.array([losses[group.name][count] for count in counts])
            curve = GroupCurve(found.order, found.error, np.array(counts), loss, cuts[group.name].note)
            curves |= self.families[group.name].split(curve)
        return {group.name: curves[group.name] for group in self.groups}

    # ---- 1 and 2: Gram matrices and elimination

    def _chunks(self) -> Iterator[list[ChannelGroup]]:
        """Groups whose readers' Gram matrices fit into memory together."""
        chunk, layers, size = [], set(), 0
        for group in self.measured_groups:
            new = {r.layer for r in self.readers[group.name] if not r.why_not} - layers
            more = sum(4 * flat_weight(self.modules[n])[:, :, 0].numel() ** 2 // self._groups_of(n) * 8 for n in new)
            if chunk and size + more > kept_bytes():
                yield chunk
                chunk, layers, size = [], set(), 0
            chunk.append(group)
            layers |= new
            size += more
        if chunk:
            yield chunk

    def _groups_of(self, name: str) -> int:
        return getattr(self.modules[name], "groups", 1)

    def _eliminated(self, chunk: list[ChannelGroup]) -> dict[str, _Cut]:
        wanted = sorted({r.layer for group in chunk for r in self.readers[group.name] if not r.why_not})
        sums, why_not = collect_grams(
            self.model, wanted, self.fitted, self.seeds, self.total, lambda: self.bar.step("inputs of layers")
        )
        for each in sums.values():
            each.reduce(self._add_up)
        cuts = {}
        for group in chunk:
            cuts[group.name] = self._cut(group, sums, why_not)
            self.bar.step("order of removal")
        return cuts

    def _cut(self, group: ChannelGroup, sums: Mapping[str, GramSums], why_not: Mapping[str, str]) -> _Cut:
        readers = self.readers[group.name]
        notes = [f"{r.layer} is not refitted: {why}" for r in readers if (why := r.why_not or why_not.get(r.layer))]
        notes = list(dict.fromkeys(notes))  # a recurrent layer reads a group with several weights
        consumers: list[Consumer] = []
        parts: list[tuple[Reader, float, int]] = []  # of each consumer: its reader, the scale of its weights, its group
        for reader in readers:
            if reader.why_not or not sums[reader.layer].count.sum():
                continue
            layer, shifts = self.modules[reader.layer], self._shifts(reader.layer)
            weight = flat_weight(layer).double().cpu()
            rows = rows_of(layer, reader.index)
            ridge = choose_penalty(sums[reader.layer], weight, rows, shifts)
            grams = sums[reader.layer].means(shifts)[0].cpu()
            if not torch.isfinite(grams).all():
                raise ScoreError(
                    f"{reader.layer} sees values that are not finite; are the images and the weights finite?"
                )
            # an error counts relative to the output's own size, so that all readers of a group count alike
            scale = float((weight * (grams @ weight)).sum().clamp_min(1e-30).rsqrt())
            for number, (gram, own) in enumerate(zip(grams, weight, strict=True)):
                consumers.append(Consumer(gram, own * scale, rows, ridge))
                parts.append((reader, scale, number))
        if not consumers:
            found = _by_magnitude(group, dict(self.model.named_parameters()))
            return _Cut(readers, found, {}, "; ".join(notes) or "no layer reads it")
        found = eliminate(consumers, self.counts[group.name])
        weights = {}
        for count, refitted in found.refitted.items():
            weights[count] = self._weights(refitted, parts, sums, why_not)
        return _Cut(readers, Elimination(found.order, found.error), weights, "; ".join(notes))

    def _shifts(self, name: str) -> bool:
        return self.modules[name].bias is not None or name in self.execution.norm_after

    def _weights(self, refitted, parts, sums, why_not) -> dict[str, tuple[Tensor, Tensor | None]]:
        """``{layer: (flat weight, shift of the output)}`` of the readers that can be refitted."""
        flat: dict[str, list[Tensor]] = {}
        for weight, (reader, scale, _) in zip(refitted, parts, strict=True):
            if reader.layer not in why_not:
                flat.setdefault(reader.layer, []).append(weight / scale)
        result = {}
        for name, weights in flat.items():
            new, shift = torch.stack(weights), None
            if self._shifts(name):
                mean = sums[name].means(False)[1].cpu().unsqueeze(1)
                shift = (mean @ (flat_weight(self.modules[name]).double().cpu() - new)).reshape(-1)
            result[name] = new, shift
        return result

    # ---- 3: the loss at a few widths

    def _measured(self, cuts: Mapping[str, _Cut]) -> dict[str, dict[int, float]]:
        order = {name: place for place, name in enumerate(self.execution.order)}
        starts: dict[str, list[ChannelGroup]] = {}
        for group in self.measured_groups:
            makers = [s.param.rpartition(".")[0] for s in group.slices if s.role == "out"]
            first = min((order.get(name, 0) for name in makers), default=0)  # one that runs by hand may run at any time
            starts.setdefault(self.execution.order[first], []).append(group)
        segments = find_segments(self.model, self.execution.order)
        last = max(i for i, segment in enumerate(segments) if any(layer in starts for layer in segment.layers))
        losses: dict[str, dict[int, float]] = {group.name: {} for group in self.measured_groups}
        walk = Walk(self.model, self.held, segments, fast=self.fast, steady=True) if self.held else None
        base = self._loss([walk.rest(number) for number in range(len(self.held))])
        for number, segment in enumerate(segments[: last + 1]):
            for group in self._beginning(segment, starts):
                for count in self.counts[group.name]:
                    slim = self._slim(group, cuts[group.name], count)
                    outputs = []
                    for batch in range(len(self.held)):
                        outputs.append(walk.rest(batch, slim))
                        self.bar.step("loss at a few widths")
                    losses[group.name][count] = max(self._loss(outputs) - base, 0.0)
            if number < last and walk is not None:
                walk.advance()
        return losses

    def _beginning(self, segment: Segment, starts: Mapping[str, list[ChannelGroup]]) -> list[ChannelGroup]:
        return [group for layer in segment.layers for group in starts.get(layer, ())]

    def _loss(self, outputs: list[Any]) -> float:
        """Mean distance from the original's outputs over all images that were held out, on all processes."""
        sums = torch.zeros(2, dtype=torch.float64, device=next(self.model.parameters()).device)
        for reference, output in zip(self.references, outputs, strict=True):
            distances = output_distance(reference, output, self.logits)
            sums[0] += distances.double().sum()
            sums[1] += len(distances)
        total, count = self._add_up(sums)
        return float(total / count)

    def _slim(self, group: ChannelGroup, cut: _Cut, count: int) -> nn.Module:
        """The network with this group alone cut to ``count`` units, its readers refitted."""
        kept = self.families[group.name].keep(cut.elimination.kept(count))
        slim = slice_model(self.model, self.groups, kept).eval()
        modules = dict(slim.named_modules())
        gone = torch.ones(group.size, dtype=torch.bool)
        gone[self.families[group.name].units(kept)] = False
        for name, (weight, shift) in cut.weights.get(count, {}).items():
            layer = modules[name]
            if "weight" not in layer._parameters:  # it is computed from others (weight norm): nothing can be written
                continue
            stay = torch.ones(weight.shape[1], dtype=torch.bool)
            for reader in cut.readers:
                if reader.layer == name:
                    stay[rows_of(self.modules[name], reader.index)[gone].reshape(-1)] = False
            made = torch.ones(
                weight.shape[0] * weight.shape[2], dtype=torch.bool
            )  # it may make channels of the group, too
            for s in group.slices:
                if s.param == f"{name}.weight" and s.dim == 0:
                    made[s.index[gone].reshape(-1)] = False
            layer.weight.copy_(weight[:, stay].transpose(1, 2).flatten(0, 1)[made].reshape(layer.weight.shape))
            shift = None if shift is None else shift[made]
            if shift is not None and layer.bias is not None:
                layer.bias.add_(shift.to(layer.bias))
            elif shift is not None:
                mean = modules[self.execution.norm_after[name]].running_mean
                mean.sub_(shift.to(mean))
        if group.crosses_norm:
            self._rescale(slim, group, cut)
        return slim

    def _rescale(self, slim: nn.Module, group: ChannelGroup, cut: _Cut) -> None:
        """A norm over fewer channels gives larger values: scale the readers' weights, one by one, as they run."""
        modules, inputs = dict(slim.named_modules()), {}
        readers = {reader.layer: reader for reader in cut.readers if not reader.why_not}
        kept = cut.elimination.kept(next(iter(modules[n].weight.shape[1] for n in readers), group.size))

        def remember(name):
            return lambda x: inputs.__setitem__(name, x)

        def scale(name):
            layer, dim = modules[name], 1 if isinstance(modules[name], nn.Conv2d) else -1

            def apply(x):
                before = inputs[name].index_select(dim, readers[name].index[kept].reshape(-1).to(x.device))
                if before.shape == x.shape:
                    layer.weight.mul_(float((before * x).sum() / x.square().sum().clamp_min(1e-30)))

            return apply

        with hooked(*((self.modules[name], "input", remember(name)) for name in readers)):
            self.model(self.probe)
        with hooked(*((modules[name], "input", scale(name)) for name in readers)):
            slim(self.probe)


def _counts(size: int, widths: Sequence[float]) -> list[int]:
    """Numbers of units to measure at, ascending; never all of them, and at least one number."""
    counts = {min(max(1, round(size * width)), size - 1) for width in widths}
    return sorted(count for count in counts if count >= 1) or [1]


def _by_magnitude(group: ChannelGroup, parameters: Mapping[str, Tensor]) -> Elimination:
    """For a group that no layer reads linearly: the units with the smallest weights go first."""
    energy = torch.zeros(group.size, dtype=torch.float64)
    for s in group.slices:
        if s.role == "out":
            square = parameters[s.param].detach().double().square().transpose(0, s.dim).flatten(1).sum(1).cpu()
            energy += square[s.index].sum(1)
    order = energy.argsort()
    error = torch.cat([torch.zeros(1, dtype=torch.float64), energy[order].cumsum(0)]).flip(0)
    return Elimination(order.numpy(), error.numpy())


class _Bar:
    """A bar on a terminal, or nothing."""

    def __init__(self, progress=None):
        self._progress, self._task = progress, None

    def total(self, steps: int) -> None:
        if self._progress is not None:
            self._task = self._progress.add_task("value curves", total=steps)

    def step(self, what: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=f"value curves: {what}")


@contextmanager
def _bar(wanted: bool | None) -> Iterator[_Bar]:
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield _Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bar(progress)
