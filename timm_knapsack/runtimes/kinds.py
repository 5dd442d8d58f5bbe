"""The registry with the built-in runtimes in it."""

from typing import Any

from .in_torch import CompiledRuntime, TorchRuntime
from .onnx_runtime import OnnxRuntime
from .open_vino import OpenVinoRuntime
from .runtime import RUNTIMES, Runtime, register_runtime
from .tensor_rt import TensorRtRuntime

__all__ = ["RUNTIMES", "Runtime", "open_runtime", "register_runtime"]

for _kind in (TorchRuntime, CompiledRuntime, OnnxRuntime, OpenVinoRuntime, TensorRtRuntime):
    register_runtime(_kind)


def open_runtime(name: str, **options: Any) -> Runtime:
    """The runtime of that name, for a device, threads and fp32 or int8; an error says what is missing.

    Example:
        >>> open_runtime("torch", threads=2).threads
        2
    """
    return RUNTIMES.find(name)(**options)
