"""All layers of a block at once, fitted to the block's output: what one layer after another can't reach.

Layer by layer, an inner layer is fitted to the teacher's map at the channels that were kept, although other values
there may serve the block's output better. Here the weights and shifts of all its layers move together towards the
least squared error of the block's output, on the student's own inputs, by Gauss-Newton steps: the system's matrix is
taken as a Kronecker product for each layer, of the Gram matrix of its inputs, which the fit before has made, and of how
strongly its outputs reach the block's output, which one pass with random signs tells; conjugate directions make up for
what that leaves out, and the length of a step is that of the parabola through the error itself. There is no rate and
no schedule; images that are held out decide which of the states is kept.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..maps.patches import draw_positions, flat_weight, outputs
from ..maps.taps import the_map
from ..maps.walk import Walk, hooked

log = logging.getLogger(__name__)

HELD_OUT = 8  # one in so many images decides which state is kept
DAMPING = 1e-1  # of the matrices' mean diagonal
PROBED = 32  # images that tell how layers reach the block's output
TRIES = 3  # of a step's length
LEAST_GAIN = 0.01  # of the error on images held out: a step that gains less is the last
POSITIONS = 20_000  # of a layer's map, whose gradients are looked at


@dataclass(frozen=True)
class FittedLayer:
    """A layer with the second moments of what it sees, after its own fit.

    Attributes:
        gram: [groups, inputs, inputs], mean of x xᵀ.
        mean: [groups, inputs].
        norm: the BatchNorm behind it, which takes its shift up where it has no bias.
    """

    name: str
    gram: Tensor
    mean: Tensor
    norm: str | None


class _Layer:
    """A layer on its way: its weight and shift, their gradients, and the matrices that precondition them."""

    def __init__(self, fitted: FittedLayer, module: nn.Module):
        self.fitted, self.module = fitted, module
        self.shifts = module.bias is not None or fitted.norm is not None
        # a bias for the while, also where there is none: so it costs no pass of its own
        self.bias = module.bias
        own = module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias.detach().clone()
        self.shift = nn.Parameter(own)
        gram = fitted.gram.double()
        if self.shifts:
            mean = fitted.mean.double().unsqueeze(2)
            one = torch.ones_like(mean[:, :1])
            gram = torch.cat([torch.cat([gram, mean], 2), torch.cat([mean.transpose(1, 2), one], 2)], 1)
        self.inputs = _factor(gram)
        self.outputs: Tensor | None = None
        self.gradient = torch.zeros(0)
        self.reach = torch.zeros(0)
        self.positions = 0.0

    def flat(self) -> Tensor:
        """Weight and shift as [groups, inputs (+ 1), outputs], float64."""
        weight = flat_weight(self.module).double()
        return self._with_shift(weight, self.shift.double())

    def _with_shift(self, weight: Tensor, shift: Tensor) -> Tensor:
        return torch.cat([weight, shift.reshape(weight.shape[0], 1, -1)], 1) if self.shifts else weight

    def set(self, flat: Tensor) -> None:
        weight = flat
        if self.shifts:
            weight = flat[:, :-1]
            self.shift.copy_(flat[:, -1].reshape(-1))
        self.module.weight.copy_(weight.transpose(1, 2).reshape(self.module.weight.shape))

    def conditioned(self, gradient: Tensor) -> Tensor:
        solved = torch.cholesky_solve(gradient, self.inputs)
        return torch.cholesky_solve(solved.transpose(1, 2), self.outputs).transpose(1, 2)

    def finish(self, modules: Mapping[str, nn.Module]) -> None:
        """Hand the shift over to the layer's own bias, or to the norm behind it."""
        if self.bias is not None:
            self.bias.copy_(self.shift)
        elif self.fitted.norm is not None:
            mean = modules[self.fitted.norm].running_mean
            mean.sub_(self.shift.detach().to(mean.dtype))


