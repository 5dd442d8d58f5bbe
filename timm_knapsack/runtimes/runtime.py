"""Runtime: what runs a network, behind one small interface, and the registry of them.

A runtime is opened for a device, a number of threads and fp32 or int8; then ``prepare(module, inputs)`` gives a
callable that takes images and returns the network's outputs. The built-in ones are added in ``kinds``, which is what
others import. A new one is one class (``tensor_rt`` shows one that could not be tested here).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import RuntimeChoiceError
from ..files.versions import versions
from ..registry import Registry

Run: TypeAlias = Callable[[Tensor], Tensor]


class Runtime(ABC):
    """Runs networks on one device, with so many threads, in fp32 or int8.

    Attributes:
        name: as in ``--runtime NAME`` and ``MeasuringConditions(runtime=NAME)``.
        summary: what it is, in a few words.
        packages: modules that must be importable.
        pip: what brings them: ``pip install PIP``.
        devices: kinds of torch devices whose tensors it takes.
        takes_int8: whether it can quantise a network.
        own_layout: it decides on dtype and memory format by itself, whatever the module's are.
        own_threads: it computes in threads of its own, also where it is given a single one.
        profiles: it tells the time of each layer (`layer_seconds`). For one that does not, a latency table has the
            layers timed in PyTorch, and the runtime's times of whole networks calibrate their sum.
        reads_onnx: `start` takes an ONNX file as bytes, whoever made it.

    Example:
        >>> class Doubling(Runtime):
        ...     name, summary = "doubling", "every network, twice"
        ...
        ...     def start(self, converted, inputs):
        ...         return lambda images: 2 * converted(images)
        >>> runtime = Doubling(threads=1)
        >>> runtime.prepare(torch.nn.Identity(), torch.ones(1, 3))(torch.ones(1, 3))
        tensor([[2., 2., 2.]])
        >>> runtime.describe()["runtime"]
        'doubling'
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    pip: ClassVar[str] = ""
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    takes_int8: ClassVar[bool] = False
    own_layout: ClassVar[bool] = False
    own_threads: ClassVar[bool] = False
    profiles: ClassVar[bool] = False
    reads_onnx: ClassVar[bool] = False

    def __init__(self, *, device: str = "cpu", threads: int | None = None, int8: bool = False):
        require(self.packages, self.pip, f"runtime {self.name!r}")
        if int8 and not self.takes_int8:
            can = ", ".join(kind.name for kind in RUNTIMES.values() if kind.takes_int8)
            raise RuntimeChoiceError(f"runtime {self.name!r} can't quantise to int8; choose one of {can}")
        if torch.device(device).type not in self.devices:
            raise RuntimeChoiceError(f"runtime {self.name!r} runs on {' and '.join(self.devices)}, not on {device}")
        self.device, self.int8 = device, int8
        self.threads = threads or torch.get_num_threads()

    def prepare(self, module: nn.Module, inputs: Tensor, calibration: Iterable[Tensor] | None = None) -> Run:
        """A callable that runs the network on images of the shape of ``inputs``.

        Args:
            module: in eval mode, on the runtime's device.
            calibration: batches of images that say in which range the maps lie, for int8. Without any ``inputs`` do,
                which is right for times and wrong for accuracies.
        """
        return self.start(self.convert(module, inputs, calibration), inputs)

    def convert(self, module: nn.Module, inputs: Tensor, calibration: Iterable[Tensor] | None = None) -> Any:
        """What the runtime starts from: a file as bytes, or the module itself."""
        return module

    @abstractmethod
    def start(self, converted: Any, inputs: Tensor) -> Run:
        """Load what `convert` gave."""

    def layer_seconds(
        self, converted: Any, inputs: Tensor, layers: Sequence[str], passes: int
    ) -> list[dict[str, float]]:
        """For each of some passes, the seconds of each layer with what follows it, up to the next one.

        ``""`` is what comes before the first. Only for a runtime that ``profiles``.
        """
        raise NotImplementedError(f"runtime {self.name!r} has no profile")

    def load_library(self) -> None:  # noqa: B027  (PyTorch is there)
        """Import the runtime's own library, where it is imported on first use."""

    def forget(self) -> None:  # noqa: B027  (most have nothing to drop)
        """Drop what the runtime keeps of networks that it was given before."""

    def describe(self) -> dict[str, Any]:
        """What its times depend on, as plain data."""
        about = {"runtime": self.name, "threads": self.threads, "precision": "int8" if self.int8 else "as the module"}
        return {**about, "versions": versions(*(self.packages or ("torch",)))}


RUNTIMES: Registry[type[Runtime]] = Registry("runtime", RuntimeChoiceError)


def register_runtime(kind: type[Runtime], *, replace: bool = False) -> type[Runtime]:
    """Add a runtime: latency tables, comparisons and the command line know it from then on, by its name.

    Args:
        replace: whether it may take the place of one with the same name.

    Example:
        >>> @register_runtime
        ... class Echo(Runtime):
        ...     name, summary = "echo", "returns the images"
        ...
        ...     def start(self, converted, inputs):
        ...         return lambda images: images
        >>> RUNTIMES.remove("echo").summary
        'returns the images'
    """
    if not (isinstance(kind, type) and issubclass(kind, Runtime)):
        raise RuntimeChoiceError(f"register_runtime takes a subclass of Runtime, got {kind!r:.80}")
    return RUNTIMES.add(kind, replace)


def require(packages: Sequence[str], pip: str, what: str) -> None:
    """An error with the command that installs them, where packages are missing.

    Example:
        >>> require(["no_such_package"], "such-a-package", "this")
        Traceback (most recent call last):
        timm_knapsack.errors.RuntimeChoiceError: this needs no_such_package: pip install 'such-a-package'
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise RuntimeChoiceError(f"{what} needs {' and '.join(missing)}: pip install '{pip}'")


class AsModule(nn.Module):
    """What a runtime prepared, as a module, for functions that evaluate modules.

    Example:
        >>> AsModule(lambda images: images + 1)(torch.zeros(2))
        tensor([1., 1.])
    """

    def __init__(self, run: Run, device: str | torch.device = "cpu"):
        super().__init__()
        self._run = run
        self.place = nn.Parameter(torch.zeros(0, device=device), requires_grad=False)  # says where images go

    def forward(self, images: Tensor) -> Tensor:
        return self._run(images)
