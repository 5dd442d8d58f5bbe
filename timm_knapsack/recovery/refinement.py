"""Refine: a few hundred gradient steps on the same unlabelled images, for users who don't have the training set.

The student learns the teacher's outputs and the maps at the end of its blocks, on mixed views of the images, by Adam
with steps that are a share of each weight's own size, the same for all. How large a share follows from the network: a
step of random signs must cost little of what there is to regain. BatchNorm statistics stay as recovery left them.
Images that are held out decide whether the last state is kept, or one on the way that is clearly better: the last steps
are the smallest, and few images tell states apart poorly. The first of the states is the start, so that it never ends
below where it began.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import KnapsackError
from ..maps.batches import image_batches, varied
from ..maps.channels_last import channels_last
from ..maps.distance import gives_logits, output_distance
from ..maps.precision import fast_passes, runs_in_bfloat16, step_gains
from ..maps.stand_ins import sliced_points, standing_in
from ..maps.taps import Tap, alike_channels, block_taps, listen
from ..maps.views import mixed_views, random_views
from ..slim.example_inputs import example_dtype
from ..slim.kept_channels import kept_of
from ..slim.modes import eval_mode
from ..slim.wrappers import for_images, worked_on

log = logging.getLogger(__name__)

HELD_OUT = 8  # one in so many images decides which state is kept
LEAST_IMAGES = 4
BATCH = 32
EPOCHS = 24
CHECKS = 6  # states on the way that are compared
CLEARLY = 1.0  # standard errors by which an earlier state must be better than the last
STEP = 12e-3  # of a weight's own size, at the peak of the schedule, at the most
RANDOM_LOSS = 0.12  # of the start's distance: what a step of random signs may add to it, or steps are halved
HALVINGS = 4  # at the most
WARM_UP = 0.1  # of all steps
INNER = 100.0  # weight of the blocks' relative squared error beside the outputs' divergence
TEMPERATURE = 2.0


@dataclass(frozen=True)
class Refinement:
    """What became of a student.

    Attributes:
        before: distance from the teacher's outputs on held-out images at the start.
        after: the same at the end; never more than before.
        steps: gradient steps that were made.
        kept: the step whose state was kept; 0 is the start.
    """

    before: float
    after: float
    steps: int
    kept: int


def refine(
    student: nn.Module,
    teacher: nn.Module,
    loader: Iterable,
    *,
    kept: Mapping[str, Tensor] | None = None,
    epochs: float = EPOCHS,
    images: int | None = None,
    accelerator=None,
    seed: int = 0,
) -> nn.Module:
    """Bring a recovered student closer to its teacher by gradients, without labels, in place; returns the student.

    One in eight images is held out and decides which state is kept; the start is one of them. The student never sees
    an image alone, but pairs that are mixed, so that it does not learn the few there are by heart. A student that was
    recovered on the images held out, too, is judged by images it knows, and its start may be kept for that alone:
    `prune(…, refine=True)` leaves them out of the recovery.

    Args:
        loader: images, or (images, labels); labels are not used. They are held in memory.
        kept: ``result.kept_channels``; a model that comes from `prune` carries it.
        epochs: how often each image is seen.
        images: use at most this many.
        accelerator: of several processes, each takes its share of the images, and gradients are averaged.
        seed: fixes order and views.

    Example:
        >>> result = prune(model, loader, budget=Budget(macs=0.5))
        >>> student = refine(result.model, model, loader)
    """
    refine_steps(student, teacher, loader, kept=kept, epochs=epochs, images=images, accelerator=accelerator, seed=seed)
    return student


def refine_steps(
    student, teacher, loader, *, kept=None, epochs=EPOCHS, images=None, accelerator=None, seed=0
) -> Refinement:
    """As `refine`; returns what became of the student."""
    with worked_on(student) as inner:
        return _refine(inner, for_images(teacher), loader, kept, epochs, images, accelerator, seed)


def _refine(student, teacher, loader, kept, epochs, images, accelerator, seed) -> Refinement:
    if not epochs > 0:
        raise KnapsackError(f"epochs={epochs}: give a number above 0")
    kept = dict(kept if kept is not None else kept_of(student, teacher))
    device = next(student.parameters()).device
    pixels = torch.cat(varied(image_batches(loader, images, device, example_dtype(student))))
    _check_enough(len(pixels))
    trainable = [parameter for parameter in student.parameters() if parameter.is_floating_point()]
    wanted = [parameter.requires_grad for parameter in trainable]
    try:
        for parameter in trainable:
            parameter.requires_grad_(True)
        with eval_mode(student, teacher), channels_last(student, teacher, images=pixels) as layout:
            return _Refining(student, teacher, layout.lay(pixels), layout, kept, epochs, accelerator, seed).run()
    finally:
        for parameter, was in zip(trainable, wanted, strict=True):
            parameter.requires_grad_(was)
            parameter.grad = None


def images_to_fit(loader: Iterable, images: int | None = None) -> list[Tensor]:
    """The images that `refine` does not hold out: a student that is to be refined is recovered on these alone.

    Example:
        >>> sum(map(len, images_to_fit([torch.randn(16, 3, 8, 8)])))
        14
    """
    batches = image_batches(loader, images)
    pixels = torch.cat(batches)
    _check_enough(len(pixels))
    return list(pixels[~_held_out(len(pixels))].split(max(map(len, batches))))


def _check_enough(count: int) -> None:
    if count < LEAST_IMAGES:
        raise KnapsackError(
            f"refine got {count} images and needs at least {LEAST_IMAGES}, one of which is held out; a few hundred do"
        )


def _held_out(count: int) -> Tensor:
    """Every eighth image, and the last of fewer."""
    held = torch.zeros(count, dtype=torch.bool)
    every = min(HELD_OUT, count)
    held[every - 1 :: every] = True
    return held


class _Refining:
    def __init__(self, student, teacher, pixels, layout, kept, epochs, accelerator, seed):
        self.student, self.teacher, self.accelerator, self.seed = student, teacher, accelerator, seed
        self.device, self.lay = pixels.device, layout.lay
        held = _held_out(len(pixels))
        fitted = pixels[~held]
        self.held = self._own(torch.cat([pixels[held], random_views(pixels[held], seed, share=1.0)]))
        self.images = self._own(fitted)
        processes = 1 if accelerator is None else accelerator.num_processes
        self.batch = max(1, min(BATCH, len(fitted) // 4) // processes)
        self.steps = max(1, round(epochs * len(fitted) / (self.batch * processes)))
        with torch.no_grad():
            self.logits = gives_logits(teacher, teacher(pixels[:1]))
        self.taps, self.channels = _comparable_taps(student, teacher, kept, pixels[:2])
        self.fast_teacher = runs_in_bfloat16(teacher, pixels)
        self.fast = False  # the student's passes, in bfloat16

    def _own(self, images: Tensor) -> Tensor:
        """This process's share."""
        if self.accelerator is None:
            return images
        return images[self.accelerator.process_index :: self.accelerator.num_processes]

    def _add_up(self, value: Tensor) -> Tensor:
        return value if self.accelerator is None else self.accelerator.reduce(value, "sum")

    def run(self) -> Refinement:
        optimizer = torch.optim.Adam(_sized(self.student))
        references = [self._outputs(self.teacher, part) for part in self.held.split(BATCH)]
        start = best = self._held_out_distances(references)
        state, kept_step = _copied(self.student), 0
        self.step = self._fitting_step(self._mean(start), references)
        self.fast = step_gains(self._gradients_of_a_step, self.device)
        checks = {round(self.steps * (number + 1) / CHECKS) for number in range(CHECKS)}
        for step in range(1, self.steps + 1):
            self._step(optimizer, step)
            if step in checks:
                now = self._held_out_distances(references)
                better, noise = self._comparison(best, now)
                log.info("refine: step %d of %d, better by %.4g (noise %.2g)", step, self.steps, better, noise)
                last = step == self.steps and kept_step > 0
                if better > (-CLEARLY * noise if last else 0.0) and self._comparison(start, now)[0] > 0:
                    best, state, kept_step = now, _copied(self.student), step
        self.student.load_state_dict(state)
        return Refinement(self._mean(start), self._mean(best), self.steps, kept_step)

    def _fitting_step(self, start: float, references: list) -> float:
        """The share of its size by which a weight moves in one step, at the most.

        A network of narrow depthwise convs may lose a third of its distance again by what costs another a tenth.
        """
        state, share = _copied(self.student), STEP
        for _ in range(HALVINGS):
            draw = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                for group in _sized(self.student):
                    parameter = group["params"][0]
                    signs = torch.randint(0, 2, parameter.shape, generator=draw).to(parameter) * 2 - 1
                    parameter.add_(signs, alpha=share * group["size"])
            lost = self._mean(self._held_out_distances(references)) - start
            self.student.load_state_dict(state)
            log.info("refine: a random step of %.2g of each weight adds %.3g to %.3g", share, lost, start)
            if lost <= RANDOM_LOSS * start:
                break
            share /= 2
        return share

    def _step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        rate = self.step * min(1.0, step / (WARM_UP * self.steps))
        rate *= 0.5 * (1 + math.cos(math.pi * (step - 1) / self.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["size"]
        optimizer.zero_grad()
        loss = self._loss(self._views(step))
        if torch.isfinite(loss):
            loss.backward()
        self._share_gradients()
        optimizer.step()

    def _gradients_of_a_step(self) -> None:
        torch.autograd.grad(self._loss(self._views(1)), list(self.student.parameters()), allow_unused=True)

    def _views(self, step: int) -> Tensor:
        """Mixed views of the images whose turn it is; every image comes once in each round, or twice."""
        turns = max(1, len(self.images) // self.batch)
        round_, turn = divmod(step - 1, turns)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed + round_))
        chosen = order[turn * self.batch : (turn + 1) * self.batch].to(self.device)
        rank = 0 if self.accelerator is None else self.accelerator.process_index
        views = mixed_views(self.images[chosen], seed=(self.seed * 1009 + rank) * 1_000_002 + step)
        return self.lay(views)

    def _loss(self, images: Tensor) -> Tensor:
        with torch.no_grad(), fast_passes(self.device, self.fast_teacher), listen(self.teacher, self.taps) as theirs:
            wanted = self.teacher(images)
        safe = standing_in(sliced_points(self.student))
        with fast_passes(self.device, self.fast), safe, listen(self.student, self.taps) as ours:
            made = self.student(images)
        if self.logits:
            log_p, log_q = (x.float().div(TEMPERATURE).log_softmax(1) for x in (wanted, made))
            loss = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * TEMPERATURE**2
        else:
            loss = output_distance(wanted, made, logits=False).mean()
        for tap in self.taps:
            wanted = self.channels[tap.name](theirs[tap.name]).float()
            missed = (ours[tap.name].float() - wanted).square().mean() / wanted.var().clamp_min(1e-12)
            loss = loss + INNER / len(self.taps) * missed
        return loss

    def _share_gradients(self) -> None:
        """The mean over all processes, so that all make the same step."""
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return
        parameters = list(self.student.parameters())
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in parameters])
        flat = self.accelerator.reduce(flat, "mean")
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.reshape(parameter.shape).to(parameter.dtype)

    def _held_out_distances(self, references: list) -> Tensor:
        """Of each of this process's images that are held out."""
        parts = zip(references, self.held.split(BATCH), strict=True)
        return torch.cat([output_distance(r, self._outputs(self.student, x), self.logits) for r, x in parts]).double()

    def _mean(self, distances: Tensor) -> float:
        total, count = self._add_up(torch.stack([distances.sum(), distances.new_tensor(float(len(distances)))]))
        return float(total / count)

    def _comparison(self, earlier: Tensor, now: Tensor) -> tuple[float, float]:
        """By how much the distances have fallen in the mean, and the standard error of that."""
        fallen = earlier - now
        mean = self._mean(fallen)
        count = float(self._add_up(fallen.new_tensor(float(len(fallen)))))
        return mean, math.sqrt(max(self._mean(fallen.square()) - mean**2, 0.0) / max(count, 1.0))

    def _outputs(self, model: nn.Module, images: Tensor):
        with torch.no_grad():
            return model(images)