class JointFit:
    """Fits the layers of the walk's current segment to its output.

    Args:
        walk: the student, standing at the segment.
        layers: those that move.
        targets: of each batch, what the segment should return.
        seeds: a number for each batch, the same whichever process has it; the first batch of all has 0.
        add_up: sums a tensor over all processes.
    """

    def __init__(
        self,
        walk: Walk,
        layers: Sequence[FittedLayer],
        targets: Sequence[Tensor],
        seeds: Sequence[int],
        add_up: Callable[[Tensor], Tensor],
    ):
        self.walk, self.targets, self.seeds, self.add_up = walk, targets, seeds, add_up
        self.layers = [_Layer(layer, walk.modules[layer.name]) for layer in layers]
        self.device = self.layers[0].module.weight.device

    def run(self, steps: int) -> tuple[float, float]:
        """Share of the output's variance that is missed on images held out, before and after."""
        with self._moving():
            self.scale = self._target_energy()
            self._measure_reach()
            best = before = None
            kept: list[Tensor] = []
            previous: tuple[list[Tensor], list[Tensor], list[Tensor], float] | None = None
            for step in range(steps + 1):
                error, held = self._errors(gradients=step < steps)
                before = held if before is None else before
                last = best
                if last is None or held < last:
                    best, kept = held, [layer.flat() for layer in self.layers]
                if step == steps or (last is not None and held > (1 - LEAST_GAIN) * last):
                    break  # images that were not fitted say that it is enough
                previous = self._step(error, previous)
                if previous is None:
                    break
            for layer, flat in zip(self.layers, kept, strict=True):
                layer.set(flat)
        for layer in self.layers:
            layer.finish(self.walk.modules)
        return before, best

    def _step(self, error: float, previous):
        """One conjugate step; None where none leads down."""
        gradients = [layer.gradient for layer in self.layers]
        conditioned = [-layer.conditioned(gradient) for layer, gradient in zip(self.layers, gradients, strict=True)]
        direction, length = conditioned, 0.5
        if previous is not None:
            before, along, steepest, length = previous
            change = sum(((a - b) * c).sum() for a, b, c in zip(gradients, before, conditioned, strict=True))
            share = float(change / sum((b * c).sum() for b, c in zip(before, steepest, strict=True)))
            if share > 0:
                direction = [new + share * old for new, old in zip(conditioned, along, strict=True)]
        slope = float(sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)))
        if not slope < 0:
            direction = conditioned
            slope = float(sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)))
        if not slope < 0:
            return None
        start = [layer.flat() for layer in self.layers]

        def move(length: float) -> None:
            for layer, flat, along in zip(self.layers, start, direction, strict=True):
                layer.set(flat + length * along)

        for _ in range(TRIES):
            move(length)
            there, _ = self._errors(gradients=False)
            bend = (there - error - length * slope) / length**2
            best = -slope / (2 * bend) if bend > 0 else 2 * length
            if not best == best or there == float("inf"):
                best = length / 10
            elif length / 3 < best < 3 * length:
                break
            length = min(max(best, length / 5), 5 * length)
        move(best)
        return gradients, direction, conditioned, best

    # ---- passes

    def _errors(self, gradients: bool) -> tuple[float, float]:
        """Squared error of the output on fitted and on held-out images, as shares of the targets' variance."""
        for layer in self.layers:
            layer.gradient = torch.zeros_like(layer.flat())
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch, (target, seed) in enumerate(zip(self.targets, self.seeds, strict=False)):
            output = the_map(self.walk.run(batch, gradients=gradients))
            missed = output.detach().float() - target
            lost = torch.linalg.vector_norm(missed, dim=list(range(1, missed.dim()))).double().square()
            held = _held_out(len(lost), seed).to(lost.device)
            sums += torch.stack([lost[~held].sum() / self.scale[0], lost[held].sum() / self.scale[1]])
            if gradients:
                worth = (~held).to(missed) * (2 / self.scale[0])
                output.backward(missed.mul_(worth.reshape(-1, *[1] * (missed.dim() - 1))).to(output.dtype))
                self._collect()
        if gradients:
            for layer in self.layers:
                layer.gradient = self.add_up(layer.gradient)
        fitted, held = (float(value) for value in self.add_up(sums))
        return fitted, held

    def _collect(self) -> None:
        for layer in self.layers:
            weight = layer.module.weight
            groups = layer.gradient.shape[0]
            if weight.grad is not None:
                flat = weight.grad.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2).double()
                shift = layer.shift.grad if layer.shift.grad is not None else torch.zeros_like(layer.shift)
                layer.gradient += layer._with_shift(flat, shift.double())
            weight.grad = layer.shift.grad = None

    def _target_energy(self) -> tuple[float, float]:
        """Summed variance of the targets over fitted and over held-out images."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for target, seed in zip(self.targets, self.seeds, strict=False):
            dims = [0, *range(2, target.dim())] if target.dim() == 4 else list(range(target.dim() - 1))
            spread = (target - target.mean(dims, keepdim=True)).square().flatten(1).sum(1).double()
            held = _held_out(len(spread), seed).to(spread.device)
            sums += torch.stack([spread[~held].sum(), spread[held].sum()])
        fitted, held = (float(value) for value in self.add_up(sums))
        return max(fitted, 1e-30), max(held, 1e-30)

    def _measure_reach(self) -> None:
        """How strongly each layer's outputs reach the segment's, from one pass back with random signs."""
        for layer in self.layers:
            groups, width = layer.fitted.gram.shape[0], layer.module.weight.shape[0] // layer.fitted.gram.shape[0]
            layer.reach = torch.zeros(groups, width, width, dtype=torch.float64, device=self.device)
            layer.seen = torch.zeros(2, dtype=torch.float64, device=self.device)
        if 0 in self.seeds:
            self._probe_reach(self.seeds.index(0))
        images = torch.tensor(float(sum(map(len, self.targets))), dtype=torch.float64, device=self.device)
        images = self.add_up(images)
        for layer in self.layers:
            reach, (count, positions) = self.add_up(layer.reach), self.add_up(layer.seen)
            reach = reach / count.clamp_min(1)
            # the error's second derivative along both factors: 2 ÷ scale × positions of all images
            layer.outputs = _factor(reach * float(2 / self.scale[0] * positions * images))

    def _probe_reach(self, batch: int) -> None:
        caught: dict[str, Tensor] = {}

        def catch(name):
            def hook(y):
                if y.requires_grad:
                    y.register_hook(lambda gradient: caught.__setitem__(name, gradient.detach()))

            return hook

        hooks = [(layer.module, "output", catch(layer.fitted.name)) for layer in self.layers]
        with hooked(*hooks):
            output = the_map(self.walk.run(batch, gradients=True))
        signs = torch.randint(0, 2, output.shape, generator=torch.Generator().manual_seed(0)).to(output) * 2 - 1
        signs[PROBED:] = 0
        output.backward(signs)
        for layer in self.layers:
            layer.module.weight.grad = layer.shift.grad = None
            gradient = caught.get(layer.fitted.name)
            if gradient is None:
                continue
            gradient = gradient[:PROBED]
            at = draw_positions(layer.module, gradient, POSITIONS, seed=0)
            rows = outputs(layer.module, gradient, at).double()
            layer.reach += rows.transpose(1, 2) @ rows
            every = gradient[0].numel() // layer.module.weight.shape[0]
            layer.seen += torch.tensor([float(rows.shape[1]), float(every)], dtype=torch.float64, device=self.device)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Layers add their shift and collect gradients; everything else in the student stays as it is."""
        parameters = list(self.walk.model.parameters())
        wanted = [parameter.requires_grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.requires_grad_(False)
            for layer in self.layers:
                layer.module.weight.requires_grad_(True)
                if layer.shifts:
                    layer.module.bias = layer.shift
            yield
        finally:
            for layer in self.layers:
                layer.module.bias = layer.bias
            for parameter, was in zip(parameters, wanted, strict=True):
                parameter.requires_grad_(was)
                parameter.grad = None


def _held_out(count: int, seed: int) -> Tensor:
    """Which of a batch's images are held out: every eighth, counted on from batch to batch, so that small ones do."""
    return (seed * count + torch.arange(count)) % HELD_OUT == HELD_OUT - 1


def _factor(matrix: Tensor) -> Tensor:
    """The Cholesky factor of a symmetric matrix with a little more on its diagonal."""
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    more = DAMPING * diagonal.mean(1, keepdim=True).clamp_min(1e-30)
    return torch.linalg.cholesky(matrix + torch.diag_embed(more.expand_as(diagonal)))
