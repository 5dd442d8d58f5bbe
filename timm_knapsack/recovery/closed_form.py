"""Rebuild in closed form what pruning lost: no gradients, a few hundred images.

Layer by layer, in the order in which they run, on the student's own features, ridge regression fits each conv or linear
to the teacher's pre-activation map at the channels that were kept. A layer that ends a residual block is fitted to the
teacher's sum minus the student's own shortcut, so that the errors of earlier layers are corrected and not passed on.
The paper's ``M_l`` is the same regressor; here it is folded into the weights and costs nothing at inference.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import KnapsackError
from ..maps.replay import Replay
from ..maps.taps import Tap, find_blocks, find_taps
from ..slim.kept_channels import kept_of
from ..slim.modes import eval_mode
from .ridge import RidgeSums, draw_positions, flat_weight, outputs, patches

log = logging.getLogger(__name__)

POSITIONS = 60_000  # positions of the maps that a layer is fitted on, at most


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
) -> nn.Module:
    """Rebuild the teacher's maps in a pruned student, in place, without gradients; returns the student.

    BatchNorm statistics are corrected along the way. Layers without a closed form (weight-standardised convs, shared
    layers) and layers with more inputs than the images have positions are left alone, and the log says which.

    Args:
        loader: images, or (images, labels); labels are not used. They are held in memory, with one map each.
        kept: ``{layer: the teacher's output channels that the student has}``; a model that comes from `prune`, or from
            a folder that `save_pretrained` wrote, knows them.
        ridge: penalty on the change of the weights, relative to the mean square of the inputs; by default each layer's
            own, the one whose fit on one half of the images does best on the other.
        images: use at most this many.

    Example:
        >>> result = prune(model, loader, budget=Budget(macs=0.5))
        >>> student = recover(result.model, model, loader)
    """
    recover_layers(student, teacher, loader, kept=kept, ridge=ridge, images=images)
    return student


def recover_layers(student, teacher, loader, *, kept=None, ridge=None, images=None) -> list[LayerFit]:
    """As `recover`; returns the fit of each layer."""
    kept = dict(kept if kept is not None else kept_of(student, teacher))
    _check_pair(student, teacher, kept)
    batches = _images(loader, images, next(student.parameters()).device)
    with eval_mode(student, teacher), torch.no_grad():
        return _Recovery(student, teacher, batches, kept, ridge).run()


def reestimate_batchnorm(model: nn.Module, loader: Iterable, *, images: int | None = None) -> nn.Module:
    """Set every BatchNorm's running statistics to the mean over these images, in place: the simplest recovery."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    batches = _images(loader, images, next(model.parameters()).device)
    momenta = [norm.momentum for norm in norms]
    try:
        with eval_mode(model), torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain average over the batches
                norm.train()
            for batch in batches:
                model(batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model


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


def _images(loader: Iterable, limit: int | None, device) -> list[Tensor]:
    batches, count = [], 0
    for batch in loader:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        if not isinstance(x, Tensor):
            raise KnapsackError(f"a batch is a {type(batch).__name__}, expected images or (images, labels)")
        x = x.to(device) if limit is None else x[: limit - count].to(device)
        batches.append(x)
        count += len(x)
        if limit is not None and count >= limit:
            break
    if not count:
        raise KnapsackError("the loader gave no images; recovery needs a few hundred")
    return batches


class _Recovery:
    def __init__(self, student, teacher, batches, kept, ridge):
        self.student, self.teacher, self.kept, self.ridge = student, teacher, kept, ridge
        self.runs = {"student": Replay(student, batches), "teacher": Replay(teacher, batches)}
        self.ours, self.theirs = dict(student.named_modules()), dict(teacher.named_modules())
        self.batches = batches
        self.order, self.norm_after, self.calls = _execution(student, batches[0][:2])
        blocks = find_blocks(student)
        self.taps = {tap.name: tap for tap in find_taps(student, "blocks", batches[0][:2])} if blocks else {}

    def run(self) -> list[LayerFit]:
        fits = []
        changed = False  # nothing to correct before the first layer that differs
        for segment, layers in self._segments():
            for name in layers:
                differs = self.ours[name].weight.shape != self.theirs[name].weight.shape
                changed = changed or differs
                if changed:
                    fits.append(self._fit(name, self.taps.get(segment)))
                    if fits[-1].skipped:
                        log.info("recover: %s is left as it was: %s", name, fits[-1].skipped)
            for side, modules in (("student", self.ours), ("teacher", self.theirs)):
                self.runs[side].finish(modules[segment])
        return fits

    def _segments(self) -> list[tuple[str, list[str]]]:
        """Blocks, and the layers outside of blocks, in the order in which they run."""
        blocks = sorted(self.taps, key=len, reverse=True)
        segments: dict[str, list[str]] = {}
        for name in self.order:
            block = next((b for b in blocks if name.startswith(b + ".")), name)
            segments.setdefault(block, []).append(name)
        return list(segments.items())

    def _fit(self, name: str, tap: Tap | None) -> LayerFit:
        layer = self.ours[name]
        skipped = self._no_closed_form(name)
        if skipped:
            return LayerFit(name, "layer", 0.0, 0.0, skipped)
        inputs = layer.weight[0].numel()
        positions = min(POSITIONS, self._positions(layer) * sum(len(batch) for batch in self.batches))
        if positions < inputs:
            return LayerFit(name, "layer", 0.0, 0.0, f"{positions} positions are too few for its {inputs} inputs")
        gain = self._gain(name, tap) if tap is not None else None
        sums = RidgeSums(layer)
        share = max(1, POSITIONS // len(self.batches))
        for batch in range(len(self.batches)):
            x, now, target = self._maps(batch, name, tap, gain)
            at = draw_positions(layer, now, share, seed=batch)
            columns, now, target = patches(layer, x, at), outputs(layer, now, at), outputs(layer, target, at)
            sums.add(columns.float(), (target - now).float(), target.float())
        norm = self.norm_after.get(name)
        takes_intercept = layer.bias is not None or norm is not None
        fit = sums.fit(self.ridge, takes_intercept)
        if not torch.isfinite(fit.weight).all():
            return LayerFit(name, "layer", fit.error_before, fit.error_before, "the fit is not finite")
        layer.weight.copy_(fit.weight)
        if layer.bias is not None:
            layer.bias.add_(fit.intercept.to(layer.bias.dtype))
        elif norm is not None:
            mean = self.ours[norm].running_mean
            mean.sub_(fit.intercept.to(mean.dtype))
        return LayerFit(name, "layer" if gain is None else "block", fit.error_before, fit.error_after)

    def _no_closed_form(self, name: str) -> str:
        layer = self.ours[name]
        if self.calls[name] != 1:
            return f"it runs {self.calls[name]} times in one forward pass"
        seen = self.runs["student"].first(2).run(0, layer, wanted={"x": (layer, "input")})
        try:
            columns = patches(layer, seen["x"])
        except ValueError as error:
            return str(error)
        now = outputs(layer, seen["until"])
        made = columns @ flat_weight(layer)
        if layer.bias is not None:
            made = made + layer.bias.reshape(made.shape[0], 1, -1)
        if not torch.allclose(made, now, rtol=1e-2, atol=1e-3 * float(now.abs().max().clamp_min(1e-6))):
            return "its weights are computed while it runs (weight standardisation or the like)"
        return ""

    def _positions(self, layer: nn.Module) -> int:
        """Output positions in one image."""
        y = self.runs["student"].first(1).run(0, layer)["until"]
        return y[0].numel() // layer.weight.shape[0]

    def _maps(self, batch, name, tap, gain) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's input, its output now, and what its output should be."""
        ours, theirs = self.ours[name], self.theirs[name]
        index = self.kept.get(name)
        if gain is None:
            seen = self.runs["student"].run(batch, ours, wanted={"x": (ours, "input")})
            full = self.runs["teacher"].run(batch, theirs)["until"]
            return seen["x"], seen["until"], _select(full, index, ours)
        wanted = {"x": (ours, "input"), "y": (ours, "output")}
        seen = self.runs["student"].run(batch, self.ours[tap.module], tap.side, wanted)
        full = self.runs["teacher"].run(batch, self.theirs[tap.module], tap.side)["until"]
        missing = _select(full, index, ours) - seen["until"]
        shape = [1, -1] + [1] * (missing.dim() - 2) if isinstance(ours, nn.Conv2d) else [-1]
        return seen["x"], seen["y"], seen["y"] + missing * gain.reshape(shape)

    def _gain(self, name: str, tap: Tap) -> Tensor | None:
        """1 ÷ how strongly each output channel enters the block's sum, or None where it does not enter it linearly.

        A layer ends a residual block if a change of its output changes the block's pre-activation sum in the same
        place by a fixed factor for each channel: batch norm and layer scale have such factors, an activation has not.
        """
        layer, run = self.ours[name], self.runs["student"].first(8)
        seen = run.run(0, self.ours[tap.module], tap.side, {"y": (layer, "output")})
        y, plain = seen["y"], seen["until"]
        if not isinstance(plain, Tensor) or plain.shape != y.shape:
            return None
        change = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y) * y.std().clamp_min(1e-6)
        handle = layer.register_forward_hook(lambda m, i, out: out + change)
        try:
            moved = run.run(0, self.ours[tap.module], tap.side)["until"] - plain
        finally:
            handle.remove()
        channel = 1 if isinstance(layer, nn.Conv2d) else -1
        change, moved = change.transpose(0, channel).flatten(1), moved.transpose(0, channel).flatten(1)
        factor = (change * moved).sum(1) / change.square().sum(1)
        error = (moved - factor.unsqueeze(1) * change).norm(dim=1) / moved.norm(dim=1).clamp_min(1e-12)
        if float(error.median()) > 1e-2:
            return None
        usable = (error < 1e-2) & (factor.abs() > 1e-3 * factor.abs().median())
        return torch.where(usable, 1 / factor.where(usable, torch.ones_like(factor)), torch.zeros_like(factor))


def _select(full: Tensor, index: Tensor | None, layer: nn.Module) -> Tensor:
    if index is None:
        return full
    return full.index_select(1 if isinstance(layer, nn.Conv2d) else -1, index.to(full.device))


def _execution(model: nn.Module, images: Tensor) -> tuple[list[str], dict[str, str], dict[str, int]]:
    """The convs and linears in the order in which they run, the BatchNorm right behind each, how often each runs."""
    order: list[str] = []
    calls: dict[str, int] = {}
    made_by: dict[int, str] = {}
    norm_after: dict[str, str] = {}
    held, handles = [], []

    def ran(name):
        def hook(module, args, output):
            if name not in calls:
                order.append(name)
            calls[name] = calls.get(name, 0) + 1
            made_by[id(output)] = name
            held.append(output)

        return hook

    def normed(name):
        def hook(module, args):
            if id(args[0]) in made_by:
                norm_after[made_by[id(args[0])]] = name

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            handles.append(module.register_forward_hook(ran(name)))
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            handles.append(module.register_forward_pre_hook(normed(name)))
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return order, norm_after, calls
