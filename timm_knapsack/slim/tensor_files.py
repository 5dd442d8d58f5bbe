"""The one writer of safetensors files: whole or not at all, with the permissions of the user's umask."""

import os
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
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
        safetensors.torch.save_file(separate(tensors), new, metadata=dict(metadata or {"format": "pt"}))
    return Path(path)


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
