"""What a run shows while it goes on, on stderr: a line for each stage, and a spinner while it lasts on a terminal."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PAUSES = (10, 50, 240, 300)  # seconds between two signs of life in a log; the last one repeats


def say(line: str) -> None:
    """Print a line to stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def signs_of_life(name: str, own_bar: bool = False, say: Callable[[str], Any] = say) -> Iterator[None]:
    """Say what is going on: a spinner on a terminal, unless the stage has a bar of its own; in a file or a pipe a line
    now and then, where it takes long.

    Example:
        >>> with signs_of_life("prune"):
        ...     pass
    """
    if not sys.stderr.isatty():
        done = threading.Event()
        threading.Thread(target=_say_now_and_then, args=(name, done, say), daemon=True).start()
        try:
            yield
        finally:
            done.set()
    elif own_bar:
        yield
    else:
        from rich.console import Console

        with Console(stderr=True).status(f"{name} …"):
            yield


def _say_now_and_then(name: str, done: threading.Event, say: Callable[[str], Any], pauses=PAUSES) -> None:
    start = time.monotonic()
    for pause in itertools.chain(pauses[:-1], itertools.repeat(pauses[-1])):
        if done.wait(pause):
            return
        say(f"{name}: still running, {time.monotonic() - start:.0f} s")
