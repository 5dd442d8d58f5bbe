"""What a run is tuned with where its config does not say: chosen from what the run is, and from where it starts.

A recovered network is a good start, and a rate that suits a long run from a poor one destroys it in a few updates. So
nothing here is a constant of taste; each choice follows from something counted or measured before the first update:

- **optimizer**: SGD for networks with BatchNorm, AdamW for those without (transformers, ConvNeXt).
- **freeze_bn_stats**: statistics are estimated anew only where a batch holds enough images (`MIN_SHARE` on each
  process) and there are enough updates (`MIN_UPDATES`, several times the memory of a running average).
- **lr** of SGD: ``reach / sharpness``. The sharpness is the largest curvature of the loss at the start, the median
  over a few batches (`measure_sharpness`; one alone may be off by three times): above about ``2 / sharpness`` any start
  is left in a zigzag, however good. ``reach`` is ½ for few updates and grows with the square root of their number, to 4
  at most: a long run has time to come back, and it ends where the loss is flatter. A start that is close to its
  teacher has little to regain, and so much less to travel (`NEAR`); and where no inner map is held in place, the labels
  or logits alone pull a good start apart at a rate that inner distillation gains with (`ALONE`). For adaptive
  optimisers, which rescale the gradient themselves, twice the reach, which grows slower, applies to `ADAPTIVE_LR`.
- **warmup_epochs**: a tenth of the updates, at least two and at most `MAX_WARMUP`, from 0.
- **ema_decay**: an average over the last twentieth of the updates, for runs of at least `EMA_UPDATES`; else none.
- **mixed_precision**: bfloat16 for a run of minutes and more, where the hardware is clearly faster at it and nobody
  told Accelerate anything (`setup`).
- **label_smoothing**: none beside KD, whose targets are soft already, nor in short runs; else 0.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .config import FinetuneConfig
from .distillation import DistillationModule
from .epoch_batches import seed_all

MIN_SHARE = 16  # images on each process
MIN_UPDATES = 30  # BatchNorm's running average forgets all but 4 % in 30 updates
NEAR = 0.02  # nats from the teacher, below which the rate falls
ALONE = 0.2  # of the rate, without inner distillation
MAX_LR = 0.1
ADAPTIVE_LR = 1e-4
SHORT_RUN = 40  # updates
REACH, MAX_REACH = 0.5, 4.0  # of a short run, and of any
ADAPTIVE_GROWTH = 0.25  # power of the number of updates by which the reach of adaptive optimisers grows; ½ for SGD
MAX_WARMUP = 1000
EMA_UPDATES = 1000
SHARPNESS_BATCHES = 4  # at the most: from one batch to another of ResNet-56 it moves between 114 and 284
SHARPNESS_IMAGES = 64  # of each, in float32, also where training is in bf16: more may not fit
_STEP = 1e-4  # of the finite difference, relative to the norm of all weights


@dataclass(frozen=True)
class RunFacts:
    """What the choices follow from.

    Attributes:
        updates, updates_per_epoch: of the optimiser.
        share: images of a batch that one BatchNorm sees: those of one process.
        batchnorm: whether the student has any.
        distance: KL divergence of the student from its teacher at the start, in nats; None without a teacher.
        sharpness: see `measure_sharpness`; None where it was not needed.
    """

    updates: int
    updates_per_epoch: int
    share: int
    batchnorm: bool
    distance: float | None = None
    sharpness: float | None = None


def choose_kind(config: FinetuneConfig, facts: RunFacts) -> FinetuneConfig:
    """The config with its optimiser and its handling of BatchNorm chosen: what must be known to measure sharpness.

    Example:
        >>> facts = RunFacts(updates=7, updates_per_epoch=7, share=64, batchnorm=True)
        >>> chosen = choose_kind(FinetuneConfig(epochs=1), facts)
        >>> chosen.optimizer, chosen.freeze_bn_stats
        ('sgd', True)
    """
    if config.optimizer is None:
        config = replace(config, optimizer="sgd" if facts.batchnorm else "adamw")
    if config.freeze_bn_stats is None:
        few = facts.share < MIN_SHARE or facts.updates < MIN_UPDATES
        config = replace(config, freeze_bn_stats=facts.batchnorm and few)
    return config


def choose_rates(config: FinetuneConfig, facts: RunFacts) -> FinetuneConfig:
    """The config with nothing left open.

    Example:
        >>> facts = RunFacts(updates=39, updates_per_epoch=39, share=128, batchnorm=True, distance=0.2,
        ...     sharpness=80.0)
        >>> chosen = choose_rates(choose_kind(FinetuneConfig(epochs=1), facts), facts)
        >>> chosen.lr, round(chosen.warmup_epochs * 39), chosen.ema_decay, chosen.distillation.label_smoothing
        (0.00625, 4, 0, 0.0)
    """
    long = facts.updates >= EMA_UPDATES
    if config.lr is None:
        config = replace(config, lr=_rate(config, facts))
    if config.min_lr is None:
        config = replace(config, min_lr=min(1e-5, config.lr / 100))
    if config.warmup_epochs is None:
        updates = min(max(2, round(facts.updates / 10)), MAX_WARMUP, facts.updates // 2)
        without = config.scheduler == "constant"
        config = replace(config, warmup_epochs=0 if without else updates / facts.updates_per_epoch)
    if config.ema_decay is None:
        config = replace(config, ema_decay=round(1 - 20 / facts.updates, 6) if long else 0)
    if config.distillation.label_smoothing is None:
        smoothing = 0.1 if long and not config.distillation.kd_weight else 0.0
        config = replace(config, distillation=replace(config.distillation, label_smoothing=smoothing))
    return config


def needs_sharpness(config: FinetuneConfig) -> bool:
    return config.lr is None and _is_sgd(config)


def sharpness_batches(updates: int) -> int:
    """On how many batches to measure it: each costs four gradients, which a short run can't spare.

    Example:
        >>> sharpness_batches(7), sharpness_batches(100), sharpness_batches(3900)
        (1, 2, 4)
    """
    return max(1, min(SHARPNESS_BATCHES, updates // SHORT_RUN))


def _is_sgd(config: FinetuneConfig) -> bool:
    return "sgd" in config.optimizer or config.optimizer in ("momentum", "nesterov")


def _rate(config: FinetuneConfig, facts: RunFacts) -> float:
    growth = 0.5 if _is_sgd(config) else ADAPTIVE_GROWTH
    reach = min(REACH * max(1.0, facts.updates / SHORT_RUN) ** growth, MAX_REACH)
    if facts.distance is not None:
        reach *= min(1.0, math.sqrt(max(facts.distance, 1e-4) / NEAR))
    if not config.distillation.ikd_weight:
        reach *= ALONE
    rate = reach / max(facts.sharpness, 1e-6) if _is_sgd(config) else 2 * reach * ADAPTIVE_LR
    return float(f"{min(rate, MAX_LR):.3g}")  # as it is printed, so that it can be given again


def describe_choice(asked: FinetuneConfig, chosen: FinetuneConfig, facts: RunFacts) -> str:
    """One line: what was chosen, and from what; empty where nothing was left open.

    Example:
        >>> facts = RunFacts(updates=7, updates_per_epoch=7, share=64, batchnorm=True, sharpness=2700.0)
        >>> asked = FinetuneConfig(epochs=1, optimizer="sgd", ema_decay=0)
        >>> print(describe_choice(asked, choose_rates(choose_kind(asked, facts), facts), facts))
        chosen for 7 updates of 64 images on each process, sharpness 2.7e+03: rate 0.000185, warm-up over 2 updates, \
