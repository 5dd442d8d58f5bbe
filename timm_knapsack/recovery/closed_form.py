"""Rebuild in closed form what pruning lost: no gradients, a few hundred images.

Segment by segment and, inside a segment, layer by layer, in the order in which they run, on the student's own features,
ridge regression fits each conv or linear to the teacher's pre-activation map at the channels that were kept. A layer
that ends a residual block is fitted to the teacher's sum minus the student's own shortcut, so that the errors of
earlier layers are corrected and not passed on. The paper's ``M_l`` is the same regressor; here it is folded into the
weights and costs nothing at inference.

The teacher runs once, and its maps are kept at the sampled positions only. The student runs once too: layers that are
finished return what they returned before, so that each further layer of a segment costs only what lies between.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..errors import KnapsackError
from ..maps.batches import image_batches, varied
from ..maps.distance import gives_logits
from ..maps.patches import count_positions, draw_positions, flat_weight, outputs, patches
from ..maps.taps import Tap, find_blocks, find_taps
from ..maps.walk import PROBE_IMAGES, Reached, Segment, Walk, find_segments, hooked, standing_in, watch_execution
from ..slim.kept_channels import kept_of
from ..slim.modes import eval_mode
from .finished_layers import FinishedLayers
from .output_layer import penalty_of_scores
from .rectified import BOUNDS, Rectifier
from .ridge import RidgeSums, check_ridge

log = logging.getLogger(__name__)

POSITIONS = 60_000  # positions of the maps that a layer is fitted on, at most
ROUNDS = 2  # of fitting again, where an activation makes the targets one-sided


@dataclass(frozen=True)
class LayerFit:
    """How well one layer matches the teacher: share of the target's variance that is missed, before and after."""

    name: str
    target: str  # "block" (the residual sum) or "layer"
    before: float
    after: float
    skipped: str = ""  # why it was left as it was


def recover(
    student: nn.Module,
    teacher: nn.Module,
    loader: Iterable,
    *,
    kept: Mapping[str, Tensor] | None = None,
    ridge: float | None = None,
    images: int | None = None,
    accelerator=None,
) -> nn.Module:
    """Rebuild the teacher's maps in a pruned student, in place, without gradients; returns the student.

    BatchNorm statistics are corrected along the way. Layers without a closed form (weight-standardised convs, shared
    layers) and layers with more inputs than the images have positions are left alone, and the log says which; the last
    layer's penalty is chosen by the KL divergence of the class scores on images that were not fitted.

    Args:
        loader: images, or (images, labels); labels are not used. They are held in memory, with the inputs of one
            segment of both networks (at most a sixth of the machine's memory each; beyond that, more is run again).
        kept: ``result.kept_channels``; a model that comes from `prune` carries it.
        ridge: penalty on the change of the weights, relative to the mean square of the inputs; by default each layer's
            own, the one whose fit on one half of the images does best on the other.
        images: use at most this many.
        accelerator: of several processes, each takes every n-th batch of the loader, and all end with the same weights.

    Example:
        >>> result = prune(model, loader, budget=Budget(macs=0.5))
        >>> student = recover(result.model, model, loader)
    """
    recover_layers(student, teacher, loader, kept=kept, ridge=ridge, images=images, accelerator=accelerator)
    return student


def recover_layers(student, teacher, loader, *, kept=None, ridge=None, images=None, accelerator=None) -> list[LayerFit]:
    """As `recover`; returns how each layer fared."""
    kept = dict(kept if kept is not None else kept_of(student, teacher))
    _check_pair(student, teacher, kept)
    check_ridge(ridge)
    batches = varied(image_batches(loader, images, next(student.parameters()).device))
    with eval_mode(student, teacher), torch.no_grad():
        return _Recovery(student, teacher, batches, kept, ridge, accelerator).run()


