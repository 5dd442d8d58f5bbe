"""The 0/1 knapsack: choose the items of the largest total value whose total weight fits a capacity. Pure numpy.

``knapsack_exact`` holds the search that finds an optimum and proves it.
"""

import math
import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..errors import BudgetError, KnapsackError
from .exact import OPTIMALITY_TOLERANCE, solve_exact
from .numbers import as_whole_numbers, by_efficiency, divide_by_gcd, how_many_fit, lp_bound

METHODS = ("exact", "dp", "greedy")


@dataclass(frozen=True, eq=False)
class Solution:
    """A selection of items and how good it is.

    Attributes:
        keep: bool array, True for each item that is kept.
        value: total value of the kept items, correctly rounded.
        weight: total weight of the kept items, never above the capacity: an int for integer weights, else a float.
        upper_bound: no selection that fits is worth more; equal to ``value`` where that is proven.
        method: the method that found it.
    """

    keep: np.ndarray
    value: float
    weight: int | float
    upper_bound: float
    method: str

    @property
    def is_optimal(self) -> bool:
        """Whether the bound proves that no selection is better, up to ``OPTIMALITY_TOLERANCE``."""
        return self.upper_bound <= self.value + OPTIMALITY_TOLERANCE * abs(self.value)


def solve_knapsack(
    values: ArrayLike,
    weights: ArrayLike,
    capacity: float,
    method: str = "exact",
    *,
    max_states: int = 50_000_000,
    max_table_bytes: int = 4 * 2**30,
) -> Solution:
    """Choose the items of the largest total value with a total weight of at most ``capacity``.

    Items of negative value are never kept, items of weight 0 and value >= 0 always; ``"exact"`` and ``"dp"`` also keep
    items of value 0 where they still fit, the lightest first. Float weights are compared without rounding: 0.1 + 0.2
    does not fit 0.3, as in Python. Measured weights are best rounded to whole units (nanoseconds) before: sums that
    are equal then count as equal, and the search is faster. Inputs are never modified; equal inputs, equal answers.

    Args:
        values: what each item is worth; finite numbers.
        weights: what each item costs; finite numbers >= 0, integers or floats.
        capacity: the largest total weight; finite, >= 0.
        method: ``"exact"``: optimal and proven, up to a relative ``OPTIMALITY_TOLERANCE`` of 1e-12 (without tolerance
            where values are whole numbers that sum to less than 1e11). Milliseconds for the channels of a network.
            ``"dp"``: Algorithm 1 of the paper, a dynamic program over items × capacity / GCD. Optimal as well; time and
            memory grow with the capacity.
            ``"greedy"``: as published with the paper: drop the least efficient item until the rest fits. Nothing is
            filled up afterwards with items that would fit; an efficient item above the capacity empties the knapsack.
        max_states: limit of ``"exact"``: how many states its search may store (4 bytes each; 50 million take about
            10 s). Only adversarial instances need as many. Then the best selection found is returned with the bound
            known so far: ``upper_bound > value``, so that ``is_optimal`` is False, says that it is not proven.
        max_table_bytes: limit of ``"dp"``: its table holds one bit for each item and unit of capacity, in bytes
            n × (C/g + 1) / 8, beside two rows of 8 × (C/g + 1). More raises ``BudgetError`` with the size needed.

    Returns:
        The ``Solution``.

    Example:
        >>> solution = solve_knapsack([6.0, 10.0, 12.0], [1, 2, 3], 5)
        >>> solution.keep.tolist(), solution.value, solution.weight, solution.upper_bound
        ([False, True, True], 22.0, 5, 22.0)
        >>> solve_knapsack([6.0, 10.0, 12.0], [1, 2, 3], 5, method="greedy").keep.tolist()
        [True, True, False]
    """
    if method not in METHODS:
        raise KnapsackError(f"method={method!r} is unknown; use one of {', '.join(map(repr, METHODS))}")
    if max_states < 1:
        raise KnapsackError(f"max_states={max_states!r} leaves no room to search; give a positive number")
    values, weights = _read_items(values, weights)
    whole, whole_capacity = as_whole_numbers(weights, _read_capacity(capacity))

    keep = (whole == 0) & (values >= 0)
    free_value = math.fsum(values[keep].tolist())
    priced = (whole > 0) & (values > 0)
    fitting = np.flatnonzero(priced & (whole <= whole_capacity))
    reduced, reduced_capacity = divide_by_gcd(whole[fitting], whole_capacity)
    bound = None  # of what the priced items can be worth; None where their optimum is found
    if method == "greedy":
        order = np.flatnonzero(priced)
        order = order[by_efficiency(values[order], whole[order])]
        keep[order[: how_many_fit(whole[order], whole_capacity)]] = True
        bound = lp_bound(values[fitting], reduced, reduced_capacity)
    else:
        if how_many_fit(reduced, reduced_capacity) == len(fitting):
            bought = np.ones(len(fitting), dtype=bool)
        elif method == "dp":
            bought = _solve_dp(values[fitting], reduced, reduced_capacity, max_table_bytes)
        else:
            bought, bound = solve_exact(values[fitting], reduced, reduced_capacity, max_states)
        keep[fitting[bought]] = True
        worthless = np.flatnonzero((values == 0) & ~keep)
        worthless = worthless[np.argsort(whole[worthless], kind="stable")]
        keep[worthless[: how_many_fit(whole[worthless], whole_capacity - int(whole[keep].sum()))]] = True

    value = math.fsum(values[keep].tolist())
    weight = math.fsum(weights[keep].tolist()) if weights.dtype.kind == "f" else sum(weights[keep].tolist())
    return Solution(keep, value, weight, value if bound is None else max(value, free_value + bound), method)


