"""Checkpoints that are either whole or not there, whenever the process dies.

A checkpoint is a folder: one ``<part>.safetensors`` for each set of weights, ``optimizer.pt`` for plain optimiser
state (written by ``torch.save``, read with ``weights_only=True``), and ``state.json``, which also lists size and CRC-32
of the other files. It replaces its predecessor as a whole (`files.atomic`); ``settle`` undoes what a killed process
left behind, so a reader sees the old or the new checkpoint, whole.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..errors import CheckpointError, KnapsackError, first_line
from ..files.atomic import replacing_folder
from ..files.paths import named_path
from ..files.plain_json import MAX_BYTES, parse_json, read_json, read_limited, shortened, write_json
from ..slim.tensor_files import write_state, write_tensors

FORMAT = "timm-knapsack/checkpoint"
VERSION = 1
_READ_BLOCK = 2**20
_FILE = re.compile(r"\w{1,100}\.safetensors|optimizer\.pt", re.ASCII)


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
    path = named_path(path, CheckpointError)
    check_replaceable(path)
    try:
        with replacing_folder(path, carry_over=False) as new:
            for part, named in tensors.items():
                write_tensors(new / f"{part}.safetensors", named)
            if optimizer is not None:
                write_state(new / "optimizer.pt", dict(optimizer))
            files = {file.name: _fingerprint(file) for file in sorted(new.iterdir())}
            header = {"format": FORMAT, "version": VERSION, "files": files}
            write_json(new / "state.json", {**header, **state}, exact=True)
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"can't write the checkpoint {path}: {reason}; a former one is still whole") from error
    return path


def check_replaceable(path: str | Path) -> None:
    """Refuse a folder that may not be replaced by a checkpoint: one that is none, or that holds more than one does.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "thesis.tex").write_text("years of work")
        >>> check_replaceable(folder)
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.CheckpointError: ... holds thesis.tex, which no checkpoint has, so it is not replaced; ...
    """
    path = named_path(path, CheckpointError)
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, expected a folder for a checkpoint; choose another output_dir")
    names = {file.name for file in path.iterdir()} - {"state.json"}
    more = sorted(name for name in names if not _FILE.fullmatch(name))
    if more:
        raise CheckpointError(
            f"{path} holds {more[0]}, which no checkpoint has, so it is not replaced; choose another output_dir"
        )
    listed = _listed_files(path / "state.json")
    if listed is None and any(path.iterdir()):
        raise CheckpointError(
            f"{path} is no checkpoint of timm-knapsack (its state.json does not say so), so it is not replaced; choose "
            "another output_dir, or remove it yourself"
        )
    more = sorted(names - (listed or set()))
    if more:
        raise CheckpointError(
            f"{path} holds {more[0]}, which its state.json does not list, so it is not replaced; move it elsewhere, or "
            "choose another output_dir"
        )


def _listed_files(file: Path) -> set[str] | None:
    """The files that a checkpoint of whichever version lists; None where this is none."""
    try:
        state = parse_json(read_limited(file, MAX_BYTES), str(file))
    except KnapsackError:
        return None
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("files"), dict):
        return None
    return set(state["files"])


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint folder; a damaged or foreign one is a ``CheckpointError`` that names the file."""
    path = named_path(path, CheckpointError)
    state, before = _read_state(path), _fingerprint(path / "state.json")
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
        except Exception as error:  # zip, pickle and safetensors raise whatever comes of a damaged file
            raise CheckpointError(f"{file} can't be read: {first_line(error)}") from error
    if _fingerprint(path / "state.json") != before:  # it lists the checksums of all other files
        raise CheckpointError(f"{path} was replaced while it was read: another process writes it; read it again")
    return Checkpoint(path, tensors, optimizer, state)


def _read_state(path: Path) -> dict[str, Any]:
    state = read_json(path / "state.json", "a checkpoint", format=FORMAT, version=VERSION, error=CheckpointError)
    if not isinstance(state.get("files"), dict):
        raise CheckpointError(f"{path}/state.json lists no files; the checkpoint is damaged")
    other = [name for name in state["files"] if not _FILE.fullmatch(name)]  # a path would lead outside the folder
    if other:
        raise CheckpointError(f"{path}/state.json lists the file {shortened(other[0])}, which no checkpoint has")
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


def _fingerprint(file: Path) -> dict[str, int]:
    crc, size = 0, 0
    with open(file, "rb") as stream:
        while block := stream.read(_READ_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}
