"""Inner distillation as a task of timm: for everybody who trains with timm's own loop, or with transformers' Trainer.

timm has tasks for distilling logits, pooled features and tokens; this one adds the maps inside, which a pruned student
and its original have in pairs.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import TrainingError
from .distillation import DistillationConfig, DistillationModule

try:
    from timm.task import DistillationTeacher, TrainingTask
except ImportError as error:
    raise TrainingError("InnerDistillationTask needs a timm that has timm.task, such as 1.0.30") from error

from timm.models import group_parameters
from timm.utils import ModelEmaV3, unwrap_model


class InnerDistillationModule(DistillationModule):
    """What learns in the task: the student and every ``M_l``; its forward returns logits, KD and IKD."""

    def forward(self, images: torch.Tensor, teacher_images: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return self.compare(images, teacher_images)

    def no_weight_decay(self) -> set[str]:
        """For timm's optimiser factory."""
        return {f"student.{name}" for name in getattr(self.student, "no_weight_decay", set)()}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int] | dict:
        """For timm's layer-wise rates: every ``M_l`` counts as the last layer."""
        if not hasattr(self.student, "group_matcher"):
            return {}
        layers = group_parameters(self.student, self.student.group_matcher(coarse=coarse), reverse=True)
        last = max(layers.values(), default=0)
        return lambda name: layers.get(name.removeprefix("student."), last)


class InnerDistillationTask(TrainingTask):
    """Cross-entropy, logit distillation and the distillation of inner maps, as a task of ``timm.task``.

    It has the interface of timm's ``LogitDistillationTask`` and ``FeatureDistillationTask``: ``task(input, target)``
    gives a dict with ``loss``, ``output``, ``task_loss``, ``kd_loss`` and ``ikd_loss``; ``prepare_distributed``,
    ``setup_ema``, ``get_eval_model`` and the checkpoint methods do what timm's train loop expects of them.

    Args:
        student_model: the pruned model.
        teacher_model: the original: a model, a timm name, or timm's ``DistillationTeacher``.
        criterion: loss of the student's outputs and the targets; cross-entropy by default.
        teacher_pretrained_path: weights of a teacher that is given by name.
        distill_loss_weight: of the logits' distance; 1 by default, and 1 minus ``task_loss_weight`` where that alone
            is given, as in timm.
        task_loss_weight: of ``criterion``; 1 by default.
        inner_loss_weight: of the inner maps' distance; the paper takes 20 to 30.
        temperature: of the logits' distance.
        at: where maps are compared: ``"convs"``, ``"blocks"``, ``"stages"`` or module names.
        init: every ``M_l`` starts as the ``"selection"`` of the channels that the student kept, which a model from
            `prune` or a saved folder knows; or as the ``"ridge"`` solution, which `init_from_data` finds.
        device: as in timm.
        dtype: as in timm.
        verbose: as in timm.

    Example:
        >>> import timm, timm_knapsack as tk
        >>> half = tk.prune(model, loader, budget=tk.Budget(macs=0.5)).model
        >>> task = InnerDistillationTask(half, model, verbose=False)
        >>> images, labels = next(iter(loader))
        >>> result = task(images, labels)
        >>> result["loss"].backward()
        >>> sorted(result)
        ['ikd_loss', 'kd_loss', 'loss', 'output', 'task_loss']
    """

    def __init__(
        self,
        student_model: nn.Module,
        teacher_model: str | nn.Module | DistillationTeacher,
        criterion: nn.Module | Callable | None = None,
        teacher_pretrained_path: str | None = None,
        distill_loss_weight: float | None = None,
        task_loss_weight: float | None = None,
        inner_loss_weight: float = 20.0,
        temperature: float = 1.0,
        at: str | tuple[str, ...] = "blocks",
        init: str = "selection",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
    ):
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        student_model.to(self.device)
        if not isinstance(teacher_model, DistillationTeacher):
            about = {"num_classes": student_model.num_classes, "in_chans": getattr(student_model, "in_chans", 3)}
            teacher_model = DistillationTeacher(
                teacher_model, **about, pretrained_path=teacher_pretrained_path, device=self.device, dtype=self.dtype
            )
        self.teacher = teacher_model.to(self.device)
        self.teacher.requires_grad_(False)
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        complement = 1.0 if task_loss_weight is None else 1.0 - task_loss_weight
        self.distill_loss_weight = complement if distill_loss_weight is None else distill_loss_weight
        self.task_loss_weight = 1.0 if task_loss_weight is None else task_loss_weight
        self.inner_loss_weight = inner_loss_weight
        config = DistillationConfig(
            kd_weight=self.distill_loss_weight, ikd_weight=inner_loss_weight, temperature=temperature, ikd_at=at,
            ikd_init=init,
        )  # fmt: skip
        self.trainable_module: nn.Module = InnerDistillationModule(student_model, self.teacher.model, config)
        for name in ("mean", "std"):
            values = torch.tensor(student_model.pretrained_cfg[name], device=self.device, dtype=self.dtype)
            self.register_buffer(f"student_{name}", values.view(1, -1, 1, 1), persistent=False)

    @property
    def _inner(self) -> InnerDistillationModule:
        return unwrap_model(self.trainable_module)

    def init_from_data(self, batches: Iterable[Any]) -> float:
        """Set every ``M_l`` to its ridge solution on a few batches; better than the selection after `recover`.

        Before ``prepare_distributed``, and on every process with the same batches. Returns how far the student is from
        its teacher: the KL divergence of their outputs, in nats.
        """
        self._inner.config = replace(self._inner.config, ikd_init="ridge")
        return self._inner.init_from_data(batches)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """One forward pass of both networks: ``loss`` to go backward from, ``output`` for metrics, and its parts."""
        teacher_input = self.teacher.normalize_input(input, self.student_mean, self.student_std)
        output, kd_loss, ikd_loss = self.trainable_module(input, teacher_input)
        task_loss = self.criterion(output, target)
        loss = self.task_loss_weight * task_loss + self.distill_loss_weight * kd_loss
        loss = loss + self.inner_loss_weight * ikd_loss
        return {"loss": loss, "output": output, "task_loss": task_loss, "kd_loss": kd_loss, "ikd_loss": ikd_loss}

    def prepare_distributed(self, device_ids: list | None = None, **ddp_kwargs) -> "InnerDistillationTask":
        """Wrap what learns, the student and every ``M_l``, in DistributedDataParallel; the teacher stays outside."""
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **compile_kwargs) -> nn.Module:
        """Compile the student for evaluation. Training stays eager: it listens to inner maps with hooks."""
        self.eval_model = torch.compile(self._inner.student, backend=backend, mode=mode, **compile_kwargs)
        return self.eval_model

    def setup_ema(self, decay: float = 0.9999, use_warmup: bool = False, device: Any = None, **kwargs) -> nn.Module:
        """Average the bare student: a copy of everything that learns would copy the teacher too."""
        average = ModelEmaV3(self._inner.student, decay=decay, use_warmup=use_warmup, device=device, **kwargs)
        self.trainable_module_ema = average
        return average

    def update_ema(self, step: int | None = None) -> None:
        if self.has_ema():
            self.trainable_module_ema.update(self._inner.student, step=step)

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        found = super().get_eval_model(module=module, ema=ema)
        inner = unwrap_model(found) if found is not None else None
        return inner.student if isinstance(inner, InnerDistillationModule) else found

    def get_clip_parameters(self, exclude_head: bool = False) -> list[nn.Parameter]:
        inner = self._inner
        parameters = list(inner.student.parameters())
        return [*(parameters[:-2] if exclude_head else parameters), *inner.projections.parameters()]

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """Every ``M_l``; they are not averaged, so the EMA has none."""
        if ema or not self._inner.projections:
            return {}
        return {"projections": self._inner.projections.state_dict()}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        if state and not ema:
            self._inner.projections.load_state_dict(state["projections"], strict=strict)
            self._inner.mark_initialised()

    def for_trainer(self) -> "TrainerModel":
        """What transformers' ``Trainer`` takes as its model."""
        return TrainerModel(self)


