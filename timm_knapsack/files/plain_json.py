"""JSON files: the one cleaner of data, the one writer, and the one reader, which trusts no file."""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import KnapsackError
from .atomic import write_text
from .paths import named_path

MAX_BYTES = 32 * 2**20  # the longest run's record is a few MB


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


def parse_json(text: str, source: str, error: type[KnapsackError] = KnapsackError, advice: str = "") -> Any:
    """The data of a JSON text that a stranger may have written; a key that stands twice, or NaN, is an error.

    Args:
        source: what the error calls the text.
        error: the class to raise.
        advice: what to do about it.

    Example:
        >>> parse_json('{"a": 1, "a": 2}', "a.json")
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.KnapsackError: a.json: the key 'a' stands twice in one object
    """
    end = f"; {advice}" if advice else ""

    def unique(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise error(f"{source}: the key {shortened(key)} stands twice in one object{end}")
            seen[key] = value
        return seen

    def no_constant(word):
        raise error(f"{source}: {word} is no number of JSON{end}")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise error(f"{source} is not JSON that can be read: it is nested too deeply{end}") from None
    except error:
        raise
    except ValueError as reason:
        raise error(f"{source} is not JSON: {reason}{end}") from None


def read_limited(
    path: str | os.PathLike, max_bytes: int, error: type[KnapsackError] = KnapsackError, advice: str = ""
) -> str:
    """A text file in UTF-8 of at most so many bytes; nothing of a larger one is read, nor of a pipe nobody writes to.

    Example:
        >>> import tempfile
        >>> read_limited(write_text(Path(tempfile.mkdtemp()) / "a.txt", "whole"), 100)
        'whole'
    """
    end = f"; {advice}" if advice else ""
    path = named_path(path, error)
    try:
        with open(path, "rb", opener=_without_waiting) as file:  # its size on disk says nothing of a pipe
            data = file.read(max_bytes + 1)
            if not data and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise error(f"{path} is a pipe that nobody writes to{end}")
        if len(data) > max_bytes:
            raise error(f"{path} is larger than {max_bytes / 2**20:g} MiB, which no such file is{end}")
        return data.decode("utf-8")
    except OSError as reason:
        raise error(f"{path} can't be read: {reason.strerror or reason}{end}") from None
    except UnicodeDecodeError:
        raise error(f"{path} is not a text file in UTF-8{end}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a named pipe that nobody writes to at once, as an empty one; a plain ``open`` would wait for ever."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(descriptor, True)  # who writes at a pipe's other end may take their time
    return descriptor


def shortened(value: Any, length: int = 80) -> str:
    """``repr`` of a value that a stranger may have made, in one line and not longer than this.

    Example:
        >>> shortened("a" * 100, 10)
        "'aaaaaa..."
    """
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= length else text[: length - 3] + "..."


def is_number(value: Any) -> bool:
    """Whether a value of a file is a finite number: neither NaN nor text, and not larger than a float can be.

    Example:
        >>> is_number(3), is_number(10**400), is_number(True)
        (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def read_json(
    path: str | os.PathLike,
    kind: str,
    *,
    format: str,
    version: int,
    error: type[KnapsackError] = KnapsackError,
    advice: str = "",
    max_bytes: int = MAX_BYTES,
) -> dict[str, Any]:
    """Read a JSON file of ours; one that is unreadable, of another format or version is an error that says so.

    Args:
        kind: what the file is in words, for the error: ``"a latency table"``.
        format: what its key ``format`` must say, ``version`` likewise.
        error: the class to raise.
        advice: what to do about it.
        max_bytes: a larger file is refused.

    Example:
        >>> import tempfile
        >>> path = write_json(Path(tempfile.mkdtemp()) / "a.json", {"format": "mine", "version": 2})
        >>> read_json(path, "a list of mine", format="mine", version=2)["version"]
        2
    """
    end = f"; {advice}" if advice else ""
    data = parse_json(read_limited(path, max_bytes, error, advice), str(path), error, advice)
    if not isinstance(data, dict) or data.get("format") != format:
        raise error(f"{path} is not {kind} of timm-knapsack (its format is not {format!r}){end}")
    if data.get("version") != version:
        raise error(f"{path} has version {shortened(data.get('version'))}, this timm_knapsack reads {version}{end}")
    return data
