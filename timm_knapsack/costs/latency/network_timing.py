"""The time of whole networks, measured in turns: what disturbs the machine disturbs all of them.

All times are in seconds for one forward pass of one batch, of a network that has just run: its weights are where they
are when it runs all day.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import LatencyError
from ...runtimes.runtime import Run
from .conditions import MeasuringConditions
from .layer_timing import WARM_UP, Conditions, time_pass

PASSES = 2  # of a network in its turn: the first finds what another network left in the caches


@dataclass(frozen=True)
class Latency:
    """Time of one forward pass of one batch, in seconds.

    Example:
        >>> Latency.of([0.010, 0.011, 0.012, 0.030])
        Latency(11.5 ms ± 2.9 ms, 4 passes)
    """

    median: float
    spread: float  # half of the distance between the quartiles
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Latency":
        low, median, high = np.quantile(samples, (0.25, 0.5, 0.75))
        return cls(float(median), float(high - low) / 2, tuple(float(s) for s in samples))

    @property
    def uncertainty(self) -> float:
        """Half width of the median's 95 % interval (McGill's notch), as a fraction of the median."""
        return notch(self.samples)

    def __repr__(self):
        return f"Latency({self.median * 1e3:.1f} ms ± {self.spread * 1e3:.1f} ms, {len(self.samples)} passes)"


@dataclass(frozen=True)
class Comparison:
    """Several networks measured in turns, round after round.

    ``ratios[i]`` is the median of (network i ÷ network 0) over the quieter half of the rounds, by the time of the whole
    round, each with the faster of its two passes: what else runs on a machine does not slow all networks alike.
    ``latencies`` are of the second passes.
    """

    latencies: tuple[Latency, ...]
    ratios: tuple[float, ...]
    uncertainty: tuple[float, ...]  # half width of each ratio's 95 % interval, as a fraction of it


def notch(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return math.inf
    low, median, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float(1.57 * (high - low) / math.sqrt(len(samples)) / median)


def measure_latency(
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    *,
    conditions: MeasuringConditions | None = None,
    clock=None,
    **options,
) -> Latency:
    """Time of one forward pass: the median over passes, until it is known well enough or the time (10 s) is up.

    Args:
        input_size: ``(channels, height, width)``; the model's own by default.
        conditions: all measuring conditions at once; those given by name win.
        options: single fields of `MeasuringConditions`: dtype, channels_last, runtime, int8, threads, timer
            (``"thread"`` counts the CPU time of a single thread, for a machine that others use too), precision,
            max_seconds.

    Example:
        >>> measure_latency(model, batch_size=8, max_seconds=0.5)
        Latency(... ms ± ... ms, ... passes)
    """
    asked = MeasuringConditions.read(conditions, **_given(input_size, batch_size, device), **options)
    asked = replace(asked, max_seconds=asked.seconds(10.0))
    return compare_latency([model], conditions=asked, clock=clock).latencies[0]


def compare_latency(
    models: Sequence[nn.Module],
    input_size: Sequence[int] | None = None,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    *,
    conditions: MeasuringConditions | None = None,
    clock=None,
    **options,
) -> Comparison:
    """Measure several networks in turns, so that what disturbs the machine disturbs all of them; 20 s at most.

    Takes the same arguments as `measure_latency`.

    Example:
        >>> compare_latency([model, result.model], max_seconds=0.5).ratios
        (1.0, ...)
    """
    if not models:
        raise LatencyError("compare_latency needs at least one model")
    asked = MeasuringConditions.read(conditions, **_given(input_size, batch_size, device), **options)
    limits = {"precision": asked.precision, "max_seconds": asked.seconds(20.0)}
    return compare_under(Conditions.of(models[0], asked), models, **limits, clock=clock)


def _given(input_size, batch_size, device) -> dict[str, Any]:
    given = {"input_size": input_size, "batch_size": batch_size, "device": device}
    return {name: value for name, value in given.items() if value is not None}


def compare_under(
    conditions: Conditions,
    models: Sequence[nn.Module],
    *,
    precision: float = 0.01,
    max_seconds: float = 20.0,
    min_rounds: int = 7,
    clock=None,
) -> Comparison:
    """`compare_latency` under given conditions."""
    limits = {"precision": precision, "max_seconds": max_seconds, "min_rounds": min_rounds}
    with conditions.active():
        networks = [conditions.started(model) for model in models]
    return time_in_turns(conditions, networks, **limits, clock=clock)


def time_in_turns(
    conditions: Conditions,
    networks: Sequence[Run],
    *,
    precision: float = 0.01,
    max_seconds: float = 20.0,
    min_rounds: int = 7,
    clock=None,
) -> Comparison:
    """`compare_latency` of what ``conditions.started`` gave, or of anything else that takes its images."""
    clock = clock or conditions.clock()
    images = conditions.images()
    order = np.random.default_rng(0)
    rounds: list[np.ndarray] = []  # network × pass
    with conditions.active():
        for network in networks:
            for _ in range(WARM_UP):
                time_pass(network, images, clock)
        start = time.monotonic()
        while True:
            times = np.zeros((len(networks), PASSES))
            for i in order.permutation(len(networks)):
                times[i] = [time_pass(networks[i], images, clock) for _ in range(PASSES)]
            rounds.append(times)
            if len(rounds) >= min_rounds:
                late = time.monotonic() - start > max_seconds
                if late or max(_uncertainties(rounds)) <= precision or len(rounds) >= 1000:
                    break
    ratios = np.median(quiet_ratios(rounds), axis=1).tolist()
    return Comparison(tuple(map(Latency.of, _second_passes(rounds))), tuple(ratios), tuple(_uncertainties(rounds)))


def on_images(run: Run, images: Tensor) -> Run:
    """The same on images of its own, whatever it is given: networks in turns may take images of different sizes.

    Example:
        >>> on_images(lambda images: images.sum(), torch.ones(2))(None)
        tensor(2.)
    """
    return lambda _: run(images)


def _second_passes(rounds: list[np.ndarray]) -> np.ndarray:
    """Network × round."""
    return np.array(rounds)[:, :, -1].T


def quiet_ratios(rounds: list[np.ndarray]) -> np.ndarray:
    """Network × round: its faster pass ÷ the first network's, in the quieter half of the rounds."""
    times = np.array(rounds).min(axis=2)
    quiet = times[np.argsort(times.sum(axis=1), kind="stable")[: (len(times) + 1) // 2]]
    return (quiet / quiet[:, :1]).T


def _uncertainties(rounds: list[np.ndarray]) -> list[float]:
    if len(rounds[0]) == 1:
        return [notch(_second_passes(rounds)[0])]
    return [notch(ratios) for ratios in quiet_ratios(rounds)]
