"""Names of files that a user, a recipe or a folder gives: what the system can have, and what can be read to an end."""

import errno
import os
from pathlib import Path
from typing import Any

from ..errors import KnapsackError

_NO_NAME = (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


def named_path(name: str | os.PathLike, error: type[KnapsackError] = KnapsackError, home: bool = False) -> Path:
    """A path whose name the system can have; whether anything is there is not asked.

    Zero bytes, halves of characters and names that are too long are otherwise different raw errors wherever they are
    first used.

    Args:
        home: a leading ``~`` is the user's home.

    Example:
        >>> named_path("resnet18-half").name
        'resnet18-half'
        >>> named_path("a\\0b")
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.KnapsackError: 'a\\x00b' can't be the name of a file or folder: embedded null byte
    """
    try:
        path = Path(os.path.expanduser(name) if home else name)
        os.lstat(path)
    except (OSError, ValueError, TypeError) as reason:
        if isinstance(reason, OSError) and reason.errno not in _NO_NAME:  # not there, or not for us to see
            return path
        why = getattr(reason, "strerror", None) or getattr(reason, "reason", None) or reason
        raise error(f"{_shown(name)} can't be the name of a file or folder: {why}") from None
    return path


def check_readable_files(folder: str | os.PathLike, error: type[KnapsackError] = KnapsackError) -> None:
    """Refuse a folder in which something is neither file nor folder: who opens a named pipe may wait for ever.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> os.mkfifo(folder / "model.safetensors")
        >>> check_readable_files(folder)
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.KnapsackError: ... is neither a file nor a folder, so it is not read
    """
    for path in sorted(Path(folder).iterdir()):
        check_readable(path, error)


def check_readable(path: str | os.PathLike, error: type[KnapsackError] = KnapsackError) -> None:
    """The same of one file; what is not there is left to whoever opens it."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise error(f"{path} is neither a file nor a folder, so it is not read")


def _shown(name: Any) -> str:
    text = repr(name)
    return text if len(text) <= 80 else text[:77] + "..."