def _check_pair(student: nn.Module, teacher: nn.Module, kept: Mapping[str, Tensor]) -> None:
    theirs = dict(teacher.named_modules())
    for name, layer in student.named_modules():
        if not isinstance(layer, (nn.Conv2d, nn.Linear)):
            continue
        if name not in theirs or type(theirs[name]) is not type(layer):
            raise KnapsackError(f"the teacher has no layer like the student's {name}; is it the model that was pruned?")
        ours, full = layer.weight.shape[0], theirs[name].weight.shape[0]
        if ours != full and name not in kept:
            raise KnapsackError(
                f"{name} has {ours} of the teacher's {full} output channels, and nothing says which; "
                "pass kept=result.kept_channels"
            )
        if name in kept and len(kept[name]) != ours:
            raise KnapsackError(f"kept[{name!r}] names {len(kept[name])} channels, the student's layer has {ours}")


class _Recovery:
    def __init__(self, student, teacher, batches, kept, ridge, accelerator):
        self.kept, self.ridge, self.accelerator = kept, ridge, accelerator
        self.share = max(1, POSITIONS // len(batches))  # positions of each batch
        numbers = range(len(batches))
        if accelerator is not None:
            numbers = numbers[accelerator.process_index :: accelerator.num_processes]
        self.seeds = list(numbers)  # a batch draws the same positions whichever process has it
        self.images = sum(map(len, batches))  # on all processes
        few = batches[0][:PROBE_IMAGES]  # plans are made on it: all processes must come to the same
        batches = [batches[number] for number in numbers]
        self.execution = watch_execution(student, few)
        self.scores = student(few)
        segments = find_segments(student, self.execution.order)
        self.ours, self.theirs = (Walk(net, batches, segments, probe=few) for net in (student, teacher))
        self.taps = {tap.name: tap for tap in find_taps(student, "blocks", few)} if find_blocks(student) else {}

    def run(self) -> list[LayerFit]:
        fits: list[LayerFit] = []
        changed = False  # nothing is lost before the first layer that differs
        last = self.ours.segments[-1]
        for segment in self.ours.segments:
            shapes = [(self.ours.modules[n].weight.shape, self.theirs.modules[n].weight.shape) for n in segment.layers]
            first = next((i for i, (mine, full) in enumerate(shapes) if mine != full), None)
            if changed or first is not None:
                todo = segment.layers if changed else segment.layers[first:]
                changed = True
                fits += self._fit_segment(segment, todo, segment is last)
            elif segment is not last:
                self.ours.advance()
                self.theirs.advance()
        for fit in fits:
            if fit.skipped:
                log.info("recover: %s is left as it was: %s", fit.name, fit.skipped)
        return fits

    def _fit_segment(self, segment: Segment, names: tuple[str, ...], is_last: bool) -> list[LayerFit]:
        tap = self.taps.get(segment.name)
        plans = self._plans(names, tap)
        targets, full = self._targets(plans, tap)
        if not is_last:
            self.theirs.advance(full)
        finished = FinishedLayers(self.ours)
        for name in segment.layers[: len(segment.layers) - len(names)]:
            finished.add(name, is_written=True)
        fits = []
        for plan in plans:
            if not plan.skipped:
                fits.append(self._fit(plan, targets.pop(plan.name), finished, tap))
            else:
                fits.append(LayerFit(plan.name, "layer", 0.0, 0.0, plan.skipped))
            finished.add(plan.name, plan.is_written)
        if not is_last:
            self.ours.advance([finished.run(batch) for batch in range(self.ours.probe)])
        return fits

    def _plans(self, names: tuple[str, ...], tap: Tap | None) -> list["_Plan"]:
        """What is to be done with each layer of the segment, from runs of the probe."""
        seen: dict[str, list[Tensor]] = {}
        versions: dict[str, int] = {}
        hooks = []
        for name in names:

            def entered(x, name=name):
                seen.setdefault(name, []).append(x.clone())

            def left(y, name=name):
                seen[name] += [y, y.clone()]
                versions[name] = y._version

            hooks += [(self.ours.modules[name], "input", entered), (self.ours.modules[name], "output", left)]
        with hooked(*hooks):
            self.ours.run(self.ours.probe)
        plans = []
        for name in names:
            if self.execution.calls[name] != 1:
                plans.append(_Plan(name, f"it runs {self.execution.calls[name]} times in one forward pass"))
                continue
            x, y, copied = seen[name]
            is_output = self._makes_the_scores(copied)
            skipped = self._no_closed_form(name, x, copied, is_output)
            gain = None if skipped or tap is None else self._gain(name, tap, copied)
            rectifier = None if skipped or is_output else self._rectifier(name, tap, gain)
            plans.append(_Plan(name, skipped, gain, rectifier, y._version != versions[name], is_output))
        return _one_to_the_sum(plans, self.ours.modules)

    def _makes_the_scores(self, y: Tensor) -> bool:
        """Is this output of a layer, on the probe, what the network returns?"""
        same = isinstance(self.scores, Tensor) and self.scores.shape == y.shape
        return same and gives_logits(self.ours.model, y) and torch.allclose(self.scores, y, rtol=1e-3, atol=1e-4)

    def _no_closed_form(self, name: str, x: Tensor, y: Tensor, is_output: bool) -> str:
        layer = self.ours.modules[name]
        try:
            columns = patches(layer, x)
        except ValueError as error:
            return str(error)
        made, now = columns @ flat_weight(layer), outputs(layer, y)
        if layer.bias is not None:
            made = made + layer.bias.reshape(made.shape[0], 1, -1)
        if not torch.isfinite(now).all():
            return "its outputs are not finite"
        if not torch.allclose(made, now, rtol=1e-2, atol=1e-3 * float(now.abs().max().clamp_min(1e-6))):
            return "its weights are computed while it runs (weight standardisation or the like)"
        inputs = layer.weight[0].numel()
        positions = min(POSITIONS, count_positions(layer, y) * self.images)
        if is_output:  # few do: images that were not fitted decide on its penalty
            return ""
        return f"{positions} positions are too few for its {inputs} inputs" if positions < inputs else ""

    def _add_up(self, value: Tensor) -> Tensor:
        return value if self.accelerator is None else self.accelerator.reduce(value, "sum")

    def _targets(self, plans: list["_Plan"], tap: Tap | None) -> tuple[dict[str, list], list[Any]]:
        """The teacher's maps for each layer, at drawn positions: ``[(positions, targets) of each batch]``."""
        targets: dict[str, list] = {plan.name: [] for plan in plans if not plan.skipped}
        full = []
        for batch in range(self.theirs.probe):
            hooks = []
            for plan in plans:
                if plan.skipped:
                    continue

                def keep(y, name=plan.name, batch=batch):
                    layer, index = self.ours.modules[name], self.kept.get(name)
                    if index is not None:
                        y = y.index_select(1 if isinstance(layer, nn.Conv2d) else -1, index.to(y.device))
                    at = draw_positions(layer, y, self.share, self.seeds[batch])
                    targets[name].append((at, outputs(layer, y, at).float()))

                if plan.gain is None:
                    hooks.append((self.theirs.modules[plan.name], "output", keep))
                else:
                    hooks.append((self.theirs.modules[tap.module], tap.side, keep))
            with hooked(*hooks):
                full.append(self.theirs.run(batch))
        return targets, full

    def _fit(self, plan: "_Plan", targets: list, finished: "FinishedLayers", tap: Tap | None) -> LayerFit:
        name, layer = plan.name, self.ours.modules[plan.name]
        norm = self.execution.norm_after.get(name)
        sums = RidgeSums(layer)
        seen: list[tuple[Tensor, Tensor, Tensor | float]] = []  # kept where the fit is made again
        for batch, (at, target) in enumerate(targets):
            base: Tensor | float = 0.0
            if plan.gain is None:
                x = finished.input_of(name, batch)
            else:
                x, base = finished.input_and_sum(name, batch, tap)
                base = outputs(layer, base, at).float()
                target = (target - base) * plan.gain.reshape(target.shape[0], 1, -1)
            if layer.bias is not None:
                target = target - layer.bias.reshape(target.shape[0], 1, -1).float()
            x = patches(layer, x, at).float()
            sums.add(x, target)
            if plan.rectifier is not None or plan.is_output:
                seen.append((x, target, base))
            targets[batch] = None
        sums.reduce(self._add_up)
        fixed = None if plan.gain is None else plan.gain == 0
        shifts = layer.bias is not None or norm is not None
        ridge = self.ridge
        if ridge is None and plan.is_output:
            bias = 0.0 if layer.bias is None else layer.bias.float()
            ridge = penalty_of_scores(sums, [(x, y) for x, y, _ in seen], bias, shifts, self._add_up)
        fit = sums.fit(ridge, shifts, fixed)
        for _ in range(ROUNDS if plan.rectifier is not None else 0):
            weight = fit.flat.float()
            sums.forget_targets()
            for x, target, base in seen:
                made = x @ weight + fit.shift.float().reshape(weight.shape[0], 1, -1)
                sums.add_targets(x, plan.rectifier.target(target, made, base))
            sums.reduce_targets(self._add_up)
            fit = sums.fit(fit.ridge, shifts, fixed)
        if not torch.isfinite(fit.weight).all():
            return LayerFit(name, "layer", fit.error_before, fit.error_before, "the fit is not finite")
        layer.weight.copy_(fit.weight)
        if layer.bias is not None:
            layer.bias.add_(fit.shift.to(layer.bias.dtype))
        elif norm is not None:
            mean = self.ours.modules[norm].running_mean
            mean.sub_(fit.shift.to(mean.dtype))
        return LayerFit(name, "layer" if plan.gain is None else "block", fit.error_before, fit.error_after)

    def _rectifier(self, name: str, tap: Tap | None, gain: Tensor | None) -> Rectifier | None:
        """Bounds beyond which the activation behind the layer cuts values off; found by moving them on the probe."""
        walk, layer = self.ours, self.ours.modules[name]
        groups = 1 if isinstance(layer, nn.Linear) else layer.groups
        bias = torch.zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias.float().cpu()
        norm = self.execution.norm_after.get(name)
        if gain is not None:
            if tap.side != "input":
                return None
            slope = torch.where(gain == 0, torch.zeros_like(gain), 1 / gain.where(gain != 0, torch.ones_like(gain)))
            offset = slope * bias.to(slope)
            place, side = walk.modules[tap.module], "input"
        else:
            slope, offset = torch.ones_like(bias), bias
            if norm is not None:
                batch_norm = walk.modules[norm]
                scale = batch_norm.weight if batch_norm.weight is not None else torch.ones_like(batch_norm.running_var)
                shift = batch_norm.bias if batch_norm.bias is not None else torch.zeros_like(batch_norm.running_var)
                slope = (scale / (batch_norm.running_var + batch_norm.eps).sqrt()).float().cpu()
                offset = shift.float().cpu() + slope * (bias - batch_norm.running_mean.float().cpu())
            place, side = layer, "output"
        plain = walk.run(walk.probe)
        bounds = []
        for bound, sign in zip(BOUNDS, (-1, 1), strict=True):
            moved = self._with_moved(place, side, slope, offset if gain is None else None, bias, bound, sign)
            bounds.append(bound if moved is not None and _same(plain, moved) else sign * math.inf)
        if math.isinf(bounds[0]) and math.isinf(bounds[1]):
            return None
        shape = groups, 1, -1
        device = layer.weight.device
        return Rectifier(slope.reshape(shape).to(device), offset.reshape(shape).to(device), *bounds)

    def _with_moved(self, place, side, slope, offset, bias, bound, sign) -> Any:
        """The segment's output on the probe with all values beyond a bound moved farther; None if there are none."""
        moved_any = []

        def move(y: Tensor) -> Tensor:
            if offset is None:
                z, step = y, torch.ones((), device=y.device)
            else:
                shape = [1, -1] + [1] * (y.dim() - 2) if isinstance(place, nn.Conv2d) else [-1]
                a, c = slope.to(y.device).reshape(shape), (offset - slope * bias).to(y.device).reshape(shape)
                z, step = a * y + c, torch.where(a.abs() > 1e-12, 1 / a.where(a.abs() > 1e-12, torch.ones_like(a)), a)
            beyond = z < bound if sign < 0 else z > bound
            moved_any.append(bool(beyond.any()))
            return y + beyond * (sign * step * z.abs().mean())

        if side == "input":
            handle = place.register_forward_pre_hook(lambda _, args: (move(args[0]), *args[1:]))
        else:
            handle = place.register_forward_hook(lambda _, args, output: move(output))
        try:
            output = self.ours.run(self.ours.probe)
        finally:
            handle.remove()
        return output if any(moved_any) else None

    def _gain(self, name: str, tap: Tap, y: Tensor) -> Tensor | None:
        """1 ÷ how strongly each output channel enters the block's sum, or None where it does not enter it linearly.

        A layer ends a residual block if a change of its output changes the block's pre-activation sum in the same
        place by a fixed factor for each channel: batch norm and layer scale have such factors, an activation has not.
        """
        layer, walk = self.ours.modules[name], self.ours
        change = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y) * y.std().clamp_min(1e-6)
        sums: list[Tensor] = []

        def stop(x):
            sums.append(x.clone())
            raise Reached

        forward = layer.forward
        for stand_in in (forward, lambda *args: forward(*args) + change):
            with standing_in({layer: stand_in}), hooked((walk.modules[tap.module], tap.side, stop)):
                walk.run(walk.probe)
        if not isinstance(sums[0], Tensor) or sums[0].shape != y.shape:
            return None
        moved = sums[1] - sums[0]
        channel = 1 if isinstance(layer, nn.Conv2d) else -1
        change, moved = change.transpose(0, channel).flatten(1), moved.transpose(0, channel).flatten(1)
        factor = (change * moved).sum(1) / change.square().sum(1)
        error = (moved - factor.unsqueeze(1) * change).norm(dim=1) / moved.norm(dim=1).clamp_min(1e-12)
        if float(error.median()) > 1e-2:
            return None
        usable = (error < 1e-2) & (factor.abs() > 1e-3 * factor.abs().median())
        return torch.where(usable, 1 / factor.where(usable, torch.ones_like(factor)), torch.zeros_like(factor))


