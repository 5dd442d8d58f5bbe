"""What a run shows while it goes on, on stderr: a line for each stage, and a spinner while it lasts on a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def say(line: str) -> None:
    """Print a line to stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def spinner(name: str, show: bool = True) -> Iterator[None]:
    """Say on a terminal what is going on; nothing where stderr is a file or a pipe.

    Example:
        >>> with spinner("prune"):
        ...     pass
    """
    if not show or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{name} …"):
        yield
