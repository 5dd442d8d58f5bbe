"""The one writer: a file or folder is replaced as a whole, also when the process dies at any moment.

What is new is written in a folder beside the target and flushed to disk, then put in place: a file by ``os.replace``, a
folder by exchanging the two in one system call (``renameat2`` with ``RENAME_EXCHANGE``). Where the system has no such
call, two renames do it; should the process die between them, `settle` puts the old folder back.

The writer holds a lock on its folder. One that nobody holds any more was left by a process that was killed: the next
writer of the same target, and `settle`, remove it. What is written has the permissions of the user's umask, whichever
library wrote it; a folder that is replaced keeps its own.
"""

import ctypes
import errno
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what a killed process left stays
    fcntl = None

_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_FDCWD = -100
_NO_SUCH_CALL = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextmanager
def replacing_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a path of the same name to write to; it takes the place of ``path`` if the block ends without an error.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with replacing_file(target) as new:
        ...     _ = new.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = _nameable(path).absolute()
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    _remove_abandoned(path)
    with _place_beside(path) as place:
        new = place / path.name
        try:
            yield new
        except OSError as error:
            if error.filename in (str(new), None):  # the caller knows nothing of this one
                error.filename = str(path)
            raise
        os.chmod(new, stat.S_IMODE(place.stat().st_mode) & 0o666)  # safetensors' own are for one user only
        flush(new)
        os.replace(new, path)
        flush(path.parent)


def write_text(path: str | os.PathLike, text: str) -> Path:
    """Write a text file in UTF-8, whole or not at all; returns its path.

    Halves of characters, which JSON and names of files can hold and UTF-8 can't, are written as ``\\ud800``.

    Example:
        >>> import tempfile
        >>> write_text(Path(tempfile.mkdtemp()) / "a.txt", "whole").read_text()
        'whole'
    """
    with replacing_file(path) as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)


@contextmanager
def replacing_folder(folder: str | os.PathLike, *, carry_over: bool = True) -> Iterator[Path]:
    """Yields an empty folder to write into; it takes the place of ``folder`` if the block ends without an error.

    Args:
        carry_over: files of the old folder that the new one does not have come along.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "model"
        >>> with replacing_folder(target) as new:
        ...     _ = (new / "a.txt").write_text("whole")
        >>> (target / "a.txt").read_text()
        'whole'
    """
    folder = _nameable(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    settle(folder)
    with _place_beside(folder) as new:
        if folder.exists():
            shutil.copymode(folder, new)
        yield new
        if carry_over and folder.exists():
            _carry_over(folder, new)
        _flush_tree(new)
        if folder.exists():
            _exchange(new, folder)
        else:
            os.rename(new, folder)
        flush(folder.parent)


def _nameable(path: str | os.PathLike) -> Path:
    """What the system can't have in a name (a zero byte, half a character) is its error, as all else that it can't."""
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("embedded null byte")
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    return Path(path)


def settle(path: str | os.PathLike) -> bool:
    """Undo what a killed process left of writing ``path``; returns whether there is a whole one now.

    Example:
        >>> settle("nowhere/model")
        False
    """
    path = Path(path).resolve()
    parked = _parked(path)
    if parked.exists():
        if path.exists():
            shutil.rmtree(parked)
        else:
            os.rename(parked, path)
        flush(path.parent)
    _remove_abandoned(path)
    return path.exists()


def flush(path: str | os.PathLike) -> None:
    """Bring a file or folder to the disk: a rename that reached it before the data would leave an empty file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders; its renames are flushed with the journal
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:  # a file system without it; all else (a full disk) is an error
            raise
    finally:
        os.close(descriptor)


# ---- the place to write in ---------------------------------------------------------------------------------------


@contextmanager
def _place_beside(target: Path) -> Iterator[Path]:
    """An empty, locked folder on the same file system; it is removed afterwards, with what it holds then."""
    while True:
        place = target.with_name(f".{target.name}.writing.{secrets.token_hex(4)}")
        try:
            os.mkdir(place)
        except OSError as error:  # the caller knows nothing of this folder
            raise OSError(error.errno, error.strerror, str(target)) from None
        lock = _locked(place)
        if place.exists():  # else it was taken for an abandoned one before it was locked
            break
        _unlock(lock)
    try:
        yield place
    finally:
        try:
            shutil.rmtree(place, ignore_errors=True)  # what is there now is the old folder, or an unfinished one
        finally:
            _unlock(lock)


def _remove_abandoned(target: Path) -> None:
    for place in target.parent.glob(f".{glob.escape(target.name)}.writing.{'[0-9a-f]' * 8}"):
        lock = _locked(place, wait=False)
        if lock is not None:
            try:
                shutil.rmtree(place, ignore_errors=True)
            finally:
                _unlock(lock)


def _locked(place: Path, wait: bool = True) -> int | None:
    """A descriptor that holds the lock of a folder until it is closed; None where there are no such locks."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(place, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # somebody writes there, or a network file system without locks for folders
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


# ---- folders -----------------------------------------------------------------------------------------------------


def _exchange(new: Path, folder: Path) -> None:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or an old C library
        call = None
    if call is not None:
        if call(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(folder), _EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in _NO_SUCH_CALL:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    _exchange_by_renames(new, folder)


def _exchange_by_renames(new: Path, folder: Path) -> None:
    parked = _parked(folder)
    os.rename(folder, parked)
    try:
        os.rename(new, folder)
    except OSError:
        os.rename(parked, folder)
        raise
    os.rename(parked, new)  # where it is removed


def _parked(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old.timm-knapsack")  # a name that nobody gives to a folder of their own


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


def _flush_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _flush_tree(path)
        elif path.is_file() and not path.is_symlink():
            flush(path)
    flush(folder)
