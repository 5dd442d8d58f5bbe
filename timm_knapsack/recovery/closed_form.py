"""Rebuild what pruning lost by least squares: no labels, no rate, no schedule, a few hundred images.

Segment by segment and, inside a segment, layer by layer, in the order in which they run, on the student's own features,
ridge regression fits each conv or linear to the teacher's pre-activation map at the channels that were kept. A layer
that ends a residual branch is fitted to the teacher's sum minus the student's own shortcut, at the end of a block and
inside it (behind attention), so that the errors of earlier layers are corrected and not passed on. The paper's ``M_l``
is the same regressor; here it is folded into the weights and costs nothing at inference. A layer inside of a block that
has lost none of its inputs keeps its weights, and its shift alone is corrected: what it sees is disturbed and not less,
and weights that are fitted to disturbed inputs shrink. All this is closed form. Then the layers of a block move
together towards the block's output, by a few Gauss-Newton steps (`joint_fit`).

The teacher runs once, and its maps are kept at the sampled positions only. The student runs once too: layers that are
finished return what they returned before, so that each further layer of a segment costs only what lies between.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import KnapsackError
from ..maps.batches import image_batches, varied
from ..maps.channels_last import side_by_side
from ..maps.gram import products
from ..maps.patches import draw_positions, groups_of, outputs, patches
from ..maps.precision import passes_gain
from ..maps.taps import alike_channels, block_taps, the_map
from ..maps.views import random_views
from ..maps.walk import PROBE_IMAGES, Segment, Walk, find_segments, hooked, kept_bytes, watch_execution
from ..slim.example_inputs import example_dtype
from ..slim.kept_channels import kept_of
from ..slim.modes import eval_mode
from ..slim.turned_heads import turned_of
from ..slim.wrappers import for_images, worked_on
from .finished_layers import FinishedLayers
from .joint_fit import FittedLayer, JointFit
from .output_layer import penalty_of_scores
from .plans import Plan, Planner, layers_of_other_positions, wanted_positions
from .ridge import RidgeSums, check_ridge

log = logging.getLogger(__name__)

JOINT_STEPS = 8  # of fitting the layers of a block together, at most
JOINT_IMAGES = 256  # that they are fitted on, at least
JOINT_EQUATIONS = 300  # outputs to be met for each of their weights; more images only take longer
OTHER_POSITIONS = "it runs on each head by itself, and some of them are gone"
TURNED = "its heads were turned when the network was pruned, and the teacher's are not"
FEW_IMAGES = 1024  # up to so many, a view of each helps
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
    joint: int = JOINT_STEPS,
    views: bool = True,
    accelerator=None,
) -> nn.Module:
    """Rebuild the teacher's maps in a pruned student by least squares, in place; returns the student.

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
        joint: steps, at most, in which the layers of a block, each fitted by itself, are then fitted together to the
            block's output; 0 leaves them as they are (quicker by half or more).
        views: fit on another view of each image as well (a crop, mirrored, brighter), if there are at most 1024.
        accelerator: of several processes, each takes every n-th batch of the loader, and all end with the same weights.

    Example:
        >>> result = prune(model, loader, budget=Budget(macs=0.5))
        >>> student = recover(result.model, model, loader)
    """
    options = {"ridge": ridge, "images": images, "joint": joint, "views": views, "accelerator": accelerator}
    recover_layers(student, teacher, loader, kept=kept, **options)
    return student


def recover_layers(
    student, teacher, loader, *, kept=None, ridge=None, images=None, joint=JOINT_STEPS, views=True, accelerator=None
) -> list[LayerFit]:
    """As `recover`; returns how each layer fared."""
    if isinstance(joint, bool) or not isinstance(joint, int) or joint < 0:
        raise KnapsackError(f"joint={joint!r}: expected a whole number of steps, 0 for none")
    teacher = for_images(teacher)
    with worked_on(student) as student, eval_mode(student, teacher), torch.no_grad():
        kept = dict(kept if kept is not None else kept_of(student, teacher))
        _check_pair(student, teacher, kept)
        check_ridge(ridge)
        device, dtype = next(student.parameters()).device, example_dtype(student)
        batches = varied(image_batches(loader, images, device, dtype))
        if views and sum(map(len, batches)) <= FEW_IMAGES and all(batch.dim() == 4 for batch in batches):
            batches = [x for n, batch in enumerate(batches) for x in (batch, random_views(batch, seed=n, share=1.0))]
        batches = side_by_side(batches, student, teacher)
        return _Recovery(student, teacher, batches, kept, ridge, joint, accelerator).run()


def planned_layers(
    student: nn.Module, teacher: nn.Module, probe: Tensor, *, kept: Mapping[str, Tensor], images: int
) -> dict[str, str]:
    """What `recover` would do to each conv and linear with so many images, and nothing is done.

    Args:
        probe: two images.

    Returns:
        ``{layer: "to sums", "to outputs", "shifted", "before" (the first loss), or why it is left alone}``.

    Example:
        >>> result = prune(model, scores=scores, groups=groups, budget=Budget(macs=0.5))
        >>> kept = result.kept_channels
        >>> planned_layers(result.model, model, torch.randn(2, 3, 64, 64), kept=kept, images=512)["layer1.0.conv2"]
        'to sums'
    """
    with eval_mode(student, teacher), torch.no_grad():
        return _Recovery(student, teacher, [probe], dict(kept), None, 0, None).planned(images)


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
    def __init__(self, student, teacher, batches, kept, ridge, joint, accelerator):
        self.kept, self.ridge, self.joint, self.accelerator = kept, ridge, joint, accelerator
        self.moments: list[FittedLayer] = []  # of the layers of this segment that were fitted
        self.count = len(batches)  # on all processes
        numbers = range(len(batches))
        if accelerator is not None:
            numbers = numbers[accelerator.process_index :: accelerator.num_processes]
        self.seeds = list(numbers)  # a batch draws the same positions whichever process has it
        self.images = sum(map(len, batches))  # on all processes
        few = batches[0][:PROBE_IMAGES]  # plans are made on it: all processes must come to the same
        batches = [batches[number] for number in numbers]
        self.execution = watch_execution(student, few)
        segments = find_segments(student, self.execution.order)
        fast = passes_gain(teacher, few)
        self.ours = Walk(student, batches, segments, probe=few, fast=fast)
        self.theirs = Walk(teacher, batches, segments, probe=few, fast=fast, steady=True)
        foreign = dict.fromkeys(layers_of_other_positions(student, teacher, few), OTHER_POSITIONS)
        foreign |= {f"{name}.qkv": TURNED for name in turned_of(student) - turned_of(teacher)}
        self.planner = Planner(self.ours, self.execution, self.images, foreign)
        self.taps = {tap.name: tap for tap in block_taps(student, few)}

    def run(self) -> list[LayerFit]:
        fits: list[LayerFit] = []
        for segment, todo in self._segments():
            if todo:
                fits += self._fit_segment(segment, todo, segment is self.ours.segments[-1])
            elif segment is not self.ours.segments[-1]:
                self.ours.advance()
                self.theirs.advance()
        for fit in fits:
            if fit.skipped:
                log.info("recover: %s is left as it was: %s", fit.name, fit.skipped)
        return fits

    def planned(self, images: int) -> dict[str, str]:
        """What would be done to each layer."""
        self.planner.images = images
        found = dict.fromkeys(self.execution.order, "before")
        for segment, todo in self._segments():
            for plan in self.planner.plans(todo, self.taps.get(segment.name)) if todo else ():
                how = "to outputs" if plan.gain is None else "to sums"
                found[plan.name] = plan.skipped or ("shifted" if self._keeps_weights(plan) else how)
            if segment is not self.ours.segments[-1]:
                self.ours.advance()
        return found

    def _segments(self) -> Iterator[tuple[Segment, tuple[str, ...]]]:
        """Each segment with its layers that are to be fitted: none before the first layer that differs."""
        changed, gone = False, self._first_behind_a_gap()
        for segment in self.ours.segments:
            changed = changed or gone in segment.layers
            shapes = [(self.ours.modules[n].weight.shape, self.theirs.modules[n].weight.shape) for n in segment.layers]
            first = next((i for i, (mine, full) in enumerate(shapes) if mine != full), None)
            if changed:
                yield segment, segment.layers
            else:
                yield segment, () if first is None else segment.layers[first:]
            changed = changed or first is not None

    def _first_behind_a_gap(self) -> str | None:
        """The student's first layer that runs behind one which only the teacher has (a block that is gone)."""
        theirs = watch_execution(self.theirs.model, self.theirs.batches[self.theirs.probe]).order
        gap = next((place for place, name in enumerate(theirs) if name not in self.execution.calls), len(theirs))
        return next((name for name in theirs[gap:] if name in self.execution.calls), None)

    def _fit_segment(self, segment: Segment, names: tuple[str, ...], is_last: bool) -> list[LayerFit]:
        tap = self.taps.get(segment.name)
        plans = self.planner.plans(names, tap)
        targets, full = self._targets(plans)
        wanted = None if is_last or not self.joint else self._block_targets(segment, full)
        if not is_last:
            self.theirs.advance(full)
        finished = FinishedLayers(self.ours)
        for name in segment.layers[: len(segment.layers) - len(names)]:
            finished.add(name, is_written=True)
        fits = []
        for plan in plans:
            if not plan.skipped:
                fits.append(self._fit(plan, targets.pop(plan.name), finished))
            else:
                fits.append(LayerFit(plan.name, "layer", 0.0, 0.0, plan.skipped))
            finished.add(plan.name, plan.is_written)
        if wanted is not None and len(self.moments) > 1:
            fit = JointFit(self.ours, self.moments, wanted, self.seeds, self._add_up)
            before, after = fit.run(self.joint)
            log.info("recover: %s as a whole misses %.4f, before %.4f", segment.name, after, before)
            finished = FinishedLayers(self.ours)
        self.moments = []
        if not is_last:
            self.ours.advance([finished.run(batch) for batch in range(self.ours.probe)])
        return fits

    def _block_targets(self, segment: Segment, full: list[Any]) -> list[Tensor] | None:
        """What the segment should return for each batch, or None where that can't be compared channel by channel."""
        slim, wide = the_map(self.ours.run(self.ours.probe)), the_map(self.theirs.run(self.theirs.probe))
        alike = alike_channels(self.theirs.model, segment.name, self.kept, wide, slim)
        if alike is None:
            return None
        full = full[: self._joint_batches(segment, slim[0].numel())]
        return [alike(the_map(output)).to(torch.float32, copy=True) for output in full]

    def _joint_batches(self, segment: Segment, outputs: int) -> int:
        """How many of this process's batches the layers of a segment are fitted together on: what the weights need.

        The same batches on any number of processes, so that a process may have none of them.
        """
        weights = sum(self.ours.modules[name].weight.numel() for name in segment.layers)
        size = self.images / self.count
        wanted = max(JOINT_IMAGES, JOINT_EQUATIONS * weights / outputs) / size  # batches of all processes
        room = kept_bytes() // 2 // max(1, outputs * 4 * max(map(len, self.ours.batches)))
        return min(sum(seed < wanted for seed in self.seeds), max(1, room))

    def _add_up(self, value: Tensor) -> Tensor:
        return value if self.accelerator is None else self.accelerator.reduce(value, "sum")

    def _targets(self, plans: list[Plan]) -> tuple[dict[str, list], list[Any]]:
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
                    at = draw_positions(layer, y, wanted_positions(layer) // self.count + 1, self.seeds[batch])
                    full_layer = self.theirs.modules[name]
                    made = outputs(full_layer, y, at)
                    if index is not None:  # of all groups at once, then group by group as the student has them
                        made = made.transpose(0, 1).flatten(1).index_select(1, index.to(y.device))
                        made = made.reshape(len(made), groups_of(layer), -1).transpose(0, 1).contiguous()
                    targets[name].append((at, made.float()))

                if plan.gain is None:
                    hooks.append((self.theirs.modules[plan.name], "output", keep))
                else:
                    hooks.append((self.theirs.modules[plan.sum.module], plan.sum.side, keep))
            with hooked(*hooks):
                full.append(self.theirs.run(batch))
        return targets, full

    def _keeps_weights(self, plan: Plan) -> bool:
        """Has the layer all inputs that the teacher's has, and does it not end a sum? Depthwise convs are fitted."""
        mine, full = self.ours.modules[plan.name], self.theirs.modules[plan.name]
        inside = plan.gain is None and not plan.is_output
        return inside and mine.weight[0].numel() == full.weight[0].numel() and groups_of(mine) == 1

    def _fit(self, plan: Plan, targets: list, finished: "FinishedLayers") -> LayerFit:
        name, layer = plan.name, self.ours.modules[plan.name]
        norm = self.execution.norm_after.get(name)
        sums = RidgeSums(layer)
        seen: list[tuple[Tensor, Tensor, Tensor | float]] = []  # kept where the fit is made again
        for batch, (at, target) in enumerate(targets):
            base: Tensor | float = 0.0
            if plan.gain is None:
                x = finished.input_of(name, batch)
            else:
                x, base = finished.input_and_sum(name, batch, plan.sum)
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
        ridge = math.inf if self._keeps_weights(plan) else self.ridge
        if ridge is None and plan.is_output:
            bias = 0.0 if layer.bias is None else layer.bias.float()
            ridge = penalty_of_scores(sums, [(x, y) for x, y, _ in seen], bias, shifts, self._add_up)
        fit = sums.fit(ridge, shifts, fixed)
        for _ in range(ROUNDS if plan.rectifier is not None and not math.isinf(fit.ridge) else 0):
            weight = fit.flat.float()
            sums.forget_targets()
            for x, target, base in seen:
                made = products(x, weight) + fit.shift.float().reshape(weight.shape[0], 1, -1)
                sums.add_targets(x, plan.rectifier.target(target, made, base))
            sums.reduce_targets(self._add_up)
            fit = sums.fit(fit.ridge, shifts, fixed)
        if not torch.isfinite(fit.weight).all():
            return LayerFit(name, "layer", fit.error_before, fit.error_before, "the fit is not finite")
        layer.weight.copy_(fit.weight)
        self.moments.append(FittedLayer(name, *sums.moments(), norm))
        if layer.bias is not None:
            layer.bias.add_(fit.shift.to(layer.bias.dtype))
        elif norm is not None:
            mean = self.ours.modules[norm].running_mean
            mean.sub_(fit.shift.to(mean.dtype))
        return LayerFit(name, "layer" if plan.gain is None else "block", fit.error_before, fit.error_after)
