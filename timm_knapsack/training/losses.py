"""The terms of the loss, each a scalar, and the 1 × 1 product with which ``M_l`` brings maps together."""

import torch
from torch.nn import functional as F


def ce_loss(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Cross-entropy with labels or probabilities, mean over the images that have one; 0 where none has.

    Example:
        >>> round(ce_loss(torch.zeros(3, 2), torch.tensor([0, -1, 1])).item(), 4)  # log 2
        0.6931
        >>> ce_loss(torch.zeros(3, 2), torch.tensor([-1, -1, -1])).item()
        0.0
    """
    if targets.is_floating_point():
        return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)
    options = {"ignore_index": -1, "reduction": "sum", "label_smoothing": label_smoothing}
    return F.cross_entropy(logits.float(), targets, **options) / (targets >= 0).sum().clamp_min(1)


def kd_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Cross-entropy of the student's softmax with the teacher's, mean over the batch, times ``T²``.

    Example:
        >>> round(kd_loss(torch.zeros(4, 2), torch.zeros(4, 2)).item(), 4)  # log 2
        0.6931
    """
    probabilities = F.softmax(teacher_logits.float() / temperature, dim=1)
    return F.cross_entropy(logits.float() / temperature, probabilities) * temperature**2


class SquaredDistance(torch.autograd.Function):
    """``Σ (student − teacher)² / divisor``, squared and summed in float32 also where the maps are bfloat16.

    It keeps the difference alone, in the maps' own type, whose rounding is below that of the maps themselves:
    ``mse_loss`` of ``.float()`` copies takes two to seven times as long on bfloat16 maps, and twice the memory. The
    teacher gets no gradient.

    Example:
        >>> float(SquaredDistance.apply(torch.ones(2, 3), torch.zeros(2, 3), 6))
        1.0
    """

    @staticmethod
    def forward(ctx, student_map: torch.Tensor, teacher_map: torch.Tensor, divisor: int) -> torch.Tensor:
        gap = student_map - teacher_map
        ctx.save_for_backward(gap)
        ctx.scale, ctx.dtype = 2.0 / divisor, student_map.dtype
        return gap.float().square().sum() / divisor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gap,) = ctx.saved_tensors
        return (gap * (gradient * ctx.scale)).to(ctx.dtype), None, None


def project(weight: torch.Tensor, features: torch.Tensor, dim: int) -> torch.Tensor:
    """``weight`` times the channels of ``features``: a bias-free 1 × 1 conv in whichever layout."""
    if dim == features.ndim - 1:
        return F.linear(features, weight)
    return F.conv2d(features, weight[:, :, None, None])
