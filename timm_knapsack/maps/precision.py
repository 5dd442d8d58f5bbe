"""Passes in bfloat16 where the hardware multiplies it faster than float32: half the time, and nobody sees the rounding.

``benchmarks/pass_precision.py`` measures both: class scores move by a KL divergence below 1e-3, where pruning moves
them by 0.1 and more. Sums, solves and everything that a hook computes stay in float32 or float64.

What a CPU says of itself is not enough: a virtual machine that announces AMX and does not let it run kills the process
at the first product, and without AMX bfloat16 may be slower than float32. So a child process tries it first, on a
block like a ResNet's and one like a transformer's, forward and back. Gradients are another matter: torch's bfloat16
gradients of depthwise convs take so long on a CPU that a step of EfficientNet-Lite0 takes half as long again as in
float32. So a long training tries its own step in both (`step_gains`).
"""

import functools
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..slim.modes import eval_mode

log = logging.getLogger(__name__)

LEAST_MACS = 300e6  # of one image; below, passes take so little that float32 costs nobody's patience
LEAST_GAIN = 1.25  # times as fast as float32, in the trial
CURE = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"  # in the environment: bfloat16 without AMX
_TRIAL_SECONDS = 60
_TRIAL = """
import time, torch
from torch import nn
torch.set_num_threads(1)
conv, point = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 256, 1)
wide, narrow = nn.Linear(192, 768), nn.Linear(768, 192)
maps, tokens = torch.randn(4, 64, 56, 56).contiguous(memory_format=torch.channels_last), torch.randn(8, 197, 192)
def step():
    mixed = narrow(wide(tokens))
    heads = mixed.unflatten(2, (3, 64)).transpose(1, 2)
    attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return sum(x.float().mean() for x in (point(conv(maps).relu()), mixed, attended))
def seconds(fast):
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        loss = step()
    loss.backward()
    return time.perf_counter() - start
seconds(False), seconds(True)
taken = [(seconds(False), seconds(True)) for _ in range(5)]
print(min(whole for whole, _ in taken) / min(half for _, half in taken))
"""


def fast_passes(device: torch.device, wanted: bool = True) -> AbstractContextManager:
    """bfloat16 inside the context, if it is wanted and the device computes it faster than float32.

    Example:
        >>> with fast_passes(torch.device("cpu")):
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
    """
    if not wanted or not bfloat16_is_faster(device):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def passes_gain(model: nn.Module, images: Tensor) -> bool:
    """Does one image take so much computing that the precision of passes matters for time, and do they run in bfloat16?

    Example:
        >>> passes_gain(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 32, 32))
        False
    """
    return image_macs(model, images) >= LEAST_MACS and runs_in_bfloat16(model, images)


def runs_in_bfloat16(model: nn.Module, images: Tensor) -> bool:
    """Is this device faster in bfloat16, and does the model run so? Autocast does not know every layer.

    Example:
        >>> runs_in_bfloat16(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 8, 8, device="meta"))
        False
    """
    if not bfloat16_is_faster(images.device):
        return False
    with eval_mode(model), torch.no_grad(), fast_passes(images.device):
        try:
            model(images[:2])
        except RuntimeError as error:  # "All tensors must have the same dtype": nn.Bilinear, or a user's own code
            log.info("passes stay in float32: in bfloat16 the network ends with %s", error)
            return False
    return True


def image_macs(model: nn.Module, images: Tensor) -> float:
    """MACs of a pass of the first of these images, as torch counts them.

    Example:
        >>> image_macs(nn.Conv2d(3, 8, 1), torch.zeros(2, 3, 4, 4))
        384.0
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:  # torch's counter fails where a module is handed a parameter (CaiT's class token)
            parameter.requires_grad_(False)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(images[:1])
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
    return counter.get_total_flops() / 2


def bfloat16_is_faster(device: torch.device) -> bool:
    """Does this device multiply bfloat16 clearly faster than float32? A CPU is tried once, which takes seconds.

    Example:
        >>> bfloat16_is_faster(torch.device("meta"))
        False
    """
    if device.type == "cpu":
        return _claims_bfloat16() and cpu_gain() >= LEAST_GAIN
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def step_gains(step: Callable[[], Any], device: torch.device) -> bool:
    """Is this step, forward and back, clearly faster in bfloat16? On a CPU it is tried, three times in each precision.

    A step that does not run in bfloat16 gains nothing by it.

    Example:
        >>> step_gains(lambda: None, torch.device("meta"))
        False
    """
    if not bfloat16_is_faster(device):
        return False
    if device.type != "cpu":
        return True

    def seconds(fast: bool) -> float:
        start = time.process_time()
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            step()
        return time.process_time() - start

    seconds(False)  # what fails in float32 fails here, as itself
    try:
        seconds(True)
    except RuntimeError as error:
        log.info("a step stays in float32: in bfloat16 it ends with %s", error)
        return False
    taken = [(seconds(False), seconds(True)) for _ in range(2)]
    gain = min(whole for whole, _ in taken) / max(min(half for _, half in taken), 1e-9)
    log.info("a step in bfloat16 is %.2f times as fast as in float32", gain)
    return gain >= LEAST_GAIN


def depthwise(module: nn.Module) -> bool:
    """Has it convs that see one channel each, whose gradients in bfloat16 take long on a CPU?

    Example:
        >>> depthwise(nn.Conv2d(8, 8, 3, groups=8)), depthwise(nn.Conv2d(8, 8, 3, groups=2))
        (True, False)
    """
    convs = (part for part in module.modules() if isinstance(part, nn.Conv2d))
    return any(conv.groups == conv.in_channels > 1 for conv in convs)


def bfloat16_kills() -> bool:
    """Does this CPU announce bfloat16 and end the process at the first product? ``CURE`` is the way out.

    Example:
        >>> bfloat16_kills() in (True, False)
        True
    """
    return _claims_bfloat16() and cpu_gain() == 0.0


def _claims_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@functools.cache
def cpu_gain() -> float:
    """How many times faster this CPU is in bfloat16, tried in a process that may die of it; takes seconds.

    0 if that process dies, 1 if its trial says nothing (it took too long, or could not begin).

    Example:
        >>> cpu_gain() >= 0
        True
    """
    if not sys.executable:
        return 1.0
    command = [sys.executable, "-c", _TRIAL]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=True)
        gain = float(tried.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        code = getattr(error, "returncode", None)
        log.info("passes stay in float32: a trial of bfloat16 on this CPU ended with %s", code or type(error).__name__)
        return 1.0 if code in (None, 1) else 0.0  # a trial that took too long, or could not begin, says nothing
    log.info("bfloat16 is %.2f times as fast as float32 on this CPU", gain)
    return gain
