"""A layer's time as a function of its two widths, monotone by construction, and the stairs in it.

Measured times are noisy, and a knapsack finds every dip that the noise leaves. So nothing is interpolated as measured:
a surface is fitted that can't fall when a width grows, and what the fit had to overrule is counted and said.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS = (16, 8, 4)  # channels that a device may take together
# Where noise hides them, stairs are assumed: AVX2 takes 8 floats at a time, tensor cores 8 halves. Bundles of 8 cost
# little importance; widths off the stairs of a device that has them cost time (benchmarks/latency_vs_macs.py).
ASSUMED_STEP = 8
SMOOTH = 0.005  # relative error of a parabola that leaves nothing for stairs to explain
LEAST_SECONDS = 1e-9  # errors are relative to the time; of less than this no clock tells anything
STIFFNESS = 0.1  # how much a bend in the surface must gain: noise goes into the smooth part


@dataclass(frozen=True)
class Surface:
    """Seconds over two widths, bilinear between knots; constant below the first knot of an axis.

    Example:
        >>> knots = np.array([8.0, 64.0])
        >>> Surface((knots, knots), np.array([[1.0, 2.0], [2.0, 6.0]])).at(36, 8)
        1.5
    """

    knots: tuple[np.ndarray, np.ndarray]
    values: np.ndarray  # seconds at the knots, rising along both axes
    pooled: int = 0  # pairs of measured points where the time fell with a width by more than a twentieth
    residual: float = 0.0  # median of |fitted − measured| ÷ measured

    def at(self, first: float, second: float) -> float:
        a, b = (_shares(knots, np.array([w]))[0] for knots, w in zip(self.knots, (first, second), strict=True))
        return float(a @ self.values @ b)


def fit_surface(widths: np.ndarray, seconds: np.ndarray, knots: Sequence[np.ndarray]) -> Surface:
    """The best rising surface through measured times.

    The surface is a sum of terms that rise with both widths, with coefficients ≥ 0: a constant, each width, their
    product (what a conv would take on an ideal device) and, where the data needs it, a bend at each pair of knots.
    Errors count relative to the time itself, and outliers count less (Huber).

    Args:
        widths: ``[points, 2]``.
        seconds: ``[points]``.
        knots: for each axis, ascending widths; the first and last are the ends of the measured range.
    """
    from scipy.optimize import nnls

    first, second = (np.asarray(axis, dtype=float) for axis in knots)
    rows = np.einsum("pi,pj->pij", _shares(first, widths[:, 0]), _shares(second, widths[:, 1]))
    basis = _rising(first, second)  # term × knot × knot
    design = np.einsum("pij,tij->pt", rows, basis)
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1  # a step up at a pair of widths that no copy reaches
    design, basis = design / scale, basis / scale[:, None, None]
    bends = np.eye(len(basis))[4:] * np.sqrt(STIFFNESS)
    seconds = np.maximum(seconds, LEAST_SECONDS)
    weight = 1 / seconds
    robust = np.ones(len(seconds))
    for _ in range(4):
        rows_now = np.concatenate([design * (weight * robust)[:, None] * seconds.mean(), bends])
        coefficients, _ = nnls(rows_now, np.concatenate([robust, np.zeros(len(bends))]), maxiter=50 * len(basis))
        coefficients = coefficients * seconds.mean()
        error = np.abs(design @ coefficients - seconds) * weight
        limit = max(2 * float(np.median(error)), 1e-3)
        robust = np.sqrt(np.minimum(1.0, limit / np.maximum(error, 1e-12)))
    values = np.einsum("t,tij->ij", coefficients, basis)
    return Surface((first, second), values, _falls(widths, seconds), float(np.median(error)))


def _rising(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """1, a, b, a·b, then a step up at every pair of knots, each as values at the knots."""
    a, b = np.meshgrid(first / first[-1], second / second[-1], indexing="ij")
    terms = [np.ones_like(a), a, b, a * b]
    for i in range(len(first)):
        for j in range(len(second)):
            if i or j:
                step = np.zeros_like(a)
                step[i:, j:] = 1
                terms.append(step)
    return np.stack(terms)


def _shares(knots: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """How much each knot counts at each width: ``[widths, knots]``, rows sum to 1."""
    knots, widths = np.asarray(knots, dtype=float), np.asarray(widths, dtype=float)
    shares = np.zeros((len(widths), len(knots)))
    if len(knots) == 1:
        shares[:] = 1
        return shares
    below = np.clip(np.searchsorted(knots, widths, side="right") - 1, 0, len(knots) - 2)
    part = np.clip((widths - knots[below]) / (knots[below + 1] - knots[below]), 0, 1)
    rows = np.arange(len(widths))
    shares[rows, below] = 1 - part
    shares[rows, below + 1] += part
    return shares


def _falls(widths: np.ndarray, seconds: np.ndarray) -> int:
    """Pairs of points where no width is smaller, one is larger, and the time is clearly less."""
    larger = (widths[:, None] >= widths[None]).all(-1) & (widths[:, None] != widths[None]).any(-1)
    return int((larger & (seconds[:, None] < seconds[None] * 0.95)).sum())


def find_step(offsets: Sequence[int], seconds: Sequence[float]) -> int:
    """How many channels a device takes together, from times at widths that differ by a few channels.

    A staircase of step s explains the times by ``a + b·⌈offset/s⌉ + c·(offset is not on a stair)`` with b, c ≥ 0; it is
    accepted where it leaves less than 0.7 of the error that a straight line leaves. Where neither a smooth
    curve nor a staircase explains the times, they say nothing, and ``ASSUMED_STEP`` is taken.

    Args:
        offsets: channels away from a width that is a multiple of every candidate.

    Example:
        >>> find_step([-8, -7, -4, -1, 0], [1.0, 2.0, 2.0, 2.0, 2.0])
        8
    """
    from scipy.optimize import nnls

    offsets, seconds = np.asarray(offsets), np.asarray(seconds, dtype=float)

    def error(*columns) -> float:
        return float(nnls(np.stack([np.ones(len(offsets)), *columns], axis=1), seconds)[1] ** 2)

    more = offsets - offsets.min()
    if error(more, more**2) < (SMOOTH * seconds.mean()) ** 2 * len(seconds):
        return 1
    best, best_error = ASSUMED_STEP, error(more) * 0.7
    for step in STEPS:
        stairs = -(-offsets // step)
        left = error(stairs - stairs.min(), (offsets % step != 0).astype(float))
        if left < best_error * 0.999:
            best, best_error = step, left
    return best
