"""JSON files: the one cleaner of data, the one writer, and the one reader that checks a file's format and version."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import KnapsackError
from .atomic import write_text


def plain(value: Any) -> Any:
    """What JSON can say of a value: infinite numbers become null, sets sorted lists, paths and the like text.

    Example:
        >>> plain({1: (float("nan"), {"b", "a"}), "folder": Path("model")})
        {'1': [None, ['a', 'b']], 'folder': 'model'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if value - value == 0 else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item") and hasattr(value, "shape") and all(size == 1 for size in value.shape):
        return plain(value.item())  # a number of torch or numpy
    return str(value)


def to_json(data: Any, *, indent: int = 1, sort_keys: bool = False) -> str:
    """The text of a JSON file; NaN and what JSON has no words for are errors, so clean with `plain` where they may be.

    Example:
        >>> to_json({"update": 7}, indent=0)
        '{\\n"update": 7\\n}\\n'
    """
    return json.dumps(data, indent=indent, sort_keys=sort_keys, allow_nan=False) + "\n"


def write_json(path: str | os.PathLike, data: Any, *, exact: bool = False, **style) -> Path:
    """Write JSON that appears whole or not at all; returns its path.

    Args:
        exact: refuse (``ValueError``, ``TypeError``) what JSON can't say, in place of cleaning it with `plain`.
        style: ``indent`` and ``sort_keys``, as in `to_json`.

    Example:
        >>> import tempfile
        >>> write_json(Path(tempfile.mkdtemp()) / "a.json", {"loss": float("inf")}).read_text()
        '{\\n "loss": null\\n}\\n'
    """
    return write_text(path, to_json(data if exact else plain(data), **style))


def read_json(
    path: str | os.PathLike,
    kind: str,
    *,
    format: str,
    version: int,
    error: type[KnapsackError] = KnapsackError,
    advice: str = "",
) -> dict[str, Any]:
    """Read a JSON file of ours; one that is unreadable, of another format or version is an error that says so.

    Args:
        kind: what the file is in words, for the error: ``"a latency table"``.
        format: what its key ``format`` must say, ``version`` likewise.
        error: the class to raise.
        advice: what to do about it.

    Example:
        >>> import tempfile
        >>> path = write_json(Path(tempfile.mkdtemp()) / "a.json", {"format": "mine", "version": 2})
        >>> read_json(path, "a list of mine", format="mine", version=2)["version"]
        2
    """
    end = f"; {advice}" if advice else ""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"{path} can't be read: {reason.strerror or reason}{end}") from None
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} is not JSON: {reason}{end}") from None
    if not isinstance(data, dict) or data.get("format") != format:
        raise error(f"{path} is not {kind} of timm-knapsack (its format is not {format!r}){end}")
    if data.get("version") != version:
        raise error(f"{path} has version {data.get('version')!r}, this timm_knapsack reads {version}{end}")
    return data
