"""Wall time of whole networks and, in one pass, of every layer in its place.

All times are in seconds for one forward pass of one batch. A layer's time runs from the moment it is entered to the
moment the next layer is entered, so that the norm, the activation, the residual add and the attention product that
follow a layer belong to it, and the times of all layers sum to the time of the network.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .errors import LatencyError
from .tracing import copy_with, example_input, named_tensors

WARM_UP = 2


# ---- clocks -------------------------------------------------------------------------------------------------------


class WallClock:
    """Time on a device that is done when a call returns: the CPU."""

    def mark(self, module: nn.Module | None = None) -> Any:
        """Now; ``module`` is what is about to run, None where a pass ends."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The times between consecutive marks."""
        return [after - before for before, after in pairwise(marks)]


class ThreadClock(WallClock):
    """Time that this thread spent computing: what the wall clock of an idle machine would show for one thread."""

    def mark(self, module: nn.Module | None = None) -> Any:
        return time.thread_time()


class CudaClock:
    """Time on a CUDA stream, by events: the host runs ahead of the device and must not be timed."""

    def mark(self, module: nn.Module | None = None) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in pairwise(marks)]


# ---- the conditions a time holds under ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """What a measured time depends on besides the network."""

    device: str  # "cpu", "cuda"
    device_name: str
    threads: int
    batch_size: int
    input_size: tuple[int, ...]
    dtype: str
    memory_format: str  # "contiguous" or "channels_last"
    compiled: bool
    timer: str = "wall"  # or "thread": CPU time of a single thread

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        input_size: Sequence[int] | None = None,
        batch_size: int = 1,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool | None = None,
        compile: bool = False,
        threads: int | None = None,
        timer: str = "wall",
    ) -> "Conditions":
        """The conditions as asked; what is not asked is as the model and this process have it."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise LatencyError(f"batch_size={batch_size!r}: expected a whole number of images, such as 8")
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise LatencyError(f"threads={threads!r}: expected a whole number, such as 2")
        if timer not in ("wall", "thread"):
            raise LatencyError(f"timer={timer!r}: expected 'wall', or 'thread' for the CPU time of a single thread")
        tensors = [tensor for _, tensor in named_tensors(model) if tensor.is_floating_point()]
        if device is None:
            device = tensors[0].device if tensors and not tensors[0].is_meta else "cpu"
        device = torch.device(device)
        threads = threads or torch.get_num_threads()
        if timer == "thread" and (threads > 1 or device.type != "cpu"):
            raise LatencyError(f"timer='thread' sees one CPU thread; not {threads} on {device.type}: give threads=1")
        if dtype is None:
            dtype = tensors[0].dtype if tensors else torch.float32
        if channels_last is None:
            channels_last = any(
                t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
                for t in tensors
            )
        return cls(
            device=device.type,
            device_name=device_name(device),
            threads=threads,
            batch_size=batch_size,
            input_size=tuple(example_input(model, input_size)[1:]),
            dtype=str(dtype).removeprefix("torch."),
            memory_format="channels_last" if channels_last else "contiguous",
            compiled=bool(compile),
            timer=timer,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "input_size": list(self.input_size)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Conditions":
        return cls(**{**data, "input_size": tuple(data["input_size"])})

    def differences(self, other: "Conditions") -> list[str]:
        """In words, what differs: ``"batch_size 8, not 1"``, theirs first."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{key} {theirs[key]!r}, not {mine[key]!r}" for key in mine if mine[key] != theirs[key]]

    # ---- to run a network under them

    def prepared(self, model: nn.Module) -> nn.Module:
        """A copy of the model as it will be timed; the model itself is left alone."""
        dtype = getattr(torch, self.dtype)

        def moved(_: str, tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                raise LatencyError("a model on the meta device has no weights to run; create it on a real device")
            return tensor.detach().to(self.device, dtype if tensor.is_floating_point() else None, copy=True)

        network = copy_with(model, moved).eval().requires_grad_(False)
        return network.to(memory_format=torch.channels_last) if self.memory_format == "channels_last" else network

    def images(self) -> Tensor:
        """A batch of noise."""
        noise = torch.randn((self.batch_size, *self.input_size), generator=torch.Generator().manual_seed(0))
        noise = noise.to(self.device, getattr(torch, self.dtype))
        channels_last = self.memory_format == "channels_last" and noise.dim() == 4
        return noise.contiguous(memory_format=torch.channels_last) if channels_last else noise

    def clock(self) -> WallClock | CudaClock:
        if self.device == "cpu":
            return ThreadClock() if self.timer == "thread" else WallClock()
        if self.device == "cuda":
            return CudaClock()
        raise LatencyError(f"device {self.device!r}: times can be measured on 'cpu' and 'cuda'")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inference mode, with this many threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """The hardware's own name, with the number of cores for a CPU."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise LatencyError("device 'cuda': this machine has no CUDA device; measure on device='cpu', or elsewhere")
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        raise LatencyError(f"device {device.type!r}: times can be measured on 'cpu' and 'cuda'")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line for line in lines if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {len(names)} cores" if names else name


# ---- one pass -----------------------------------------------------------------------------------------------------


def time_pass(network: nn.Module, images: Tensor, clock) -> float:
    """Seconds of one forward pass."""
    start = clock.mark(network)
    network(images)
    return clock.seconds([start, clock.mark()])[0]


class LayerTimer:
    """Times every layer of a network in the passes made through it.

    Args:
        layers: names of the modules that start a stretch of their own.
    """

    def __init__(self, network: nn.Module, layers: Sequence[str], clock):
        self._network, self._clock = network, clock
        self._marks: list[Any] = []
        self._names: list[str] = []
        modules = dict(network.named_modules())
        self._handles = [modules[name].register_forward_pre_hook(self._enter(name)) for name in layers]

    def _enter(self, name: str) -> Callable:
        def hook(module, inputs):
            self._names.append(name)
            self._marks.append(self._clock.mark(module))

        return hook

    def time_pass(self, images: Tensor) -> dict[str, float]:
        """``{layer: seconds}`` of one forward pass; ``""`` is the time before the first layer."""
        self._names, self._marks = [""], [self._clock.mark()]
        self._network(images)
        self._marks.append(self._clock.mark())
        times: dict[str, float] = {}
        for name, seconds in zip(self._names, self._clock.seconds(self._marks), strict=True):
            times[name] = times.get(name, 0.0) + seconds  # a layer that is called twice costs twice
        return times

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


# ---- repeated passes ----------------------------------------------------------------------------------------------


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
    round: what else runs on a machine does not slow all networks alike.
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
    batch_size: int = 1,
    device: str | torch.device | None = None,
    *,
    dtype: torch.dtype | None = None,
    channels_last: bool | None = None,
    compile: bool = False,
    threads: int | None = None,
    timer: str = "wall",
    precision: float = 0.01,
    max_seconds: float = 10.0,
    clock=None,
) -> Latency:
    """Time of one forward pass: the median over passes, until it is known to ``precision`` or the time is up.

    Args:
        input_size: ``(channels, height, width)``; the model's own by default.
        timer: ``"thread"`` counts the CPU time of a single thread, for a machine that others use too.
        precision: stop when the median's 95 % interval is narrower than ± this fraction.

    Example:
        >>> import timm
        >>> measure_latency(timm.create_model("resnet18"), batch_size=8)
        Latency(161.4 ms ± 2.3 ms, 14 passes)
    """
    return compare_latency(
        [model],
        input_size,
        batch_size,
        device,
        dtype=dtype,
        channels_last=channels_last,
        compile=compile,
        threads=threads,
        timer=timer,
        precision=precision,
        max_seconds=max_seconds,
        clock=clock,
    ).latencies[0]


def compare_latency(
    models: Sequence[nn.Module],
    input_size: Sequence[int] | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
    *,
    precision: float = 0.01,
    max_seconds: float = 20.0,
    clock=None,
    **options,
) -> Comparison:
    """Measure several networks in turns, so that what disturbs the machine disturbs all of them.

    Example:
        >>> compare_latency([model, result.model]).ratios
        (1.0, 0.61)
    """
    if not models:
        raise LatencyError("compare_latency needs at least one model")
    options = {"input_size": input_size, "batch_size": batch_size, "device": device, **options}
    conditions = Conditions.of(models[0], **options)
    return compare_under(conditions, models, precision=precision, max_seconds=max_seconds, clock=clock)


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
    clock = clock or conditions.clock()
    images = conditions.images()
    networks = [conditions.prepared(model) for model in models]
    if conditions.compiled:
        networks = [torch.compile(network) for network in networks]
    order = np.random.default_rng(0)
    rounds: list[list[float]] = []
    with conditions.active():
        for network in networks:
            for _ in range(WARM_UP):
                time_pass(network, images, clock)
        start = time.monotonic()
        while True:
            times = [0.0] * len(networks)
            for i in order.permutation(len(networks)):
                times[i] = time_pass(networks[i], images, clock)
            rounds.append(times)
            if len(rounds) >= min_rounds:
                late = time.monotonic() - start > max_seconds
                if late or max(_uncertainties(rounds)) <= precision or len(rounds) >= 1000:
                    break
    columns = list(zip(*rounds, strict=True))
    ratios = np.median(_quiet_ratios(rounds), axis=1).tolist()
    return Comparison(tuple(Latency.of(column) for column in columns), tuple(ratios), tuple(_uncertainties(rounds)))


def _quiet_ratios(rounds: list[list[float]]) -> np.ndarray:
    """Network × round: its time ÷ the first network's, in the quieter half of the rounds."""
    times = np.array(rounds)
    quiet = times[np.argsort(times.sum(axis=1), kind="stable")[: (len(times) + 1) // 2]]
    return (quiet / quiet[:, :1]).T


def _uncertainties(rounds: list[list[float]]) -> list[float]:
    if len(rounds[0]) == 1:
        return [notch([times[0] for times in rounds])]
    return [notch(ratios) for ratios in _quiet_ratios(rounds)]