class TrainerModel(nn.Module):
    """A task in the shape that transformers' ``Trainer`` trains: ``pixel_values`` and ``labels`` in, ``loss`` and
    ``logits`` out. In ``eval()`` the student runs alone. Only what learns is registered, so the optimiser and saved
    weights are free of the teacher; the tuned student is ``.student``.

    Example:
        >>> import timm_knapsack as tk
        >>> half = tk.prune(model, loader, budget=tk.Budget(macs=0.5)).model
        >>> trained = InnerDistillationTask(half, model, verbose=False).for_trainer()
        >>> images, labels = next(iter(loader))
        >>> sorted(trained(pixel_values=images, labels=labels)), trained.student is half
        (['logits', 'loss'], True)
    """

    def __init__(self, task: InnerDistillationTask):
        super().__init__()
        self.trainable = task.trainable_module
        self._outside = (task,)  # in a tuple, which nn.Module does not register

    @property
    def student(self) -> nn.Module:
        return self.trainable.student

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        (task,) = self._outside
        if not self.training:
            logits = self.student(pixel_values)
            return {"logits": logits} if labels is None else {"loss": task.criterion(logits, labels), "logits": logits}
        if labels is None:
            raise TrainingError("training needs labels; images without any can be tuned with timm_knapsack.finetune")
        if task.student_mean.device != pixel_values.device:
            task.to(pixel_values.device)
        result = task(pixel_values, labels)
        return {"loss": result["loss"], "logits": result["output"]}
