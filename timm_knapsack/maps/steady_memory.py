"""Memory that stays with the process while the same passes run again and again.

After each pass glibc returns the memory of large activations to the system, or keeps it, by what else is stored
on the heap. The next pass then waits for every page to be mapped and zeroed again, or does not: efficientnet_b0 at
batch 1 on two cores took 37 ms in the first case and 23 to 27 ms in the second, in one process
(``benchmarks/page_faults.py``). Such times can't be compared, and training waits for nothing. Allocators made for
servers (jemalloc, tcmalloc) keep the memory; so does glibc when it is told to.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_DEFAULT_MMAP_MAX = 65536
_LARGEST_DYNAMIC_TRIM_THRESHOLD = 64 << 20  # what glibc arrives at by itself in a process with large tensors
_depth = 0


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def trim() -> None:
    """Hand memory that is free back to the system, where malloc is glibc's."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@contextmanager
def memory_kept() -> Iterator[None]:
    """Have malloc keep what is freed; at the end all of it is handed back.

    Where malloc is not glibc's, nothing is changed. What can't be undone: glibc no longer adapts its trim threshold, it
    stays at the 64 MB that it adapts to at most.

    Example:
        >>> with memory_kept():
        ...     pass
    """
    global _depth
    libc = _glibc()
    if libc is None:
        yield
        return
    _depth += 1
    if _depth == 1:
        libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
        libc.mallopt(_M_MMAP_MAX, 0)  # all from the heap: a block that was mapped by itself is unmapped when freed
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            libc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
            libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST_DYNAMIC_TRIM_THRESHOLD)
            libc.malloc_trim(0)