def _same(a: Any, b: Any) -> bool:
    pairs = zip(tree_flatten(a)[0], tree_flatten(b)[0], strict=True)
    return all(torch.equal(x, y) for x, y in pairs if isinstance(x, Tensor))


def _one_to_the_sum(plans: list["_Plan"], modules: Mapping[str, nn.Module]) -> list["_Plan"]:
    """Of several layers that add to the block's sum (a branch and a shortcut's conv), one is fitted to it, last of all.

    It is the one with the most weights for each output; the others are fitted to their own outputs before.
    """
    ends = [plan for plan in plans if plan.gain is not None]
    if not ends:
        return plans
    last = max(ends, key=lambda plan: modules[plan.name].weight[0].numel())
    others = [
        plan if plan.gain is None else replace(plan, gain=None, rectifier=None) for plan in plans if plan is not last
    ]
    return [*others, last]


@dataclass(frozen=True)
class _Plan:
    """How a layer is to be fitted.

    Attributes:
        skipped: why it can't be; empty where it can.
        gain: 1 ÷ its factors in the block's sum, where it ends a residual block.
        rectifier: the bounds of the activation behind it.
        is_written: does something write into its output (an in-place activation)?
        is_output: does it make the network's class scores?
    """

    name: str
    skipped: str = ""
    gain: Tensor | None = field(default=None, compare=False)
    rectifier: Rectifier | None = field(default=None, compare=False)
    is_written: bool = False
    is_output: bool = False
