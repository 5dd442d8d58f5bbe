"""Exporter: one kind of file that a network can be written as, and the registry of them.

The built-in ones are added in ``kinds``, which is what others import. A new one is one entry: a function that writes
the file and one that runs it, so that what was written can be checked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RuntimeChoiceError
from ..registry import Registry
from ..runtimes.runtime import Run, require


@dataclass(frozen=True)
class Order:
    """What to write.

    Attributes:
        module: the network, in eval mode on the CPU.
        inputs: an example of its input, with at least two images where the batch is dynamic.
        about: preprocessing and provenance as texts, for formats that can carry them.
        dynamic_batch: whether the file takes any number of images; otherwise as many as ``inputs``.
        calibration: batches of images where int8 is asked for, else None.
    """

    module: nn.Module
    inputs: Tensor
    about: Mapping[str, str]
    dynamic_batch: bool = True
    calibration: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Exporter:
    """A kind of file.

    Attributes:
        name: as in ``--to NAME``; a hyphen may be typed for an underscore.
        summary: what it is, in a few words.
        file: the name of the (main) file.
        write: ``write(order, path) -> facts``; plain data about the file, such as its opset.
        read: ``read(path) -> callable`` that runs the file.
        packages, pip: modules that it needs, and ``pip install`` of what brings them.
        takes_int8: whether it can quantise.
        dynamic_batch: whether the file can take any number of images.

    Example:
        >>> weights = Exporter(
        ...     "weights", "weights alone", "weights.pt", write=lambda order, path: {}, read=lambda path: None
        ... )
        >>> weights.takes_int8
        False
    """

    name: str
    summary: str
    file: str
    write: Callable[[Order, Path], dict[str, Any]]
    read: Callable[[Path], Run]
    packages: tuple[str, ...] = ()
    pip: str = ""
    takes_int8: bool = False
    dynamic_batch: bool = True

    def check(self, int8: bool) -> None:
        """An error where packages are missing or int8 can't be had."""
        require(self.packages, self.pip, f"export to {self.name.replace('_', '-')}")
        if int8 and not self.takes_int8:
            can = ", ".join(kind.name for kind in EXPORTERS.values() if kind.takes_int8)
            raise RuntimeChoiceError(f"{self.name.replace('_', '-')} can't be written in int8; choose one of {can}")


EXPORTERS: Registry[Exporter] = Registry("export target", RuntimeChoiceError)


def register_exporter(exporter: Exporter, *, replace: bool = False) -> Exporter:
    """Add a kind of file: `export_model` and ``timm-knapsack export --to`` know it from then on, by its name.

    Example:
        >>> kind = Exporter("weights", "weights alone", "weights.pt", write=lambda order, path: {}, read=torch.load)
        >>> register_exporter(kind).file
        'weights.pt'
        >>> EXPORTERS.remove("weights").name
        'weights'
    """
    if not isinstance(exporter, Exporter):
        raise RuntimeChoiceError(f"register_exporter takes an Exporter, got {exporter!r:.80}")
    return EXPORTERS.add(exporter, replace)


def in_batches(run: Run, size: int) -> Run:
    """A callable for any number of images of one that takes exactly ``size``; the last batch is filled up.

    Example:
        >>> in_batches(lambda images: images * 2, 2)(torch.ones(3, 1)).flatten()
        tensor([2., 2., 2.])
    """

    def whole(images: Tensor) -> Tensor:
        parts = []
        for part in images.split(size):
            filled = torch.cat([part, part[-1:].expand(size - len(part), *part.shape[1:])])
            parts.append(run(filled.contiguous())[: len(part)])
        return torch.cat(parts)

    return whole
