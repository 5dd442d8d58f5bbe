"""The time of one forward pass, and in one pass of every layer in its place; under which conditions, by which clock.

All times are in seconds for one forward pass of one batch. A layer's time runs from the moment it is entered to the
moment the next layer is entered, so that the norm, the activation, the residual add and the attention product that
follow a layer belong to it, and the times of all layers sum to the time of the network.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import LatencyError
from ...maps.steady_memory import memory_kept
from ...runtimes.kinds import RUNTIMES, open_runtime
from ...runtimes.runtime import Run, Runtime
from ...slim.copying import copy_with, named_tensors
from ...slim.example_inputs import example_input
from .conditions import MeasuringConditions

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


class ProcessClock(WallClock):
    """The same for a runtime that computes in a thread of its own, while this one waits."""

    def mark(self, module: nn.Module | None = None) -> Any:
        return time.process_time()


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
    timer: str = "wall"  # or "thread": CPU time of a single thread
    runtime: str = "torch"
    int8: bool = False

    @classmethod
    def of(cls, model: nn.Module, asked: MeasuringConditions | None = None, **options) -> "Conditions":
        """The conditions as asked; what is not asked is as the model and this process have it."""
        asked = MeasuringConditions.read(asked, **options)
        kind = RUNTIMES.find(asked.runtime)
        device, dtype, channels_last, timer = asked.device, asked.dtype, asked.channels_last, asked.timer
        tensors = [tensor for _, tensor in named_tensors(model) if tensor.is_floating_point()]
        if device is None:
            device = tensors[0].device if tensors and not tensors[0].is_meta else "cpu"
        device = torch.device(device)
        threads = asked.threads or torch.get_num_threads()
        if timer == "thread" and (threads > 1 or device.type != "cpu"):
            raise LatencyError(f"timer='thread' sees one CPU thread; not {threads} on {device.type}: give threads=1")
        if kind.own_layout:
            if (dtype or torch.float32) != torch.float32 or channels_last:
                raise LatencyError(
                    f"runtime {kind.name!r} takes float32 and lays memory out by itself: leave dtype and channels_last "
                    f"alone{'; int8=True quantises' if kind.takes_int8 else ''}"
                )
            dtype, channels_last = torch.float32, False
        if dtype is None:
            dtype = tensors[0].dtype if tensors else torch.float32
        if channels_last is None:
            channels_last = any(
                t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
                for t in tensors
            )
        made = cls(
            device=device.type,
            device_name=device_name(device),
            threads=threads,
            batch_size=asked.batch_size,
            input_size=tuple(example_input(model, asked.input_size)[1:]),
            dtype=str(dtype).removeprefix("torch."),
            memory_format="channels_last" if channels_last else "contiguous",
            timer=timer,
            runtime=asked.runtime,
            int8=asked.int8,
        )
        made.open_runtime()  # what it can't do, or needs and is not here, is said before anything is measured
        return made

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "input_size": list(self.input_size)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Conditions":
        data = {**data, "input_size": tuple(data["input_size"])}
        if data.pop("compiled", False):  # of a table from before there were runtimes
            data["runtime"] = "compile"
        return cls(**data)

    def differences(self, other: "Conditions") -> list[str]:
        """In words, what differs: ``"batch_size 8, not 1"``, theirs first."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{key} {theirs[key]!r}, not {mine[key]!r}" for key in mine if mine[key] != theirs[key]]

    @property
    def kind(self) -> str:
        """The runtime in words: ``"onnxruntime int8"``."""
        return f"{self.runtime} int8" if self.int8 else self.runtime

    # ---- to run a network under them

    def open_runtime(self) -> Runtime:
        """The runtime, for this device and number of threads."""
        return open_runtime(self.runtime, device=self.device, threads=self.threads, int8=self.int8)

    def started(self, model: nn.Module) -> Run:
        """A copy of the model as it will be timed, in its runtime."""
        return self.open_runtime().prepare(self.copied(model), self.images())

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy of the model on its device, in its dtype and memory format; the model itself is left alone."""
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
            if self.timer == "wall":
                return WallClock()
            return ProcessClock() if RUNTIMES.find(self.runtime).own_threads else ThreadClock()
        if self.device == "cuda":
            return CudaClock()
        raise LatencyError(f"device {self.device!r}: times can be measured on 'cpu' and 'cuda'")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inference mode, with this many threads; on a CPU, memory that is freed stays with the process."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode(), memory_kept() if self.device == "cpu" else nullcontext():
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


def time_pass(network: nn.Module | Run, images: Tensor, clock) -> float:
    """Seconds of one forward pass of a module, or of what a runtime made of one."""
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
        self._layers = [(name, modules[name]) for name in layers]

    def _enter(self, name: str) -> Callable:
        def hook(module, inputs):
            self._names.append(name)
            self._marks.append(self._clock.mark(module))

        return hook

    def time_pass(self, images: Tensor) -> dict[str, float]:
        """``{layer: seconds}`` of one forward pass; ``""`` is the time before the first layer."""
        # The hooks are there during the pass only: copies of the network would carry them along, and mark its layers.
        handles = [layer.register_forward_pre_hook(self._enter(name)) for name, layer in self._layers]
        try:
            self._names, self._marks = [""], [self._clock.mark()]
            self._network(images)
            self._marks.append(self._clock.mark())
        finally:
            for handle in handles:
                handle.remove()
        times: dict[str, float] = {}
        for name, seconds in zip(self._names, self._clock.seconds(self._marks), strict=True):
            times[name] = times.get(name, 0.0) + seconds  # a layer that is called twice costs twice
        return times
