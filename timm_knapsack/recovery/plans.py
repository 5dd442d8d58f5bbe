"""How each layer of a segment is to be fitted, found out by running a few images through it.

What a layer computes is not read off its class: whether it is a plain matrix product, whether it ends a residual sum
and with which factors, and whether the activation behind it cuts values off, is tried on the probe.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..maps.distance import class_scores, gives_logits
from ..maps.patches import count_positions, flat_weight, outputs, patches
from ..maps.stand_ins import standing_in
from ..maps.taps import Tap
from ..maps.walk import Execution, Reached, Walk, hooked
from .rectified import BOUNDS, Rectifier

MOST_POSITIONS = 60_000  # of the maps that a layer is fitted on
LEAST_POSITIONS = 12_000
FOR_EACH_INPUT = 1000  # fewer cost EfficientNet-Lite0 at half of its MACs up to nine points (256 images, ad hoc)


def wanted_positions(layer: nn.Module) -> int:
    """On how many positions of its map a layer is fitted; more inputs need more.

    Example:
        >>> wanted_positions(nn.Conv2d(8, 8, 3, groups=8)), wanted_positions(nn.Conv2d(64, 8, 3))
        (12000, 60000)
    """
    return min(MOST_POSITIONS, max(LEAST_POSITIONS, FOR_EACH_INPUT * layer.weight[0].numel()))


@dataclass(frozen=True)
class Plan:
    """How a layer is to be fitted.

    Attributes:
        skipped: why it can't be; empty where it can.
        sum: where the residual sum that it ends can be read.
        gain: 1 ÷ its factors in that sum.
        rectifier: the bounds of the activation behind it.
        is_written: does something write into its output (an in-place activation)?
        is_output: does it make the network's class scores?
    """

    name: str
    skipped: str = ""
    sum: Tap | None = None
    gain: Tensor | None = field(default=None, compare=False)
    rectifier: Rectifier | None = field(default=None, compare=False)
    is_written: bool = False
    is_output: bool = False


class Planner:
    """Makes the plans of one segment after the other.

    Args:
        walk: the student, on its way.
        execution: in which order its layers run.
        images: how many there are, on all processes.
        foreign: ``{layer: why its maps can't be compared with the teacher's}``.
    """

    def __init__(self, walk: Walk, execution: Execution, images: int, foreign: Mapping[str, str]):
        self.walk, self.execution, self.images, self.foreign = walk, execution, images, foreign

    def plans(self, names: tuple[str, ...], tap: Tap | None) -> list["Plan"]:
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

            hooks += [(self.walk.modules[name], "input", entered), (self.walk.modules[name], "output", left)]
        with hooked(*hooks):
            self.walk.run(self.walk.probe)
        plans = []
        for name in names:
            if self.execution.calls[name] != 1:
                plans.append(Plan(name, f"it runs {self.execution.calls[name]} times in one forward pass"))
                continue
            if owner := self._shares_with(name):
                plans.append(Plan(name, f"its weights are also those of {owner}"))
                continue
            if name in self.foreign:
                plans.append(Plan(name, self.foreign[name], is_written=True))
                continue
            x, y, copied = seen[name]
            is_output = self._makes_the_scores(copied)
            skipped = self._no_closed_form(name, x, copied, is_output)
            sum_, gain = (None, None) if skipped else self._sum_of(name, copied, tap)
            rectifier = None if skipped or is_output else self._rectifier(name, sum_, gain)
            plans.append(Plan(name, skipped, sum_, gain, rectifier, y._version != versions[name], is_output))
        return _one_to_each_sum(plans, tap, self.walk.modules)

    def _shares_with(self, name: str) -> str:
        """Another layer with the same weights: a fit of one would undo the other's."""
        weight = self.walk.modules[name].weight
        others = (other for other in self.execution.order if other != name)
        return next((other for other in others if self.walk.modules[other].weight is weight), "")

    def _sum_of(self, name: str, y: Tensor, tap: Tap | None) -> tuple[Tap | None, Tensor | None]:
        """The residual sum that a layer ends: the block's, or one inside it that a norm reads; and its gain."""
        block = self.walk.segment.name
        norms = [
            Tap(block, f"{block}.{inside}", "input")
            for inside, module in self.walk.module.named_modules()
            if inside and hasattr(module, "normalized_shape")  # LayerNorm and the like
        ]
        for place in ([] if tap is None else [tap]) + norms:
            gain = self._gain(name, place, y)
            if gain is not None:
                return place, gain
        return None, None

    def _makes_the_scores(self, y: Tensor) -> bool:
        """Is this output of a layer, on the probe, what the network returns?"""
        if not gives_logits(self.walk.model, y):
            return False
        scores = class_scores(self.walk.model(self.walk.batches[self.walk.probe]))
        same = isinstance(scores, Tensor) and scores.shape == y.shape
        return same and torch.allclose(scores, y, rtol=1e-3, atol=1e-4)

    def _no_closed_form(self, name: str, x: Tensor, y: Tensor, is_output: bool) -> str:
        layer = self.walk.modules[name]
        if "weight" not in layer._parameters:
            return "its weight is computed from other parameters (weight norm or the like)"
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
        positions = min(wanted_positions(layer), count_positions(layer, y) * self.images)
        if is_output:  # few do: images that were not fitted decide on its penalty
            return ""
        return f"{positions} positions are too few for its {inputs} inputs" if positions < inputs else ""

    def _rectifier(self, name: str, tap: Tap | None, gain: Tensor | None) -> Rectifier | None:
        """Bounds beyond which the activation behind the layer cuts values off; found by moving them on the probe."""
        walk, layer = self.walk, self.walk.modules[name]
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
            output = self.walk.run(self.walk.probe)
        finally:
            handle.remove()
        return output if any(moved_any) else None

    def _gain(self, name: str, tap: Tap, y: Tensor) -> Tensor | None:
        """1 ÷ how strongly each output channel enters the block's sum, or None where it does not enter it linearly.

        A layer ends a residual block if a change of its output changes the block's pre-activation sum in the same
        place by a fixed factor for each channel: batch norm and layer scale have such factors, an activation has not.
        """
        layer, walk = self.walk.modules[name], self.walk
        change = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y) * y.std().clamp_min(1e-6)
        sums: list[Tensor] = []

        def stop(x):
            sums.append(x.clone())
            raise Reached

        forward = layer.forward
        for stand_in in (forward, lambda *args: forward(*args) + change):
            with standing_in({layer: stand_in}), hooked((walk.modules[tap.module], tap.side, stop)):
                walk.run(walk.probe)
        if len(sums) < 2 or not isinstance(sums[0], Tensor) or sums[0].shape != y.shape:
            return None
        moved = sums[1] - sums[0]
        if not moved.any():  # it comes before the layer
            return None
        channel = 1 if isinstance(layer, nn.Conv2d) else -1
        change, moved = change.transpose(0, channel).flatten(1), moved.transpose(0, channel).flatten(1)
        factor = (change * moved).sum(1) / change.square().sum(1)
        error = (moved - factor.unsqueeze(1) * change).norm(dim=1) / moved.norm(dim=1).clamp_min(1e-12)
        if float(error.median()) > 1e-2:
            return None
        usable = (error < 1e-2) & (factor.abs() > 1e-3 * factor.abs().median())
        return torch.where(usable, 1 / factor.where(usable, torch.ones_like(factor)), torch.zeros_like(factor))


