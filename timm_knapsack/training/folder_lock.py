"""One run in a folder at a time: a lock that ends with its process, however that ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed
    fcntl = None


@contextmanager
def only_run_in(folder: str | os.PathLike | None, accelerator: Any) -> Iterator[None]:
    """Holds the folder (it is created if needed) for this run; a second run is refused on each of its processes.

    The system holds the lock for the process and drops it when that ends, so a crash leaves nothing behind. File
    systems without locks have none: the run goes on as if there were no other.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> with only_run_in("tuned", accelerator):
        ...     with only_run_in("tuned", accelerator):
        ...         pass
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.CheckpointError: another run writes to tuned just now; ...
    """
    if folder is None:
        yield
        return
    descriptor, problem = None, None
    if accelerator.is_main_process:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            descriptor = _locked(folder)
        except BlockingIOError:
            problem = f"another run writes to {folder} just now; wait for it, or choose another output_dir"
        except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
            reason = getattr(error, "strerror", None) or error
            problem = f"can't use {folder} for checkpoints: {reason}; choose another output_dir"
    try:
        problem = _told_by_main(problem, accelerator)
        if problem:
            raise CheckpointError(problem)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _locked(folder: str | os.PathLike) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _told_by_main(value: Any, accelerator: Any) -> Any:
    """The main process's value on every process."""
    if accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
