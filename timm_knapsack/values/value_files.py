"""Reading a safetensors file of values that a stranger may have written: its tensors, and what it says about itself."""

import json
import os
from typing import Any

from safetensors.torch import load
from torch import Tensor

from ..errors import ScoreError, first_line
from ..files.paths import check_readable, named_path
from ..files.plain_json import parse_json, shortened

MAX_BYTES = 64 * 2**20  # the curves of the largest timm model are some MB
FIELDS = {"criterion": str, "model": str, "data": str, "samples": int}


def format_of(path: str | os.PathLike) -> str | None:
    """What the file says it is; an error if it is no safetensors file."""
    return _opened(path, "scores or value curves", None)[1].get("format")


def read_values(path: str | os.PathLike, kind: str, format: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The tensors, and the JSON objects among the metadata (``about``, ``notes``), of a file of this format.

    Args:
        kind: what the file should be in words, for errors: ``"scores"``.
    """
    tensors, metadata = _opened(path, kind, format)
    objects = {}
    for key in metadata.keys() - {"format"}:
        objects[key] = parse_json(metadata[key], f"{path}: {shortened(key)}", ScoreError)
        if not isinstance(objects[key], dict):
            raise ScoreError(f"{path}: {shortened(key)} is {shortened(objects[key])}, expected an object")
    about = objects.get("about", {})
    for key, value in about.items():
        if key not in FIELDS or type(value) is not FIELDS[key]:
            raise ScoreError(f"{path}: about[{shortened(key)}] is {shortened(value)}, which no file of {kind} says")
    return tensors, objects


def _opened(path: str | os.PathLike, kind: str, format: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Without a ``format``, of any."""
    path = named_path(path, ScoreError)
    check_readable(path, ScoreError)
    try:
        with open(path, "rb") as file:  # once: safe_open does so twice, and another process may replace it in between
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ScoreError(f"{path} is larger than {MAX_BYTES / 2**20:g} MiB, which no file of {kind} is")
        tensors = dict(sorted(load(data).items()))  # it gives them in no order
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
        if format is not None and metadata.get("format") != format:
            raise ScoreError(
                f"{path}: not a file of {kind} (its format says {metadata.get('format')!r}); `timm-knapsack score` "
                "writes one"
            )
        return tensors, metadata
    except ScoreError:
        raise
    except FileNotFoundError:
        raise ScoreError(f"there is no file {path}; `timm-knapsack score` writes one") from None
    except Exception as error:  # of the system, of safetensors, or of torch for a dtype that it does not have
        raise ScoreError(f"{path}: can't be read as {kind}: {first_line(error)}") from None