def layers_of_other_positions(student: nn.Module, teacher: nn.Module, images: Tensor) -> list[str]:
    """Layers that see more or fewer positions in the student: heads that are gone were images to a conv over heads.

    Example:
        >>> layers_of_other_positions(model, model, torch.zeros(1, 3, 64, 64))
        []
    """
    ours, theirs = (_positions(network, images) for network in (student, teacher))
    return [name for name, shape in ours.items() if theirs.get(name, shape) != shape]


def _positions(model: nn.Module, images: Tensor) -> dict[str, tuple[int, ...]]:
    """Shape of each conv's and linear's output, less its channels."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name, channel):
        def hook(y):
            shapes[name] = tuple(size for dim, size in enumerate(y.shape) if dim != channel % y.dim())

        return hook

    kinds = ((nn.Conv2d, 1), (nn.Linear, -1))
    layers = ((n, m, dim) for n, m in model.named_modules() for kind, dim in kinds if isinstance(m, kind))
    with torch.no_grad(), hooked(*((module, "output", note(name, dim)) for name, module, dim in layers)):
        model(images)
    return shapes


def _same(a: Any, b: Any) -> bool:
    pairs = zip(tree_flatten(a)[0], tree_flatten(b)[0], strict=True)
    return all(torch.equal(x, y) for x, y in pairs if isinstance(x, Tensor))


def _one_to_each_sum(plans: list["Plan"], tap: Tap | None, modules: Mapping[str, nn.Module]) -> list["Plan"]:
    """Of several layers that add to one sum (a branch and a shortcut's conv), one is fitted to it, the others before.

    It is the one with the most weights for each output; the others are fitted to their own outputs. The block's own
    sum comes last of all.
    """
    chosen: dict[Tap, Plan] = {}
    for plan in plans:
        rival = chosen.get(plan.sum) if plan.gain is not None else None
        if plan.gain is not None and (rival is None or _inputs(plan, modules) > _inputs(rival, modules)):
            chosen[plan.sum] = plan
    kept = [
        plan if plan.gain is None or chosen[plan.sum] is plan else replace(plan, sum=None, gain=None, rectifier=None)
        for plan in plans
    ]
    last = [plan for plan in kept if plan.gain is not None and plan.sum == tap]
    return [plan for plan in kept if plan not in last] + last


def _inputs(plan: "Plan", modules: Mapping[str, nn.Module]) -> int:
    return modules[plan.name].weight[0].numel()
