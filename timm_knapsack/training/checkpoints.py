"""Checkpoints that are either whole or not there, whenever the process dies.

A checkpoint is a folder: one ``<part>.safetensors`` for each set of weights, ``optimizer.pt`` for plain optimiser
state (written by ``torch.save``, read with ``weights_only=True``), and ``state.json``, which also lists size and CRC-32
of the other files. It replaces its predecessor in four steps, each of them atomic:

1. everything is written and flushed to disk in ``<name>.writing``, which a reader ignores;
2. ``<name>.writing`` becomes ``<name>.next``: from here on the new checkpoint counts;
3. ``<name>`` becomes ``<name>.previous``;
4. ``<name>.next`` becomes ``<name>``, and the previous one is deleted.

``settle`` finishes or undoes what a killed process left behind, so a reader sees the old or the new checkpoint, whole.
"""

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

FORMAT = "timm-knapsack/checkpoint"
VERSION = 1
_READ_BLOCK = 2**20


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds: ``tensors[part][name]``, ``optimizer`` (or None) and the JSON ``state``."""

    path: Path
    tensors: dict[str, dict[str, torch.Tensor]]
    optimizer: dict[str, Any] | None
    state: dict[str, Any]


def write_checkpoint(
    path: str | Path,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder so that a crash at any moment leaves the old one or the new one, whole.

    Args:
        path: the folder to write or replace.
        tensors: weights by part; part ``model`` becomes ``model.safetensors``.
        state: plain JSON data.
        optimizer: plain tensors, numbers and containers of them.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "last"
        >>> _ = write_checkpoint(folder, {"model": {"w": torch.ones(2)}}, {"update": 7})
        >>> checkpoint = read_checkpoint(folder)
        >>> checkpoint.state["update"], checkpoint.tensors["model"]["w"]
        (7, tensor([1., 1.]))
    """
    from safetensors.torch import save_file

    path = Path(path)
    writing = path.with_name(path.name + ".writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        settle(path)
        writing.mkdir()
        for part, named in tensors.items():
            save_file(_separate(named), writing / f"{part}.safetensors", metadata={"format": "pt"})
        if optimizer is not None:
            torch.save(dict(optimizer), writing / "optimizer.pt")
        files = {file.name: _fingerprint(file) for file in sorted(writing.iterdir())}
        header = {"format": FORMAT, "version": VERSION, "files": files}
        text = json.dumps({**header, **state}, indent=1, allow_nan=False)
        (writing / "state.json").write_text(text + "\n", encoding="utf-8")
        for file in writing.iterdir():
            _flush(file)
        _flush(writing)
        following = path.with_name(path.name + ".next")
        os.rename(writing, following)
        _flush(path.parent)
        settle(path)
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"can't write the checkpoint {path}: {error}; a former one is still whole") from error
    return path


def settle(path: str | Path) -> bool:
    """Finish or undo an interrupted write of ``path``; returns whether a checkpoint is there now."""
    path = Path(path)
    writing, following, previous = (path.with_name(path.name + end) for end in (".writing", ".next", ".previous"))
    if following.exists():  # complete: it only waits to be put in place
        if path.exists():
            _remove(previous)
            os.rename(path, previous)
        os.rename(following, path)
    elif previous.exists() and not path.exists():
        os.rename(previous, path)
    if path.parent.exists():
        _flush(path.parent)
    _remove(previous)
    _remove(writing)
    return path.exists()


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint folder; a damaged or foreign one is a ``CheckpointError`` that names the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    state = _read_state(path)
    tensors, optimizer = {}, None
    for name, expected in state.pop("files").items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
        if _fingerprint(file) != expected:
            raise CheckpointError(f"{file} is not what was written (size or CRC-32 differ); restore it from a copy")
        try:
            if file.suffix == ".safetensors":
                tensors[file.stem] = load_file(file)
            elif name == "optimizer.pt":
                optimizer = torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{file} can't be read: {str(error).splitlines()[0]}") from error
    return Checkpoint(path, tensors, optimizer, state)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint: state.json can't be read ({error})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("files"), dict):
        raise CheckpointError(f"{path}/state.json is not of the format {FORMAT!r}")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {state.get('version')!r}, this timm_knapsack reads {VERSION}")
    if any(Path(name).name != name for name in state["files"]):  # a path would lead outside the folder
        raise CheckpointError(f"{path}/state.json lists a file outside the checkpoint")
    return state


def first_difference(saved: Any, now: Any, place: str = "") -> str | None:
    """Where two JSON values differ first, in words; None if they are equal.

    Example:
        >>> first_difference({"lr": 1, "args": {"nesterov": True}}, {"lr": 1, "args": {"nesterov": False}}, "config")
        'config.args.nesterov is True in the checkpoint and False now'
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in [*saved, *(key for key in now if key not in saved)]:
            here = f"{place}.{key}" if place else str(key)
            if key not in saved:
                return f"{here} is not in the checkpoint and {now[key]!r} now"
            if key not in now:
                return f"{here} is {saved[key]!r} in the checkpoint and missing now"
            difference = first_difference(saved[key], now[key], here)
            if difference:
                return difference
        return None
    return None if saved == now else f"{place} is {saved!r} in the checkpoint and {now!r} now"


def _separate(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors that share no memory: safetensors refuses channels_last and tied weights."""
    seen, separate = set(), {}
    for name, tensor in named.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return separate


def _fingerprint(file: Path) -> dict[str, int]:
    crc, size = 0, 0
    with open(file, "rb") as stream:
        while block := stream.read(_READ_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}


def _flush(path: Path) -> None:
    """fsync a file or folder: a rename that reaches the disk before the data would leave an empty checkpoint."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders; its renames are flushed with the journal
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
