"""What a training run is made of, built from its config: timm's optimiser, schedule, mixing and averaging."""

import json
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import DataError, TrainingError
from ..maps.precision import image_macs, step_gains
from ..maps.stand_ins import sliced_points, standing_in
from ..slim.modes import eval_mode
from .config import FinetuneConfig
from .distillation import DistillationConfig, DistillationModule
from .epoch_batches import EpochBatches
from .processes import check_distribution
from .run_defaults import (
    RunFacts,
    choose_kind,
    choose_rates,
    describe_choice,
    measure_sharpness,
    needs_sharpness,
    sharpness_batches,
)
from .same_data import crc32

LONG_RUN = 1e13  # MACs on each process: minutes on a core; below, seconds are not worth a trial of bfloat16
TRIED_IMAGES = 16  # of that trial


def check_accelerator(accelerator: Any, config: FinetuneConfig) -> None:
    """Refuse an accelerator that contradicts the config, or that this training does not serve."""
    check_distribution(accelerator)
    if accelerator.gradient_accumulation_steps != 1:
        raise TrainingError(
            f"the accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}; leave it at 1 "
            "and set FinetuneConfig(grad_accumulation=…), which also scales an incomplete last window correctly"
        )
    if config.mixed_precision not in (None, accelerator.mixed_precision):
        raise TrainingError(
            f"mixed_precision is {config.mixed_precision!r} in the config but {accelerator.mixed_precision!r} in the "
            "accelerator; say it in one place"
        )


def build_optimizer(module: DistillationModule, config: FinetuneConfig) -> torch.optim.Optimizer:
    """timm's optimiser; biases and norms are not decayed, and the ``M_l`` have a weight decay of their own."""

    def parameter_groups(module: DistillationModule) -> list[dict[str, Any]]:
        never = getattr(module.student, "no_weight_decay", set)()
        groups = param_groups_weight_decay(module.student, config.weight_decay, no_weight_decay_list=never)
        if module.projections:
            decay = config.distillation.ikd_weight_decay
            groups.append({"params": list(module.projections.parameters()), "weight_decay": decay})
        return groups

    try:
        return create_optimizer_v2(
            module, config.optimizer, config.lr, param_group_fn=parameter_groups, **config.optimizer_args
        )
    except (TypeError, ValueError) as error:
        raise TrainingError(f"timm can't build the optimizer {config.optimizer!r}: {error}") from error


def build_scheduler(optimizer: torch.optim.Optimizer, config: FinetuneConfig, updates_per_epoch: int) -> Any:
    """timm's schedule, stepped after every update; None for a constant learning rate."""
    if config.scheduler == "constant":
        return None
    try:
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched=config.scheduler,
            num_epochs=config.epochs,
            warmup_epochs=config.warmup_epochs,
            warmup_lr=config.warmup_lr,
            min_lr=config.min_lr,
            step_on_epochs=False,
            updates_per_epoch=updates_per_epoch,
            **config.scheduler_args,
        )
    except TypeError as error:
        raise TrainingError(f"timm can't build the scheduler {config.scheduler!r}: {error}") from error
    return scheduler


def build_mixing(config: FinetuneConfig, classes: int) -> Any:
    """timm's mixup and cutmix, or None; smoothing is left to the loss, which does it for soft targets too."""
    if not config.mixup and not config.cutmix:
        return None
    return Mixup(config.mixup, config.cutmix, prob=config.mix_prob, label_smoothing=0.0, num_classes=classes)


