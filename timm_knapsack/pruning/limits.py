"""How many units of each group may stay, from what a user says about rounding, least widths and single layers."""

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import KnapsackError
from ..slim.channel_groups import ChannelGroup, ChannelGroups

STREAMS = ":streams"  # no layer's name has a colon


class Limits:
    """How many units of each group may stay."""

    def __init__(
        self,
        groups: ChannelGroups,
        round_to: int,
        min_keep: float,
        ignore: str | Sequence[str],
        bounds: Mapping[str, tuple[float, float]],
    ):
        if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
            raise KnapsackError(f"round_to={round_to!r}: expected a whole number of channels, such as 8")
        if isinstance(min_keep, bool) or not isinstance(min_keep, (int, float)) or not min_keep > 0:
            raise KnapsackError(f"min_keep={min_keep!r}: expected a count from 1, or a fraction between 0 and 1")
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        for pattern in (*ignore, *bounds):
            if pattern != STREAMS and not any(_matches(group, pattern) for group in groups):
                raise KnapsackError(f"the pattern {pattern!r} matches no group; names are like {groups[0].name!r}")
        self.round_to, self.min_keep, self.ignore, self.bounds = round_to, min_keep, ignore, bounds
        self.options = {"round_to": round_to, "min_keep": min_keep, "ignore": list(ignore), "bounds": dict(bounds)}

    def range(self, group: ChannelGroup, step: int) -> tuple[int, int]:
        if any(_matches(group, pattern) for pattern in self.ignore):
            return group.size, group.size
        least, most = _count(self.min_keep, group.size), group.size
        if group.crosses_norm and _width(group) == 1:  # a norm over a single channel leaves nothing of it
            least = max(least, min(2, group.size))
        for pattern, (low, high) in self.bounds.items():
            if _matches(group, pattern):
                least, most = _count(low, group.size), _count(high, group.size)
                if least > most:
                    raise KnapsackError(f"bounds[{pattern!r}]: {low} is more than {high}")
        return min(-(-least // step) * step, group.size), most

    def step(self, group: ChannelGroup) -> int:
        """Units in a bundle of ``round_to`` channels."""
        return self.round_to // int(np.gcd(self.round_to, _width(group)))


def _width(group: ChannelGroup) -> int:
    """Channels of a unit, in the layer that makes the group's channels first."""
    return next(s.index.shape[1] for s in group.slices if s.role == "out")


def _count(value: float, size: int) -> int:
    count = int(np.ceil(value * size)) if isinstance(value, float) and value <= 1 else int(value)
    return min(max(count, 1), size)


def _matches(group: ChannelGroup, pattern: str) -> bool:
    if pattern == STREAMS:
        return group.is_stream
    names = {group.name, *(s.param.rsplit(".", 1)[0] for s in group.slices if s.role == "out")}
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
