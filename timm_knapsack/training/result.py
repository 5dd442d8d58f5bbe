"""What a fine-tuning run leaves behind."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from .config import FinetuneConfig


@dataclass
class FinetuneResult:
    """What a run gave.

    Attributes:
        model: the model to use: the EMA copy where there is one, else the student itself.
        config: the config with everything chosen that was left to follow from the run.
        student: the student, trained in place, in ``eval()`` mode; its weights are those of the last update.
        history: a row for every ``log_interval`` updates: epoch, update, lr, and the mean of each loss term since the
            row before (``kd`` and ``ikd`` without their weights).
        evaluations: a row for every evaluation of ``model``: epoch, update, top1, top5 (percent), loss, samples; for
            images without labels agreement (percent) and kl instead. The first, epoch 0, is the start.
        best: the row of the best evaluation, which may be the start's: highest top-1, or lowest KL; None without any.
        best_top1, last_top1: percent; None without evaluation, or without labels.
        last_path, best_path: checkpoint folders; None where nothing was written. ``best`` holds the weights of
            ``model`` at its best evaluation, ``last`` all that a resume needs.
        interrupted: True if SIGTERM ended the run early; ``resume=True`` goes on from ``last_path``.
        epochs, updates: done so far, over all sessions of the run.
    """

    model: nn.Module
    student: nn.Module
    config: FinetuneConfig
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, float] | None = None
    last_path: Path | None = None
    best_path: Path | None = None
    interrupted: bool = False
    epochs: int = 0
    updates: int = 0

    @property
    def best_top1(self) -> float | None:
        return self.best.get("top1") if self.best else None

    @property
    def last_top1(self) -> float | None:
        return self.evaluations[-1].get("top1") if self.evaluations else None
