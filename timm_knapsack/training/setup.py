"""What a training run is made of, built from its config: timm's optimiser, schedule, mixing and averaging."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn

from ..errors import TrainingError
from .config import FinetuneConfig
from .distillation import DistillationModule
from .same_data import crc32


def check_accelerator(accelerator: Any, config: FinetuneConfig) -> None:
    """Refuse an accelerator that contradicts the config."""
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


def build_average(student: nn.Module, config: FinetuneConfig) -> Any:
    """An exponential moving average of the bare student (``M_l``, DDP and autocast wrappers stay outside), or None."""
    if config.ema_decay is None:
        return None
    return ModelEmaV3(student, decay=config.ema_decay, use_warmup=config.ema_warmup)


def start_trackers(accelerator: Any, config: FinetuneConfig) -> None:
    """Start Accelerate's trackers, unless the caller has done so."""
    if accelerator.log_with and not accelerator.trackers:
        plain = {key: value for key, value in _flat(asdict(config)) if isinstance(value, (bool, int, float, str))}
        accelerator.init_trackers(config.project, config=plain)


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
