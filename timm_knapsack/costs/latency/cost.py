"""Measured time as a function of the kept units of each group: the `latency` cost of a budget. Unit: seconds."""

import copy
from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import nn

from ...runtimes.runtime import Run
from ...slim.channel_groups import Count
from ..cost import Cost, LayerCost
from . import correction
from .layer_timing import Conditions
from .network_timing import Comparison, time_in_turns
from .stopwatch import Stopwatch
from .time_surface import Surface


def on_stairs(widths: np.ndarray, stair: int | np.ndarray) -> np.ndarray:
    """The next multiples of the stair.

    Example:
        >>> on_stairs(np.array([24, 28]), 8)
        array([24, 32])
    """
    return -(-widths // stair) * stair


class LatencyCost(Cost):
    """A sum of surfaces, one for each timed layer, and what the whole network takes beyond them.

    Args:
        widths: for each layer, its two widths.
        surfaces: for each layer, its time.
        calibration: (factor, constant): the network takes factor × the sum of its layers + constant.
        steps: units of each group that are best kept together.
        stairs: for each layer, how many channels the device takes together: a width in between costs as the next stair.
        windows: for each layer and axis, how many channels to look to either side for a slope.
        conditions: how to measure; None if this machine is not the one of the table.
        check_seconds: at most this long to measure one result.
    """

    name, unit = "latency", "s"

    def __init__(
        self,
        names: Sequence[str],
        widths: Sequence[tuple[Count, Count]],
        surfaces: Sequence[Surface],
        groups: int,
        *,
        calibration: tuple[float, float] = (1.0, 0.0),
        steps: Sequence[int] | None = None,
        stairs: Sequence[int] | None = None,
        windows: np.ndarray | None = None,
        conditions: Conditions | None = None,
        check_seconds: float = 40.0,
        clock=None,
    ):
        self.names, self.steps, self.conditions = list(names), steps, conditions
        self.about = {} if conditions is None else conditions.to_dict()
        self._factor, self._constant = calibration
        self._check_seconds, self._clock = check_seconds, clock
        self._original: tuple[nn.Module, Run] | None = None
        layers = len(names)
        self._units = np.zeros((2, layers, groups))
        self._fixed = np.zeros((2, layers))
        knots = max((len(k) for surface in surfaces for k in surface.knots), default=1) + 1
        self._knots = np.full((2, layers, knots), np.inf)
        self._last = np.zeros((2, layers), dtype=int)  # index of the last knot but one
        self._ends = np.zeros((2, layers, 2))
        self._values = np.zeros((layers, knots, knots))
        for i, (counts, surface) in enumerate(zip(widths, surfaces, strict=True)):
            values = surface.values
            for axis in (0, 1):
                self._fixed[axis, i] = counts[axis].fixed
                for group, times in counts[axis].units:
                    self._units[axis, i, group] += times
                ends = surface.knots[axis]
                self._ends[axis, i] = ends[0], ends[-1]
                if len(ends) == 1:  # an axis that can't change: a second knot that is never reached
                    ends = np.array([ends[0], ends[0] + 1])
                    values = np.repeat(values, 2, axis=axis)
                self._knots[axis, i, : len(ends)] = ends
                self._last[axis, i] = len(ends) - 2
            self._values[i, : values.shape[0], : values.shape[1]] = values
        self._stairs = np.ones(layers) if stairs is None else np.asarray(stairs)
        self._windows = np.ones((2, layers)) if windows is None else np.maximum(windows, 1)

    def at(self, kept):
        return float(self._factor * self.layers_at(kept).sum() + self._constant)

    def layers_at(self, kept) -> np.ndarray:
        """Seconds of each layer."""
        widths = np.stack([on_stairs(axis, self._stairs) for axis in self._widths(kept)])
        return self._seconds(np.minimum(widths, self._ends[:, :, 1]))

    def marginal(self, kept):
        """What a channel costs as one of a bundle: the slope across stairs, not the zero between two of them."""
        widths = self._widths(kept)
        total = np.zeros(self._units.shape[2])
        for axis in (0, 1):
            low, high = widths.copy(), widths.copy()
            low[axis] = np.maximum(widths[axis] - self._windows[axis], self._ends[axis, :, 0])
            high[axis] = np.minimum(widths[axis] + self._windows[axis], self._ends[axis, :, 1])
            run = high[axis] - low[axis]
            rise = np.maximum(self._seconds(high) - self._seconds(low), 0)  # below 0 by rounding only
            total += np.where(run > 0, rise / np.where(run > 0, run, 1), 0) @ self._units[axis]
        return self._factor * total

    def _widths(self, kept) -> np.ndarray:
        return self._units @ np.asarray(kept, dtype=float) + self._fixed

    def _seconds(self, widths: np.ndarray) -> np.ndarray:
        rows = np.arange(widths.shape[1])
        below, part = [], []
        for axis in (0, 1):
            index = np.clip((self._knots[axis] <= widths[axis][:, None]).sum(axis=1) - 1, 0, self._last[axis])
            left, right = self._knots[axis, rows, index], self._knots[axis, rows, index + 1]
            below.append(index)
            part.append(np.clip((widths[axis] - left) / (right - left), 0, 1))
        (i, j), (a, b) = below, part
        v = self._values
        top = v[rows, i, j] * (1 - b) + v[rows, i, j + 1] * b
        bottom = v[rows, i + 1, j] * (1 - b) + v[rows, i + 1, j + 1] * b
        return top * (1 - a) + bottom * a

    def shortened(self, removed, left, sizes):
        """A layer that is gone takes no time; what surrounds the layers is taken to stay, until it is measured."""
        rows = [i for i, name in enumerate(self.names) if not any(f"{name}.".startswith(f"{r}.") for r in removed)]
        gone = [group for group in range(len(sizes)) if group not in set(left)]
        shorter = copy.copy(self)
        shorter.names = [self.names[i] for i in rows]
        shorter.steps = None if self.steps is None else [self.steps[group] for group in left]
        fixed = self._fixed + self._units[:, :, gone] @ np.asarray(sizes, dtype=float)[gone]
        shorter._fixed, shorter._units = fixed[:, rows], self._units[:, rows][:, :, list(left)]
        for name in ("_knots", "_last", "_ends", "_windows"):
            setattr(shorter, name, getattr(self, name)[:, rows])
        shorter._values, shorter._stairs = self._values[rows], self._stairs[rows]
        return shorter

    # ---- on the device

    def compare(self, model: nn.Module, slim: nn.Module) -> Comparison | None:
        """Measure both in turns; None where this machine is not the table's."""
        if self.conditions is None:
            return None
        with self.conditions.active():
            if self._original is None or self._original[0] is not model:  # a runtime may take long to convert it
                self._original = model, self.conditions.started(model)
            runs = [self._original[1], self.conditions.started(slim)]
        return time_in_turns(self.conditions, runs, max_seconds=self._check_seconds, clock=self._clock)

    def settle(self, solve, limit, model, whole, absolute=False):
        """Measure what was solved for; where it misses the budget, aim elsewhere and solve again."""
        return correction.settle(self, solve, limit, model, whole, absolute)

    def layer_costs(self, model, slim, sizes, kept, passes: int = 5):
        """Seconds layer by layer: original, predicted, measured."""
        predicted = self._factor * self.layers_at(kept)
        if self.conditions is None:
            original = self._factor * self.layers_at(sizes)
            return tuple(map(LayerCost, self.names, original.tolist(), predicted.tolist()))
        clock, images = self._clock or self.conditions.clock(), self.conditions.images()
        watch = Stopwatch(self.conditions.open_runtime(), self.names, clock, images)
        runs: list[list[dict[str, float]]] = [[], []]
        with self.conditions.active(), watch:
            copies = [watch.take(f"{n}", partial(self.conditions.copied, net)) for n, net in enumerate((model, slim))]
            for _ in range(passes):
                for timed, run in zip(copies, runs, strict=True):
                    run += timed.layer_seconds(1)
        before, after = ([float(np.median([times[n] for times in run])) for n in self.names] for run in runs)
        return tuple(map(LayerCost, self.names, before, predicted.tolist(), after))
