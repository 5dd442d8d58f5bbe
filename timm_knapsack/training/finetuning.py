"""Fine-tuning with distillation, on one CPU or many machines, that can be killed at any moment and goes on exactly.

Accelerate places, distributes and scales; timm gives optimiser, schedule, mixup and EMA; ``distillation`` the losses.

BatchNorm on several processes: each process normalises with its own share of the batch, and the running statistics are
those of process 0 (as in DDP); ``freeze_bn_stats`` normalises with the running statistics instead and leaves them as
they are, and ``sync_bn`` lets every process see the whole batch. Only then, or without BatchNorm, does a run on N
processes equal a run on one with the same global batch; docs/training.md says what else is equal, and what can't be.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..errors import CheckpointError, TrainingError
from ..files.atomic import settle
from ..maps.channels_last import channels_last
from ..maps.precision import fast_passes
from ..maps.stand_ins import sliced_points, standing_in
from ..maps.steady_memory import memory_kept
from ..slim.example_inputs import example_dtype
from .checkpoints import Checkpoint, check_replaceable, first_difference, read_checkpoint, write_checkpoint
from .config import FinetuneConfig
from .counters import check_counters
from .distillation import DistillationModule
from .epoch_batches import seed_all
from .evaluation import (
    check_labels,
    check_targets,
    ended_below_its_start,
    evaluate,
    has_no_labels,
    is_better,
    start_accelerator,
)
from .folder_lock import only_run_in
from .last_good import LastGoodBuffers
from .processes import batchnorm_synchronised, lost_process_named
from .result import FinetuneResult
from .same_data import batches_on_all, describe_data, first_batches, with_unknown_count
from .session import ProgressBar, StopRequest, epoch_line
from .setup import (
    build_average,
    build_mixing,
    build_optimizer,
    build_scheduler,
    check_accelerator,
    check_something_to_learn,
    describe_run,
    fit_to_run,
    mixed,
    start_trackers,
    train_mode,
)

__all__ = ["FinetuneConfig", "FinetuneResult", "evaluate", "finetune"]

_logger = logging.getLogger(__name__)
_TERMS = ("total", "ce", "kd", "ikd")
_STATE = ("epoch", "batch", "update", "sums", "count", "history", "evaluations", "best")  # kept in a checkpoint


def finetune(
    student: nn.Module,
    teacher: nn.Module | None,
    train_loader: Any,
    eval_loader: Any = None,
    config: FinetuneConfig | None = None,
    *,
    accelerator: Any = None,
    kept: Any = None,
    resume: bool = False,
    say: Callable[[str], Any] | None = None,
) -> FinetuneResult:
    """Train the student, in place, with what its teacher knows of the images, or with their labels.

    What the config leaves open follows from the run; the start is evaluated first, counts as epoch 0, and is ``best``
    until something is better. Images without labels (-1, or batches of images alone) learn from the teacher alone.

    Args:
        student: the slim model.
        teacher: the original model; None where the config distils nothing. It is put into ``eval()``.
        train_loader: a ``DataLoader`` (its batch size is per process) or a list, of ``(images, labels)``, of images or
            of dicts with ``pixel_values``; see ``epoch_batches`` for what makes it resume exactly.
        eval_loader: likewise; None for no evaluation.
        config: everything else.
        accelerator: an ``accelerate.Accelerator`` to use instead of a new one.
        kept: module name → the teacher's channels that the student kept; for ``ikd_init="selection"``. A model that
            comes from `prune`, or from a folder that `save_pretrained` wrote, knows them.
        resume: go on from ``config.output_dir/last``. Where there is none yet, start from the beginning.
        say: gets a line with what was chosen, one after each of several epochs, and one if the run ended below its
            start; by default the first and the last go to a terminal, else to the log.

    Raises:
        TrainingError: a loss that is not finite, or networks, data and config that do not fit each other.
        CheckpointError: ``resume`` with another config, model or number of processes; a folder that is in use.

    Example:
        >>> def network(width):
        ...     head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2)
        ...     return nn.Sequential(nn.Conv2d(3, width, 1), nn.ReLU(), *head)
        >>> from timm_knapsack import DistillationConfig
        >>> batches = [(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))] * 2
        >>> config = FinetuneConfig(epochs=2, lr=0.01, distillation=DistillationConfig(ikd_at=("0",)))
        >>> result = finetune(network(3), network(8), batches, batches, config)
        >>> result.updates, sorted(result.evaluations[-1])
        (4, ['epoch', 'loss', 'samples', 'top1', 'top5', 'update'])
    """
    config, own = config or FinetuneConfig(), None
    if accelerator is None:
        accelerator = own = start_accelerator(config.mixed_precision, config.trackers, config.output_dir)
    check_accelerator(accelerator, config)
    with only_run_in(config.output_dir, accelerator), ExitStack() as stack:
        run = _Run(student, teacher, train_loader, eval_loader, config, accelerator, kept, resume, say, stack)
        run.owns_accelerator = own is not None
        progress = run.progress.over(run.config.epochs * len(run.batches))
        synchronised = batchnorm_synchronised(student, accelerator, run.config.sync_bn)
        with run.stop, progress, lost_process_named(accelerator, run.last), synchronised, run.on_cpu():
            result = run.train()
        if result.model is not student and student in run.laid:
            run.laid.append(result.model)
        return result


class _Run:
    """One fine-tuning run: everything that changes while it trains, and how to save and restore it."""

    def __init__(self, student, teacher, train_loader, eval_loader, config, accelerator, kept, resume, say, stack):
        self.config, self.student, self.accelerator = config, student, accelerator
        self.owns_accelerator = False
        self.output = Path(config.output_dir) if config.output_dir else None
        self.last = self.output / "last" if self.output else None
        self.epoch = self.batch = self.update = 0
        self.history, self.evaluations, self.best = [], [], None
        self.sums, self.count = [0.0] * len(_TERMS), 0
        self.stop, self.progress = StopRequest(), ProgressBar(config.progress and accelerator.is_main_process)
        self.say = say

        checkpoint = self._find_checkpoint(resume)
        self.batches = batches_on_all(train_loader, accelerator, config.seed, config.steps_per_epoch)
        if isinstance(eval_loader, DataLoader):
            eval_loader = accelerator.prepare(eval_loader, device_placement=[False])
        self.eval_loader = eval_loader

        student.to(accelerator.device)
        if teacher is not None:
            teacher.to(accelerator.device)
        first = first_batches(self.batches)
        images, targets = first[0]
        self.unlabelled = has_no_labels(targets)
        self.classes = check_labels(student, images[:2], targets)
        few = images[:2].to(accelerator.device, example_dtype(student))
        self.laid = stack.enter_context(channels_last(student, teacher, images=few)).models
        self.module = DistillationModule(student, teacher, config.distillation, kept, images[:2])
        check_something_to_learn(config.distillation, targets)
        self.identity = describe_run(config, accelerator, self.module, len(self.batches))
        self.identity["data"] = describe_data(self.batches, first, accelerator)
        if checkpoint is not None:
            self._check_same_run(checkpoint)
            self.config = _with_chosen(config, checkpoint)
        else:
            self.config, line = fit_to_run(config, accelerator, self.module, self.batches, images)
            if line and accelerator.is_main_process:
                _logger.info(line)
                (say or self.progress.print)(line)
        self.module.config = self.config.distillation
        self._build()
        if checkpoint is not None:
            self._restore(checkpoint)
            _logger.info("resumed from %s: epoch %d, batch %d", checkpoint.path, self.epoch, self.batch)
        elif self.output is not None and accelerator.is_main_process:  # overwrite: an old run must not be resumed later
            for old in (self.last, self.output / "best"):
                shutil.rmtree(old, ignore_errors=True)

    # ---- set up ----

    def _find_checkpoint(self, resume: bool) -> Checkpoint | None:
        if self.last is None:
            if resume:
                raise CheckpointError("resume needs FinetuneConfig(output_dir=…), the folder of the run to go on with")
            return None
        if self.accelerator.is_main_process:
            settle(self.last)
            settle(self.output / "best")
        self.accelerator.wait_for_everyone()
        for folder in (self.last, self.output / "best"):
            check_replaceable(folder)
        if not self.last.exists():
            return None
        if resume:
            return read_checkpoint(self.last)
        if not self.config.overwrite:
            raise CheckpointError(
                f"{self.last} is the checkpoint of an earlier run: go on with resume=True, choose another output_dir, "
                "or give it up with overwrite=True"
            )
        return None

    def _build(self) -> None:
        config = self.config
        optimizer = build_optimizer(self.module, config)
        self.scheduler = build_scheduler(optimizer, config, math.ceil(len(self.batches) / config.grad_accumulation))
        self.mix = build_mixing(config, self.classes)
        self.chose_bfloat16 = (config.mixed_precision, self.accelerator.mixed_precision) == ("bf16", "no")
        self.prepared, self.optimizer = self.accelerator.prepare(self.module, optimizer)
        self.statistics = LastGoodBuffers(self.student)
        self.ema = build_average(self.student, config)
        start_trackers(self.accelerator, config)

    # ---- train ----

    def on_cpu(self) -> ExitStack:
        """What passes on a CPU need: memory that stays (a fifth of a step), and no conv whose gradient kills."""
        needs = ExitStack()
        if self.accelerator.device.type == "cpu":
            needs.enter_context(memory_kept())
            if self.config.mixed_precision == "bf16" or self.accelerator.mixed_precision == "bf16":
                needs.enter_context(standing_in(sliced_points(self.student)))
        return needs

    def train(self) -> FinetuneResult:
        interrupted = False
        if self.eval_loader is not None and not self.evaluations:
            self._evaluate()
        while self.epoch < self.config.epochs and not interrupted and not self._out_of_patience():
            self._train_mode()
            batches = self.batches.epoch(self.epoch, self.batch)
            while self.batch < len(self.batches) and not interrupted:
                interrupted = self._update(batches)
                if interrupted or (self.config.checkpoint_every and self.update % self.config.checkpoint_every == 0):
                    self._save()
            if not interrupted:
                self._end_epoch()
        return self._finish(interrupted)

    def _train_mode(self) -> None:
        self.images_seen, self.started = 0, time.monotonic()
        train_mode(self.prepared, self.config)

    def _update(self, batches: Any) -> bool:
        """One optimiser step over up to ``grad_accumulation`` batches; returns whether to stop after it."""
        accelerator = self.accelerator
        window = min(self.config.grad_accumulation, len(self.batches) - self.batch)
        terms = torch.zeros(len(_TERMS), device=accelerator.device)
        self.statistics.keep()
        for position in range(window):
            images, targets = next(batches)
            where = f"batch {self.batch} of epoch {self.epoch}"
            check_targets(targets, self.classes, where, self.unlabelled, images=len(images))
            seed_all(self.config.seed, "step", self.epoch, self.batch, accelerator.process_index)
            if self.mix is not None:
                images, targets = mixed(self.mix, images, targets)
            with accelerator.no_sync(self.prepared) if position + 1 < window else nullcontext():
                with fast_passes(accelerator.device, self.chose_bfloat16):
                    losses = self.prepared(images, targets)
                accelerator.backward(losses.total / window)
            terms += torch.stack([getattr(losses, term).detach().float() for term in _TERMS]) / window
            self.batch += 1
            self.images_seen += len(images) * accelerator.num_processes
        # one small collective for the loss terms and for SIGTERM, so that every process decides alike
        stop = terms.new_tensor([float(self.stop.requested)])
        *values, stop = accelerator.reduce(torch.cat([terms, stop]), "mean").tolist()
        self._check_loss(values)
        if self.config.clip_grad is not None:
            accelerator.clip_grad_norm_(self.prepared.parameters(), self.config.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update += 1
        lr = self.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None:
            self.scheduler.step_update(self.update)
        if self.ema is not None:
            self.ema.update(self.student, step=self.update)
        self._record(values, lr)
        return stop > 0

    def _check_loss(self, values: list[float]) -> None:
        if all(map(math.isfinite, values)):
            return
        self.statistics.put_back()
        terms = ", ".join(f"{term} = {value:g}" for term, value in zip(_TERMS, values, strict=True))
        written = self.last is not None and self.last.exists()
        saved = f"the last good checkpoint is {self.last}" if written else "no checkpoint was written"
        raise TrainingError(
            f"the loss is not finite at update {self.update + 1} (epoch {self.epoch}, batch {self.batch - 1}): "
            f"{terms}. This update did not change the weights; {saved}. Lower lr or ikd_weight, set clip_grad, or look "
            "for broken images"
        )

    def _record(self, values: list[float], lr: float) -> None:
        self.sums = [total + value for total, value in zip(self.sums, values, strict=True)]
        self.count += 1
        speed = self.images_seen / max(time.monotonic() - self.started, 1e-9)
        self.progress.update(
            self.epoch * len(self.batches) + self.batch,
            f"epoch {self.epoch + 1}/{self.config.epochs}",
            dict(zip(_TERMS, values, strict=True)),
            lr,
            speed,
        )
        if self.count >= self.config.log_interval or self.batch == len(self.batches):
            means = {term: total / self.count for term, total in zip(_TERMS, self.sums, strict=True)}
            self.history.append({"epoch": self.epoch, "update": self.update, "lr": lr, **means})
            logged = {f"train/{key}": value for key, value in {**means, "lr": lr, "images_per_second": speed}.items()}
            self.accelerator.log(logged, step=self.update)
            self.sums, self.count = [0.0] * len(_TERMS), 0

    def _end_epoch(self) -> None:
        self.epoch, self.batch = self.epoch + 1, 0
        self._share_buffers()
        due = self.epoch % self.config.eval_every == 0 or self.epoch == self.config.epochs
        if self.eval_loader is not None and due:
            self._evaluate()
        if self.say is not None and self.config.epochs > 1 and self.accelerator.is_main_process:
            self.say(epoch_line(self.epoch, self.config.epochs, self.history, self.evaluations))
        self._save()

    def _evaluate(self) -> None:
        """Add a row to the evaluations; the start is the first, and the best until something is better."""
        metrics = evaluate(self._best_model(), self.eval_loader, self.accelerator, teacher=self.module.teacher)
        self.accelerator.log({f"eval/{key}": value for key, value in metrics.items()}, step=self.update)
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}  # JSON knows no NaN
        self.evaluations.append({"epoch": self.epoch, "update": self.update, **finite})
        _logger.info("epoch %d of %d: %s", self.epoch, self.config.epochs, metrics)
        if self.best is None or is_better(self.evaluations[-1], self.best):
            self.best = self.evaluations[-1]
            self._save_best()

    def _out_of_patience(self) -> bool:
        patience = self.config.patience
        return patience is not None and self.best is not None and self.epoch - self.best["epoch"] >= patience

    def _share_buffers(self) -> None:
        """Give every process the BatchNorm statistics of process 0; between updates each has its own."""
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            for model in [self.student] + ([self.ema.module] if self.ema else []):
                for buffer in model.buffers():
                    buffer.copy_(broadcast(buffer.clone()))

    def _best_model(self) -> nn.Module:
        return self.student if self.ema is None else self.ema.module

    def _finish(self, interrupted: bool) -> FinetuneResult:
        self.student.eval()
        if self.owns_accelerator:  # not end_training(), which would also end the caller's process group
            for tracker in self.accelerator.trackers:
                tracker.finish()
        best = self.output / "best" if self.output else None
        if self.evaluations and is_better(self.evaluations[0], self.evaluations[-1]) and not interrupted:
            if self.accelerator.is_main_process:
                (self.say or _logger.warning)(ended_below_its_start(self.evaluations, self.best, best))
        return FinetuneResult(
            model=self._best_model(),
            student=self.student,
            config=self.config,
            history=self.history,
            evaluations=self.evaluations,
            best=self.best,
            last_path=self.last,
            best_path=best if best and best.exists() else None,
            interrupted=interrupted,
            epochs=self.epoch,
            updates=self.update,
        )

    # ---- save and restore ----

    def _check_same_run(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.state.get("run")
        difference = first_difference(saved, with_unknown_count(saved, self.identity))
        if difference and "first_pixels" in difference:
            again = describe_data(self.batches, first_batches(self.batches), self.accelerator)
            if again != self.identity["data"]:
                _logger.warning("the training data is not the same each time it is read: the resume is not exact")
                difference = first_difference(saved, {**self.identity, "data": saved["data"]})
        if difference:
            raise CheckpointError(
                f"{checkpoint.path} belongs to another run: {difference}; resume with what it was started with, or "
                "start anew in another output_dir"
            )

    def _save(self) -> None:
        if self.last is None:
            return
        for name, parameter in self.module.named_parameters():
            if not torch.isfinite(parameter).all():
                raise TrainingError(
                    f"{name} is not finite after update {self.update}, so no checkpoint is written; the last good one: "
                    f"{self.last if self.last.exists() else 'none'}. Lower lr, or set clip_grad"
                )
        if self.accelerator.is_main_process:
            tensors = {"model": self.student.state_dict(), "projections": dict(self.module.projections.items())}
            if self.ema is not None:
                tensors["ema"] = self.ema.module.state_dict()
            scaler = self.accelerator.scaler
            plain = {"optimizer": self.optimizer.state_dict(), "scaler": scaler.state_dict() if scaler else None}
            state = {name: getattr(self, name) for name in _STATE}
            state |= {"run": self.identity, "choices": self.config.choices()}
            write_checkpoint(self.last, tensors, state, plain)
        self.accelerator.wait_for_everyone()

    def _save_best(self) -> None:
        if self.output is not None and self.accelerator.is_main_process:
            row = self.evaluations[-1]
            write_checkpoint(self.output / "best", {"model": self._best_model().state_dict()}, {"evaluation": row})

    def _restore(self, checkpoint: Checkpoint) -> None:
        accumulation = self.config.grad_accumulation
        check_counters(checkpoint.state, self.config.epochs, len(self.batches), accumulation, checkpoint.path)
        try:
            self.student.load_state_dict(checkpoint.tensors["model"])
            self.module.projections.load_state_dict(checkpoint.tensors["projections"])
            self.module.mark_initialised()
            if self.ema is not None:
                self.ema.module.load_state_dict(checkpoint.tensors["ema"])
            self.optimizer.load_state_dict(checkpoint.optimizer["optimizer"])
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(checkpoint.optimizer["scaler"])
            for name in _STATE:
                setattr(self, name, checkpoint.state[name])
        except Exception as error:  # optimisers and modules raise whatever comes of a damaged state
            raise CheckpointError(f"{checkpoint.path} can't be resumed: {type(error).__name__}: {error}") from error


def _with_chosen(config: FinetuneConfig, checkpoint: Checkpoint) -> FinetuneConfig:
    """What followed from the run when it began."""
    try:
        return config.with_chosen(checkpoint.state["choices"])
    except (KeyError, TypeError, TrainingError) as error:
        raise CheckpointError(f"{checkpoint.path} can't be resumed: its choices make no sense: {error}") from None
