"""The one writer of tensors: files are whole or not there; one that can't be written is the system's own error."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..files.atomic import replacing_file


def write_tensors(
    path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write named tensors; by default the metadata says ``{"format": "pt"}``, as timm and transformers expect it.

    Example:
        >>> import tempfile, torch
        >>> tied = torch.arange(3.0)
        >>> path = write_tensors(Path(tempfile.mkdtemp()) / "a.safetensors", {"a": tied, "b": tied})
        >>> safetensors.torch.load_file(path)["b"]
        tensor([0., 1., 2.])
    """
    with replacing_file(path) as new:
        try:
            safetensors.torch.save_file(separate(tensors), new, metadata=dict(metadata or {"format": "pt"}))
        except safetensors.SafetensorError as error:
            raise _system_error(error, path) from None
    return Path(path)


def write_state(path: str | os.PathLike, state: Any) -> Path:
    """Write plain optimiser state by ``torch.save``, which alone keeps its nesting; read it with ``weights_only=True``.

    Example:
        >>> import tempfile, torch
        >>> path = write_state(Path(tempfile.mkdtemp()) / "optimizer.pt", {"step": torch.tensor(3)})
        >>> torch.load(path, weights_only=True)
        {'step': tensor(3)}
    """
    with replacing_file(path) as new, open(new, "wb") as file:
        stream = _Remembering(file)
        try:
            torch.save(state, stream)
        except RuntimeError:  # torch says "unexpected pos 576 vs 534" where the disk is full
            raise stream.error or OSError(errno.EIO, os.strerror(errno.EIO), str(path)) from None
    return Path(path)


class _Remembering:
    """A file to write to that remembers what went wrong."""

    def __init__(self, file):
        self.file, self.error = file, None

    def write(self, data) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _system_error(error: Exception, path: str | os.PathLike) -> Exception:
    """safetensors tells the system's error in words: ``… (os error 28)``, before 0.6 ``… Os { code: 28, …``."""
    found = re.search(r"(?:\(os error |Os \{ code: )(\d+)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path)) if found else error


def separate(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory: safetensors refuses channels_last and tied weights.

    Example:
        >>> import torch
        >>> weight = torch.ones(2)
        >>> apart = separate({"a": weight, "b": weight})
        >>> apart["a"].data_ptr() == apart["b"].data_ptr()
        False
    """
    seen, apart = set(), {}
    for name, tensor in named.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart
