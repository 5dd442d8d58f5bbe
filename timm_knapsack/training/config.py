"""What a fine-tuning run is: one frozen, checked config."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import TrainingError
from .distillation import DistillationConfig, check_choice, check_number

SCHEDULERS = ("cosine", "poly", "tanh", "step", "multistep", "constant")
# They say where and how often to look, not what is computed, so a resumed run may change them.
_WITHOUT_EFFECT = (
    *("output_dir", "overwrite", "checkpoint_every", "eval_every", "log_interval", "trackers", "project", "progress"),
)
# Where they are None they follow from the run; `label_smoothing` is a field of `distillation`.
_FOLLOWING = ("optimizer", "lr", "min_lr", "warmup_epochs", "ema_decay", "freeze_bn_stats", "mixed_precision")


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything about a fine-tuning run except the networks and the data.

    An *update* is one step of the optimiser; with ``grad_accumulation`` it covers several batches. A field that is None
    **follows from the run**: from its number of updates, its batch, where the student starts, and how sharply the loss
    bends there (`run_defaults` says how). What was chosen is printed, and is in ``FinetuneResult.config``.

    Attributes:
        epochs: passes over the training loader.
        optimizer: name in timm (``timm.optim.list_optimizers()``), with further ``optimizer_args``; None follows.
        lr, weight_decay: of the student; biases and norms are not decayed, and ``M_l`` has its own weight decay. The
            rate follows where it is None.
        scheduler: cosine, poly, tanh, step, multistep (timm's, stepped after every update) or constant, with further
            ``scheduler_args`` of ``timm.scheduler.create_scheduler_v2``.
        warmup_epochs, warmup_lr, min_lr: of the schedule; the first and the last follow where they are None.
        distillation: the loss; its label smoothing follows where it is None.
        mixup, cutmix: alphas of timm's batch-wise mixing, with ``mix_prob``; 0 is off.
        ema_decay: keep an exponential moving average of the student and evaluate that; 0 for none, None follows.
        ema_warmup: let the decay grow from 0 (timm's formula), for short runs.
        grad_accumulation: batches for each update.
        clip_grad: largest norm of the gradient.
        mixed_precision: "no", "bf16" or "fp16"; None for what ``accelerate launch`` was told, and where it was told
            nothing, bf16 for long runs on hardware that is faster at it.
        freeze_bn_stats: normalise with the running statistics and do not change them; None follows.
        sync_bn: on several GPUs, let BatchNorm see the batches of all of them while it trains.
        seed: of shuffling, augmentation, mixing, dropout.
        output_dir: folder for ``last`` and ``best``; None writes nothing. Several machines need a shared one.
        overwrite: allow a new run in a folder that has a checkpoint.
        checkpoint_every: updates between checkpoints; one is written after each epoch anyway.
        eval_every: epochs between evaluations; the start is evaluated too, as epoch 0.
        patience: stop after this many epochs without a better evaluation; None trains to the end.
        steps_per_epoch: batches in an epoch, for loaders without a length.
        log_interval: updates between two rows of the history.
        trackers: Accelerate's, such as ("tensorboard", "wandb"), under the name ``project``.
        progress: a progress bar, if stderr is a terminal.

    Example:
        >>> FinetuneConfig(epochs=10, lr=0.01, mixed_precision="bf16", ema_decay=0.999).scheduler
        'cosine'
    """

    epochs: int = 50
    optimizer: str | None = None
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    lr: float | None = None
    weight_decay: float = 1e-4
    scheduler: str = "cosine"
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    warmup_epochs: float | None = None
    warmup_lr: float = 0.0
    min_lr: float | None = None
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    ema_decay: float | None = None
    ema_warmup: bool = False
    grad_accumulation: int = 1
    clip_grad: float | None = None
    mixed_precision: str | None = None
    freeze_bn_stats: bool | None = None
    sync_bn: bool = False
    seed: int = 0
    output_dir: str | None = None
    overwrite: bool = False
    checkpoint_every: int | None = None
    eval_every: int = 1
    patience: int | None = None
    steps_per_epoch: int | None = None
    log_interval: int = 50
    trackers: tuple[str, ...] = ()
    project: str = "timm-knapsack"
    progress: bool = True

    def __post_init__(self):
        for name in ("epochs", "grad_accumulation", "eval_every", "log_interval"):
            check_number(name, getattr(self, name), 1, whole=True)
        for name in ("checkpoint_every", "steps_per_epoch", "patience"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, whole=True)
        for name in ("weight_decay", "warmup_lr", "mixup", "cutmix"):
            check_number(name, getattr(self, name), 0)
        for name in ("lr", "warmup_epochs", "min_lr", "clip_grad"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0)
        check_number("seed", self.seed, 0, whole=True)
        check_number("mix_prob", self.mix_prob, 0, 1)
        if self.ema_decay is not None:
            check_number("ema_decay", self.ema_decay, 0, 1)
        for name in ("ema_warmup", "sync_bn", "overwrite", "progress"):
            check_choice(name, getattr(self, name), (True, False))
        check_choice("freeze_bn_stats", self.freeze_bn_stats, (True, False, None))
        check_choice("scheduler", self.scheduler, SCHEDULERS)
        check_choice("mixed_precision", self.mixed_precision, (None, "no", "bf16", "fp16"))
        if self.warmup_epochs and (self.scheduler == "constant" or self.warmup_epochs >= self.epochs):
            raise TrainingError(
                f"warmup_epochs is {self.warmup_epochs:g}: it needs a schedule other than constant and must be less "
                f"than epochs, {self.epochs}"
            )
        if not isinstance(self.distillation, DistillationConfig):
            raise TrainingError(f"distillation must be a DistillationConfig, got {type(self.distillation).__name__}")
        if self.optimizer is not None and (not isinstance(self.optimizer, str) or not self.optimizer):
            raise TrainingError(
                f"optimizer must be the name of a timm optimizer, such as 'sgd', not {self.optimizer!r}"
            )
        self._check_arguments("optimizer_args", ("opt", "lr", "weight_decay", "param_group_fn", "layer_decay"))
        self._check_arguments(
            "scheduler_args",
            ("sched", "num_epochs", "warmup_epochs", "warmup_lr", "min_lr", "step_on_epochs", "updates_per_epoch"),
        )
        if isinstance(self.output_dir, Path):
            object.__setattr__(self, "output_dir", str(self.output_dir))
        if not isinstance(self.output_dir, (str, type(None))) or self.output_dir == "":
            raise TrainingError(f"output_dir must be a folder or None, got {self.output_dir!r}")
        if isinstance(self.trackers, str) or not all(isinstance(name, str) for name in self.trackers):
            raise TrainingError(f"trackers must be a list of names, such as ('tensorboard',); got {self.trackers!r}")
        object.__setattr__(self, "trackers", tuple(self.trackers))
        if self.trackers and self.output_dir is None:
            raise TrainingError("trackers need an output_dir to write to")

    def _check_arguments(self, name: str, reserved: tuple[str, ...]) -> None:
        arguments = getattr(self, name)
        if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
            raise TrainingError(f"{name} must map argument names to values, got {arguments!r}")
        for key in arguments:
            if key in reserved:
                raise TrainingError(f"{name} can't set {key!r}: it has a field of its own, or does not go with M_l")

    def what_decides_the_result(self) -> dict[str, Any]:
        """The fields that a resumed run must share with its checkpoint."""
        values = asdict(self)
        return {f.name: values[f.name] for f in fields(self) if f.name not in _WITHOUT_EFFECT}

    def choices(self) -> dict[str, Any]:
        """The fields that can follow from the run, as plain values.

        Example:
            >>> FinetuneConfig(lr=0.01).choices()["lr"]
            0.01
        """
        values = {name: getattr(self, name) for name in _FOLLOWING}
        return {**values, "label_smoothing": self.distillation.label_smoothing}

    def with_chosen(self, values: Mapping[str, Any]) -> "FinetuneConfig":
        """This config with what `choices` gave."""
        own = {name: values[name] for name in _FOLLOWING}
        return replace(self, **own, distillation=replace(self.distillation, label_smoothing=values["label_smoothing"]))
