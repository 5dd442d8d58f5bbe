"""Several processes: which kinds of distribution are served, and what the others say when one of them dies."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import TrainingError

# Why not: the loss needs student, every M_l and the teacher's maps in one forward pass on each device.
_REFUSED = {
    "FSDP": "it cuts the weights into shards that a hook on a layer's map does not see whole, and the averages, "
    "checkpoints and exact resume here are those of whole weights",
    "DEEPSPEED": "it takes over the optimiser, the precision and the checkpoints, which exact resume needs",
    "MEGATRON_LM": "it is for language models",
    "XLA": "it compiles a graph of fixed shapes, without the hooks that inner distillation listens with",
}
# Words of gloo and of NCCL in the errors of a collective whose peer has gone.
_LOST = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe"),
    *("timed out waiting", "ncclremoteerror", "ncclsystemerror", "nccl communicator was aborted", "watchdog caught"),
)


def check_distribution(accelerator: Any) -> None:
    """Refuse a kind of distribution that this training does not serve, with the reason.

    Example:
        >>> from types import SimpleNamespace
        >>> try:
        ...     check_distribution(SimpleNamespace(distributed_type="FSDP"))
        ... except TrainingError as error:
        ...     print(str(error)[:36])
        fine-tuning does not run under FSDP:
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _REFUSED:
        raise TrainingError(
            f"fine-tuning does not run under {kind}: {_REFUSED[kind]}; use plain data parallelism "
            "(recipes/accelerate/gpu8.yaml): a pruned network and its teacher fit on one GPU"
        )


@contextmanager
def lost_process_named(accelerator: Any, last: Path | None) -> Iterator[None]:
    """Say that another process has gone, where the backend only speaks of a connection.

    gloo notices at once, NCCL on one machine with the launcher's help; across machines it takes NCCL's own time-out
    (``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``) unless the launcher of the other machine is told.
    """
    try:
        yield
    except (RuntimeError, torch.distributed.DistBackendError) as error:
        text = str(error).lower()
        if accelerator.num_processes == 1 or not any(words in text for words in _LOST):
            raise
        where = f"the last checkpoint is {last}: go on with resume" if last and last.exists() else "no checkpoint yet"
        raise TrainingError(
            f"another of the {accelerator.num_processes} processes has ended, so this one (process "
            f"{accelerator.process_index}) ends too; its own message says why. {where[0].upper()}{where[1:]} "
            f"({str(error).splitlines()[0][:160]})"
        ) from error


@contextmanager
def batchnorm_synchronised(student: nn.Module, accelerator: Any, wanted: bool) -> Iterator[None]:
    """While it lasts, every BatchNorm of the student sees the batches of all processes: torch's ``SyncBatchNorm``.

    The student gets its own modules back, with the weights and statistics that were learned: both share them.
    """
    if not wanted or accelerator.num_processes == 1:
        yield
        return
    if accelerator.device.type == "cpu":
        raise TrainingError(
            "sync_bn needs GPUs: torch's SyncBatchNorm does not run on the CPU; set freeze_bn_stats=True, which gives "
            "the same on any number of processes"
        )
    own = {name: part for name, part in student.named_modules() if isinstance(part, _BatchNorm)}
    convert_sync_batchnorm(student)
    try:
        yield
    finally:
        for name, module in own.items():
            parent, _, child = name.rpartition(".")
            setattr(student.get_submodule(parent), child, module)