def _read_items(values, weights):
    """Checked float64 values, and weights as they are: integers of any kind, or float64."""
    values, weights = _read_numbers(values, "values", dtype=np.float64), _read_numbers(weights, "weights")
    if len(values) != len(weights):
        raise KnapsackError(f"{len(values)} values for {len(weights)} weights; give one of each for every item")
    for name, array in (("values", values), ("weights", weights)):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            at = int(np.isfinite(array).argmin())
            raise KnapsackError(f"{name}[{at}] is {array[at]}; only finite numbers can be compared: remove it")
    if len(weights) and weights.min() < 0:
        at = int(weights.argmin())
        raise KnapsackError(f"weights[{at}] is {weights[at]}; an item can't free capacity: give weights >= 0")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.abs(values).sum()):
            raise KnapsackError(f"values up to {np.abs(values).max():.3g} sum to more than float64 holds: scale them")
    return values, weights


def _read_numbers(numbers, name, dtype=None):
    try:
        array = np.asarray(numbers)
        if array.size == 0 or array.dtype.kind == "f":
            array = array.astype(np.float64, copy=False)
        elif array.dtype.kind == "O":  # whole numbers beyond int64 come as Python ints
            array = np.array([operator.index(number) for number in array], dtype=object)
        elif array.dtype.kind not in "biu":
            raise TypeError(f"type {array.dtype}")
        array = array if dtype is None else array.astype(dtype, copy=False)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise KnapsackError(f"{name} can't be read as numbers: {error}; give integers or floats") from error
    if array.ndim != 1:
        raise KnapsackError(f"{name} has shape {array.shape}; give one dimension with one number for every item")
    return array


def _read_capacity(capacity):
    try:
        try:
            number = operator.index(capacity)
        except TypeError:
            number = float(capacity)
    except (TypeError, ValueError) as error:
        raise BudgetError(f"capacity={capacity!r} is not a number; give the largest total weight") from error
    if isinstance(number, float) and not math.isfinite(number):
        raise BudgetError(f"capacity={number} is not finite; to keep everything give the sum of the weights")
    if number < 0:
        raise BudgetError(f"capacity={number} is negative: not even the empty selection fits; give a number >= 0")
    return number


def _solve_dp(values, whole, capacity, max_table_bytes):
    """Algorithm 1 of the paper: ``best[f]`` for every capacity f, item by item, and one bit for every choice."""
    cells, row_bytes = capacity + 1, capacity // 8 + 1
    needed = len(values) * row_bytes + 16 * cells
    if needed > max_table_bytes:
        raise BudgetError(
            f"method='dp' needs {needed / 2**30:.3g} GiB for {len(values)} items × {cells} capacities, above "
            f"max_table_bytes={max_table_bytes / 2**30:.3g} GiB; use method='exact', which needs no table"
        )
    best, buffer = np.zeros(cells), np.empty(cells)
    chosen = np.empty((len(values), row_bytes), dtype=np.uint8)
    weight_of = whole.tolist()
    for item, value in enumerate(values.tolist()):
        without_item, with_item = best[weight_of[item] :], buffer[: cells - weight_of[item]]
        np.add(best[: len(with_item)], value, out=with_item)
        bits = np.packbits(with_item >= without_item)  # the first is for a capacity of the item's weight
        chosen[item, : len(bits)] = bits
        np.maximum(with_item, without_item, out=without_item)
    bought, room = np.zeros(len(values), dtype=bool), capacity
    for item in range(len(values) - 1, -1, -1):
        rest = room - weight_of[item]
        if rest >= 0 and chosen[item, rest // 8] >> (7 - rest % 8) & 1:
            bought[item], room = True, rest
    return bought
