"""Replace a folder as a whole: readers see the old one or the new one, also when the process dies in between.

The new folder is written beside the old one and flushed to disk; then the two change places in one system call
(``renameat2`` with ``RENAME_EXCHANGE``). Where the system has no such call, two renames do it; should the process die
between them, the old folder is put back by the next writer.
"""

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_FDCWD = -100


@contextmanager
def replacing(folder: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty folder to write into; it takes the place of ``folder`` if the block ends without an error.

    Files of the old folder that the new one does not have are carried over.

    Example:
        >>> target = Path(tempfile.mkdtemp()) / "model"
        >>> with replacing(target) as new:
        ...     _ = (new / "a.txt").write_text("whole")
        >>> (target / "a.txt").read_text()
        'whole'
    """
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _put_back(folder)
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.writing."))
    try:
        if folder.exists():
            shutil.copymode(folder, new)
        else:
            os.chmod(new, 0o777 & ~_umask())  # mkdtemp's own mode is for one user only
        yield new
        if folder.exists():
            _carry_over(folder, new)
        _flush_tree(new)
        if folder.exists():
            _exchange(new, folder)
        else:
            os.rename(new, folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # what is there now is the old folder, or an unfinished one


def _exchange(new: Path, folder: Path) -> None:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or an old C library
        call = None
    if call is not None:
        if call(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(folder), _EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    old = _parked(folder)
    os.rename(folder, old)
    try:
        os.rename(new, folder)
    except OSError:
        os.rename(old, folder)
        raise
    os.rename(old, new)  # where the caller removes it


def _parked(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _put_back(folder: Path) -> None:
    """Undo what a process left that died between two renames."""
    old = _parked(folder)
    if old.exists():
        if folder.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, folder)


def _carry_over(folder: Path, new: Path) -> None:
    for path in folder.iterdir():
        target = new / path.name
        if target.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target, symlinks=True, copy_function=_link)
        else:
            _link(path, target)


def _link(source, target) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """A rename that reaches the disk before the data would leave an empty file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    except OSError:  # a file system that can't
        pass
    finally:
        os.close(descriptor)
