"""Lines of a benchmark, on the screen and in a file as they come: a run that is stopped has written what it found."""

from collections.abc import Callable
from pathlib import Path


def writer(path: Path | None) -> Callable[[str], None]:
    """A ``print`` that also appends to the file, if there is one."""

    def say(line: str) -> None:
        print(line, flush=True)
        if path:
            with path.open("a") as file:
                file.write(line + "\n")

    return say