BatchNorm statistics frozen, label smoothing 0
    """
    words = []
    if asked.optimizer is None:
        words.append(chosen.optimizer)
    if asked.lr is None:
        words.append(f"rate {chosen.lr:g}")
    if asked.warmup_epochs is None:
        words.append(f"warm-up over {round(chosen.warmup_epochs * facts.updates_per_epoch)} updates")
    if asked.freeze_bn_stats is None and facts.batchnorm:
        words.append(f"BatchNorm statistics {'frozen' if chosen.freeze_bn_stats else 'updated'}")
    if asked.ema_decay is None:
        words.append(f"EMA {chosen.ema_decay:g}" if chosen.ema_decay else "no EMA")
    if asked.distillation.label_smoothing is None:
        words.append(f"label smoothing {chosen.distillation.label_smoothing:g}")
    if asked.mixed_precision is None and chosen.mixed_precision == "bf16":
        words.append("bfloat16")
    measured = "" if facts.distance is None else f", KL {facts.distance:.2g} from the teacher"
    measured += "" if facts.sharpness is None else f", sharpness {facts.sharpness:.2g}"
    run = f"{facts.updates} updates of {facts.share} images on each process{measured}"
    return f"chosen for {run}: {', '.join(words)}" if words else ""


def measure_sharpness(
    module: DistillationModule,
    images: torch.Tensor,
    targets: torch.Tensor,
    seed: int = 0,
    average: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> float:
    """The largest curvature of the loss at the start, by three steps of power iteration with differences of gradients.

    The modes decide: with frozen statistics the loss bends several times more. Weights and statistics are given back as
    they were, bit for bit.

    Args:
        average: takes the mean of a tensor over all processes, so that each finds the sharpness of the whole batch.

    Example:
        >>> from torch import nn
        >>> from timm_knapsack import DistillationConfig
        >>> line = nn.Linear(1, 2, bias=False)
        >>> loss = DistillationModule(line, None, DistillationConfig(kd_weight=0, ikd_weight=0))
        >>> _ = nn.init.zeros_(line.weight)
        >>> round(measure_sharpness(loss, 2 * torch.ones(4, 1), torch.tensor([0, 1, 0, 1])), 2)  # x²/2 at p = ½
        2.0
    """
    images, targets = images[:SHARPNESS_IMAGES].float(), targets[:SHARPNESS_IMAGES]
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def gradient() -> list[torch.Tensor]:
        seed_all(seed, "sharpness")  # the same dropout each time
        found = torch.autograd.grad(module(images, targets).total, weights, allow_unused=True)
        found = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
        return [average(part) for part in found] if average else found

    def norm(vector: list[torch.Tensor]) -> float:
        return math.sqrt(sum(float(part.detach().double().square().sum()) for part in vector))

    first = direction = gradient()
    if not norm(first):  # as at an exact copy of the teacher
        direction = [torch.randn_like(weight) for weight in weights]
    curvature, step = 0.0, _STEP * max(norm(weights), 1.0)
    for _ in range(3):
        scale = step / norm(direction)
        with torch.no_grad():
            for weight, part in zip(weights, direction, strict=True):
                weight.add_(part, alpha=scale)
        moved = gradient()
        with torch.no_grad():
            for weight, part in zip(weights, direction, strict=True):
                weight.sub_(part, alpha=scale)
        direction = [(after - before) / step for after, before in zip(moved, first, strict=True)]
        curvature = norm(direction)
        if not curvature or not math.isfinite(curvature):
            break
    module.load_state_dict(kept)
    return curvature if math.isfinite(curvature) else math.inf
