"""Sorted indices as short text: ``0-3,5,9-11``. A file may be untrusted: sizes are checked first."""

import re
from collections.abc import Iterable

from ..errors import ChannelConfigError

MAX_INDEX = 2**20  # no layer of a real model has more output channels
_TEXT = re.compile(r"[0-9]{1,7}(-[0-9]{1,7})?(,[0-9]{1,7}(-[0-9]{1,7})?)*", re.ASCII)


def ranges_text(indices: Iterable[int]) -> str:
    """Sorted indices, each once, as text.

    Example:
        >>> ranges_text([0, 1, 2, 3, 5, 9, 10])
        '0-3,5,9-10'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def read_ranges(text: str, place: str, count: int) -> tuple[int, ...]:
    """The indices that a text of `ranges_text` stands for; an error that names ``place`` where it is not one.

    Args:
        count: how many they must be; checked before they are made.

    Example:
        >>> read_ranges("0-3,5,9-10", "kept", 7)
        (0, 1, 2, 3, 5, 9, 10)
    """
    if not _TEXT.fullmatch(text):
        raise ChannelConfigError(f"{place} is {text[:60]!r}, expected sorted ranges such as '0-3,5,9-11'")
    runs = [tuple(int(end) for end in (run.split("-") * 2)[:2]) for run in text.split(",")]
    before = -1
    for first, last in runs:
        if not before < first <= last < MAX_INDEX:
            raise ChannelConfigError(f"{place}: {first}-{last} after {before} is not sorted, or larger than any layer")
        before = last
    named = sum(last - first + 1 for first, last in runs)
    if named != count:
        raise ChannelConfigError(f"{place} names {named} channels, and the width is {count}")
    return tuple(index for first, last in runs for index in range(first, last + 1))
