"""How slim copies are timed, layer by layer and as a whole, in the runtime that a table is for.

A runtime with a profile of its own tells the layers' times as they are there, fused and laid out as it likes. For the
others the layers are timed in PyTorch, and the runtime's times of whole networks calibrate their sum.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...runtimes.runtime import Run, Runtime
from .layer_timing import WARM_UP, LayerTimer, time_pass

LEAST = 1e-9  # seconds of a layer that the runtime has fused into its neighbour and does not show


class Timed(ABC):
    """A slim copy, ready to be timed."""

    def __init__(self, watch: "Stopwatch", network: Any):
        self._watch, self._network = watch, network

    @abstractmethod
    def layer_seconds(self, passes: int) -> list[dict[str, float]]:
        """For each pass, the seconds of each layer; one pass before them warms up."""

    def seconds(self, passes: int) -> list[float]:
        """For each pass, the seconds of the whole network in its runtime, with no layer watched."""
        watch = self._watch
        run = watch.runtime.start(self._network, watch.images)
        for _ in range(WARM_UP):
            time_pass(run, watch.images, watch.clock)
        found = [time_pass(run, watch.images, watch.clock) for _ in range(passes)]
        watch.runtime.forget()
        return found


class _InTorch(Timed):
    def layer_seconds(self, passes):
        watch = self._watch
        timer = LayerTimer(self._network, watch.layers, watch.clock)
        return [timer.time_pass(watch.images) for _ in range(1 + passes)][1:]


class _Profiled(Timed):
    def layer_seconds(self, passes):
        watch = self._watch
        found = watch.runtime.layer_seconds(self._network, watch.images, watch.layers, 1 + passes)[1:]
        return [{name: max(times.get(name, 0.0), LEAST) for name in ("", *watch.layers)} for times in found]


class Stopwatch:
    """Times slim copies; as a context it keeps what a runtime has converted, for later rounds.

    Example:
        >>> from timm_knapsack.costs.latency.layer_timing import WallClock
        >>> from timm_knapsack.runtimes.kinds import open_runtime
        >>> watch = Stopwatch(open_runtime("torch"), ["conv1", "linear"], WallClock(), torch.zeros(1, 3, 32, 32))
        >>> [list(times) for times in watch.take("grid-0", lambda: model).layer_seconds(1)]
        [['', 'conv1', 'linear']]
    """

    def __init__(self, runtime: Runtime, layers: Sequence[str], clock: Any, images: Tensor):
        self.runtime, self.layers, self.clock, self.images = runtime, list(layers), clock, images
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "Stopwatch":
        self._folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *error) -> None:
        self._folder.cleanup()
        self._folder = None

    def yardstick(self, network: nn.Module) -> Callable[[], float]:
        """Times one pass of the original: how fast the machine is just now."""
        if self.runtime.profiles:
            run: Run = self.runtime.prepare(network, self.images)
            return lambda: time_pass(run, self.images, self.clock)
        timer = LayerTimer(network, self.layers, self.clock)
        return lambda: sum(timer.time_pass(self.images).values())

    def take(self, name: str, make: Callable[[], nn.Module]) -> Timed:
        """A copy to be timed: made, and converted where the runtime profiles, unless one of that name was before."""
        if not self.runtime.profiles:
            return _InTorch(self, make())
        file = Path(self._folder.name) / name if self._folder is not None else None
        if file is not None and file.exists():
            return _Profiled(self, file.read_bytes())
        converted = self.runtime.convert(make(), self.images)
        if file is not None and isinstance(converted, bytes):
            file.write_bytes(converted)
        return _Profiled(self, converted)