def mixed(mix: Mixup, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch after mixup or cutmix. timm mixes pairs: an odd last batch stays as it is."""
    if targets.is_floating_point():
        return images, targets
    even = len(images) % 2 == 0
    if (targets < 0).any():  # what is mixed with an image that has no label has none either
        images = mix(images.clone(), targets.clamp_min(0))[0] if even else images
        return images, torch.full_like(targets, -1)
    if not even:
        return images, F.one_hot(targets, mix.num_classes).float()
    return mix(images.clone(), targets)  # it works in place, and the batch may be the caller's


def build_average(student: nn.Module, config: FinetuneConfig) -> Any:
    """An exponential moving average of the bare student (``M_l``, DDP and autocast wrappers stay outside), or None."""
    if not config.ema_decay:
        return None
    return ModelEmaV3(student, decay=config.ema_decay, use_warmup=config.ema_warmup)


def start_trackers(accelerator: Any, config: FinetuneConfig) -> None:
    """Start Accelerate's trackers, unless the caller has done so."""
    if accelerator.log_with and not accelerator.trackers:
        plain = {key: value for key, value in _flat(asdict(config)) if isinstance(value, (bool, int, float, str))}
        accelerator.init_trackers(config.project, config=plain)


def check_something_to_learn(terms: DistillationConfig, targets: torch.Tensor) -> None:
    """Refuse images without labels where nothing is distilled."""
    if not (terms.kd_weight or terms.ikd_weight) and (not terms.label_weight or (targets < 0).all()):
        raise DataError(
            "the training data has no labels, and nothing is distilled: name the label column, or give a teacher and a "
            "kd_weight or ikd_weight"
        )


def fit_to_run(
    config: FinetuneConfig,
    accelerator: Any,
    module: DistillationModule,
    batches: EpochBatches,
    images: torch.Tensor,
) -> tuple[FinetuneConfig, str]:
    """Fit the ``M_l`` on the first batches, and choose what the config leaves open from where this run starts.

    Args:
        images: of a batch on this process.

    Returns:
        The config with nothing left open, and a line that says what was chosen; empty where nothing was.
    """
    asked, per_epoch = config, math.ceil(len(batches) / config.grad_accumulation)
    facts = RunFacts(
        updates=config.epochs * per_epoch,
        updates_per_epoch=per_epoch,
        share=len(images),
        batchnorm=any(isinstance(part, _BatchNorm) for part in module.student.modules()),
    )
    if module.distils and (config.lr is None or module.awaits_data):
        some = islice(batches.epoch(0), config.distillation.ikd_init_batches)
        distance = module.init_from_data(some, reduce=lambda part: accelerator.reduce(part, "sum"))
        facts = replace(facts, distance=distance)
    config = choose_kind(config, facts)
    if config.mixed_precision is None:
        config = replace(config, mixed_precision=_precision(config, accelerator, module, images, len(batches)))
    if needs_sharpness(config):
        train_mode(module, config)
        average = partial(accelerator.reduce, reduction="mean") if accelerator.num_processes > 1 else None
        some = islice(batches.epoch(0), sharpness_batches(facts.updates))
        found = [measure_sharpness(module, *batch, config.seed, average) for batch in some]
        facts = replace(facts, sharpness=statistics.median(found))
    config = choose_rates(config, facts)
    return config, describe_choice(asked, config, facts)


def _precision(
    config: FinetuneConfig, accelerator: Any, module: DistillationModule, images: torch.Tensor, batches: int
) -> str:
    """What the accelerator was told; where nobody told it anything, bfloat16 for a long run that gains by it."""
    told = accelerator.mixed_precision
    if told != "no" or "ACCELERATE_MIXED_PRECISION" in os.environ:
        return told
    with eval_mode(module.student), torch.no_grad():
        macs = 3 * image_macs(module.student, images)  # forward and back
        if module.distils:
            macs += image_macs(module.teacher, images)
    if macs * len(images) * batches * config.epochs < LONG_RUN:
        return told
    some = images[:TRIED_IMAGES].float()
    targets = torch.full((len(some),), -1, device=some.device)
    weights = [weight for weight in module.parameters() if weight.requires_grad]

    def step() -> None:
        loss = module(some, targets).total if module.distils else module.student(some).float().square().mean()
        torch.autograd.grad(loss, weights, allow_unused=True)

    with eval_mode(module.student), standing_in(sliced_points(module.student)):
        gains = torch.tensor(float(step_gains(step, accelerator.device)), device=accelerator.device)
    return "bf16" if float(accelerator.reduce(gains, "mean")) == 1 else told  # only where all processes gain


def train_mode(module: nn.Module, config: FinetuneConfig) -> None:
    """``train()``, with BatchNorm left in ``eval()`` where its statistics stay as they are."""
    module.train()
    if config.freeze_bn_stats:
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                part.eval()


def describe_run(config: FinetuneConfig, accelerator: Any, module: DistillationModule, batches: int) -> dict[str, Any]:
    """What must be the same after a resume, as plain JSON."""
    description = {
        "config": config.what_decides_the_result(),
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "batches_per_epoch": batches,
        "student": {name: list(tensor.shape) for name, tensor in module.student.state_dict().items()},
        "projections": {name: list(weight.shape) for name, weight in module.projections.items()},
        "teacher_crc32": crc32(module.teacher.state_dict().values()) if module.teacher is not None else None,
    }
    return json.loads(json.dumps(description))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
