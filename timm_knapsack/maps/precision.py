"""Passes in bfloat16 where the hardware multiplies it faster than float32: half the time, and nobody sees the rounding.

``benchmarks/pass_precision.py`` measures both: class scores move by a KL divergence below 1e-3, where pruning moves
them by 0.1 and more. Sums, solves and everything that a hook computes stay in float32 or float64.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

LEAST_MACS = 300e6  # of one image; below, passes take so little that float32 costs nobody's patience


def fast_passes(device: torch.device, wanted: bool = True) -> AbstractContextManager:
    """bfloat16 inside the context, if it is wanted and the device computes it faster than float32.

    Example:
        >>> with fast_passes(torch.device("cpu")):
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
    """
    if not wanted or not _is_able(device):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def is_large(model: nn.Module, images: Tensor) -> bool:
    """Does one image take so much computing that the precision of passes matters for time?

    Example:
        >>> is_large(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 32, 32))
        False
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images[:1])
    return counter.get_total_flops() >= 2 * LEAST_MACS


def _is_able(device: torch.device) -> bool:
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
