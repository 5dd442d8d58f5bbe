"""Under which conditions a time is asked for: one set of options for every function and command that measures."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ...errors import LatencyError
from ...runtimes.kinds import RUNTIMES


@dataclass(frozen=True)
class MeasuringConditions:
    """How to measure. Every field can be given by name to `measure_latency`, `compare_latency`, `LatencyTable.measure`.

    Attributes:
        input_size: ``(channels, height, width)``; the model's own by default.
        batch_size: images in a forward pass.
        device, dtype, channels_last, threads: as the model and this process have them, by default.
        runtime: what runs the network: ``"torch"``, ``"compile"``, ``"onnxruntime"``, ``"openvino"`` or another one
            that `register_runtime` has added.
        int8: quantised by the runtime; the times of maps and weights in 8 bits.
        timer: ``"wall"``, or ``"thread"`` for the CPU time of a single thread, on a machine that others use too.
        precision: stop when the median's 95 % interval is narrower than ± this fraction.
        max_seconds: stop after this long; None for what suits the function.

    Example:
        >>> conditions = MeasuringConditions(batch_size=8, threads=1)
        >>> MeasuringConditions.read(conditions, timer="thread").batch_size
        8
    """

    input_size: Sequence[int] | None = None
    batch_size: int = 1
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    channels_last: bool | None = None
    runtime: str = "torch"
    int8: bool = False
    threads: int | None = None
    timer: str = "wall"
    precision: float = 0.01
    max_seconds: float | None = None

    def __post_init__(self):
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise LatencyError(f"batch_size={self.batch_size!r}: expected a whole number of images, such as 8")
        threads = self.threads
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise LatencyError(f"threads={threads!r}: expected a whole number, such as 2")
        RUNTIMES.find(self.runtime)
        if self.timer not in ("wall", "thread"):
            raise LatencyError(
                f"timer={self.timer!r}: expected 'wall', or 'thread' for the CPU time of a single thread"
            )

    @classmethod
    def read(cls, conditions: "MeasuringConditions | None" = None, **options: Any) -> "MeasuringConditions":
        """These conditions with single fields changed by name; an unknown name is an error that says the nearest."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise LatencyError(f"unknown measuring condition {name!r}; {hint}")
        return replace(conditions or cls(), **options)

    def seconds(self, usual: float) -> float:
        """How long to measure, where a function usually takes ``usual`` seconds at most."""
        return usual if self.max_seconds is None else self.max_seconds