def _sized(student: nn.Module) -> list[dict]:
    """Parameter groups with the size of what they hold; a bias is measured by the weight beside it."""
    groups = []
    for module in student.modules():
        weight = getattr(module, "weight", None)
        for parameter in module.parameters(recurse=False):
            measured = weight if isinstance(weight, Tensor) else parameter
            size = float(measured.detach().float().square().mean().sqrt()) if measured.numel() else 0.0
            groups.append({"params": [parameter], "lr": 0.0, "size": max(size, 1e-4)})
    seen: set[int] = set()  # shared parameters belong to several modules
    return [g for g in groups if not (id(g["params"][0]) in seen or seen.add(id(g["params"][0])))]


def _comparable_taps(student, teacher, kept, images) -> tuple[list[Tap], dict[str, Callable[[Tensor], Tensor]]]:
    """The ends of blocks whose maps can be compared, and what takes the teacher's there to the student's channels."""
    taps = block_taps(student, images)
    with torch.no_grad():
        with listen(teacher, taps) as theirs:
            teacher(images)
        with listen(student, taps) as ours:
            student(images)
    usable, channels = [], {}
    for tap in taps:
        alike = alike_channels(teacher, tap.name, kept, theirs.get(tap.name), ours.get(tap.name))
        if alike is None:
            log.info("refine: the maps of %s can't be compared channel by channel, so they are left out", tap.name)
        else:
            usable.append(tap)
            channels[tap.name] = alike
    return usable, channels


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())
