"""What all verbs share: printing, checks of what was typed, and errors in one line."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import KnapsackError
from ..files.plain_json import plain, to_json


def stdout():
    """A rich console; plain and 120 wide when piped, so that scripts get whole lines."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, soft_wrap=True, highlight=False)


def warn(text: str) -> None:
    """A remark that also a script's log should hold."""
    print(f"note: {text}", file=sys.stderr)


def print_json(data: Any) -> None:
    print(to_json(plain(data)), end="")


def print_costs(report: dict[str, Any], title: str) -> None:
    """Original, asked, counted, measured."""
    from ..human_numbers import COST_COLUMNS, cost_text

    print_table(list(COST_COLUMNS), [cost_text(line) for line in report["costs"]], title)


def print_table(head: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """A table of texts."""
    from rich.table import Table

    table = Table(*head, title=title)
    for row in rows:
        table.add_row(*row)
    stdout().print(table)


def parse_settings(settings: list[str] | None, what: str) -> dict[str, Any]:
    """``["a=1", "b=[x, y]"]`` → ``{"a": 1, "b": ["x", "y"]}``; values are read as YAML."""
    import yaml

    result = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise KnapsackError(f"{what} {text!r}: expected KEY=VALUE, such as num_classes=100")
        try:
            result[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise KnapsackError(f"{what} {text!r}: {value!r} is no value") from None
    return result


def choose_device(device: str) -> str:
    """``auto`` is the best there is; a device that is not there is an error."""
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise KnapsackError(f"--device {device!r} is no device; try auto, cpu or cuda") from None
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(
        kind.type, 1
    )
    if (kind.index or 0) >= there:
        found = f"{there} of this kind are there" if there else "none is there"
        raise KnapsackError(
            f"--device {device}: {found}; use --device auto or cpu (`timm-knapsack doctor` lists devices)"
        )
    return device


def check_new(folder: str | os.PathLike, overwrite: bool) -> Path:
    """A folder that can be written and holds nothing yet, unless it is to be replaced."""
    folder = check_writable(folder)
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise KnapsackError(f"{folder} is there already; choose another --out, or replace it with --overwrite")
    return folder


@contextmanager
def listening_to_ctrl_c() -> Iterator[None]:
    """The first Ctrl-C becomes SIGTERM where somebody listens to that: training ends with a checkpoint. The second, or
    the first elsewhere, stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGINT)

    def stop(signum, frame):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not callable(signal.getsignal(signal.SIGTERM)):
            raise KeyboardInterrupt
        print("stopping after this step; Ctrl-C once more stops at once", file=sys.stderr)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def check_writable(folder: str | os.PathLike) -> Path:
    """A folder that can be written, created if needed; checked before the work starts."""
    folder = Path(folder).expanduser()
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise KnapsackError(f"--out {folder}: {there} is a file, expected a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise KnapsackError(f"--out {folder}: no permission to write in {there}; choose another folder")
    return folder


def one_line(error: BaseException) -> tuple[str, int]:
    """An error as one line, and its exit code: 2 for what the user can change, 1 for what failed underway."""
    text = " ".join(str(error).split())
    cause = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" ({cause.filename})" if cause.filename else ""
            return (
                f"the disk is full{where}: free some space, or write elsewhere with --out; finished stages are kept",
                1,
            )
        if "No space left on device" in str(cause):
            return "the disk is full: free some space, or write elsewhere with --out; finished stages are kept", 1
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, KnapsackError):
        return text, 2
    if isinstance(error, PermissionError):
        return f"no permission for {error.filename or text}; choose another folder with --out", 2
    if isinstance(error, OSError):
        return f"{error.filename or ''}{': ' if error.filename else ''}{error.strerror or text}", 1
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return "out of memory: try a smaller --batch-size", 1
    return f"{type(error).__name__}: {text[:300]} (a fault of timm-knapsack; --debug shows the trace)", 1
