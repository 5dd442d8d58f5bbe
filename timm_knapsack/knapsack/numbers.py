"""Numbers for the knapsack: whole weights without rounding, and selections by efficiency."""

import math

import numpy as np

from ..errors import KnapsackError

LONGEST_WEIGHT = 2**60  # two of them, and the room, can be added to a sum of up to twice this in int64
_FLOAT_BITS, _WIDEST_SPREAD = 512, 1500  # of whole numbers scaled to floats, which span 2**-1022 to 2**1024


def as_whole_numbers(weights, capacity):
    """Weights and capacity as whole numbers of one unit, without rounding; Python ints where int64 could overflow."""
    unit = 1
    if weights.dtype.kind == "f":
        distinct, class_of = _classes(weights)
        ratios = [weight.as_integer_ratio() for weight in distinct.tolist()]
        unit = max((bottom for _, bottom in ratios), default=1)  # all are powers of two
        whole = [top * (unit // bottom) for top, bottom in ratios]
        short = max(whole, default=0) * len(weights) < LONGEST_WEIGHT
        weights = np.array(whole, dtype=np.int64 if short else object)[class_of]
    elif weights.dtype != object:
        weights = weights.astype(np.int64 if weights.sum(dtype=np.float64) < LONGEST_WEIGHT else object)
    top, bottom = capacity.as_integer_ratio()
    return weights, top * unit // bottom  # a part of a unit can't hold anything


def _classes(weights):
    """The distinct weights, and for each weight the number of its own. Equal ones often stand side by side."""
    first = np.flatnonzero(np.diff(weights, prepend=np.nan) != 0)  # nan differs from all
    distinct, class_of = np.unique(weights[first], return_inverse=True)
    return distinct, np.repeat(class_of.reshape(-1), np.diff(first, append=len(weights)))


def divide_by_gcd(whole, capacity):
    """Positive weights in their largest common unit: smaller numbers, and no capacity that nothing can use."""
    divisor = int(np.gcd.reduce(whole)) if len(whole) else 1
    whole = whole // divisor
    return whole.astype(np.int64) if whole.sum() < LONGEST_WEIGHT else whole, capacity // divisor


def how_many_fit(whole, capacity):
    """How many items fit when they are taken in this order, up to the first that does not."""
    return int(np.searchsorted(np.cumsum(whole), min(capacity, int(whole.sum())), side="right"))


def float_scale(whole):
    """What to divide whole numbers by before they become floats: 1, or a power of two for very long ones."""
    if whole.dtype != object or not len(whole):
        return 1
    longest, shortest = int(whole.max()).bit_length(), int(whole.min()).bit_length()
    if longest - shortest > _WIDEST_SPREAD:
        raise KnapsackError(f"weights differ by a factor of 2**{longest - shortest}; give the tiny ones as 0")
    return 2 ** max(0, longest - _FLOAT_BITS)


def to_float(whole, scale):
    return (whole / scale if scale > 1 else whole).astype(np.float64)


def scale_values(values):
    """Values scaled exactly to at most 1, so that nothing made of them overflows or vanishes; and the exponent."""
    exponent = math.frexp(values.max(initial=0.0))[1]
    return np.ldexp(values, -exponent), exponent


def by_efficiency(values, whole):
    efficiency = scale_values(values)[0] / to_float(whole, float_scale(whole))
    return np.argsort(-efficiency, kind="stable")


def break_solution(values, whole, capacity):
    """The mask of the items taken, the room left, and the break item; for items that don't all fit together."""
    order = by_efficiency(values, whole)
    count = how_many_fit(whole[order], capacity)
    taken = np.zeros(len(values), dtype=bool)
    taken[order[:count]] = True
    return taken, capacity - int(whole[taken].sum()), int(order[count])


def lp_bound(values, whole, capacity):
    """The best value if items could be taken in part (Dantzig's bound), rounded up."""
    if how_many_fit(whole, capacity) == len(whole):
        return math.fsum(values.tolist())
    taken, room, broken = break_solution(values, whole, capacity)
    return (math.fsum(values[taken].tolist()) + values[broken] * (room / int(whole[broken]))) * (1 + 1e-15)
