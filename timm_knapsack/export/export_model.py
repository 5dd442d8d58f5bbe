"""export_model(): a network as a file for another runtime, checked against the original."""

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, RuntimeChoiceError
from ..files.atomic import replacing_folder
from ..files.plain_json import write_json
from ..maps.batches import image_batches, images_of, labels_of
from ..models.model_source import ModelSource
from ..runtimes.runtime import Run
from ..slim.copying import copy_with
from ..slim.example_inputs import example_input
from . import preprocessing
from .exporter import Exporter, Order, in_batches
from .kinds import EXPORTERS

TOLERANCE = 1e-4  # of the largest output, for a file in fp32
NOISE_IMAGES = 8
CALIBRATION_IMAGES = 256


@dataclass(frozen=True)
class Export:
    """What was written, and how it compares with the original.

    Attributes:
        path: the (main) file.
        facts: what the exporter says: opset, files …
        images: how many were compared; ``source`` says whether they were the user's images or noise.
        error: largest difference of an output, as a part of the largest output.
        same_top1: the part of the images on which both see the same class.
        top1: accuracies in percent, original and exported, where the images have labels.
    """

    path: str
    to: str
    int8: bool
    bytes: int
    images: int
    source: str
    error: float
    tolerance: float | None
    same_top1: float
    top1: tuple[float, float] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self):
        facts = "".join(f", {name} {value}" for name, value in self.facts.items() if name != "files")
        within = "" if self.tolerance is None else f" (at most {self.tolerance:g})"
        accuracy = "" if self.top1 is None else f"; top-1 {self.top1[0]:.2f} → {self.top1[1]:.2f} %"
        return (
            f"{self.path}: {self.bytes / 1e6:.2f} MB{facts}; on {self.images} {self.source} outputs differ by "
            f"{self.error:.2g} of the largest{within}, the same class on {self.same_top1:.1%}{accuracy}"
        )


def export_model(
    model_or_folder: nn.Module | str | os.PathLike,
    to: str = "onnx",
    out: str | os.PathLike | None = None,
    *,
    images: Iterable | None = None,
    int8: bool = False,
    calibration: Iterable | None = None,
    batch_size: int | None = None,
    tolerance: float = TOLERANCE,
) -> Export:
    """Write a network as a file for another runtime, with its preprocessing beside it, and check it.

    The file is run on the images: in fp32 its outputs must equal the original's within the tolerance, and the class
    must be the same on every image, else nothing is written. In int8 both are reported, with the accuracies.

    Args:
        model_or_folder: a network, or the folder (or timm name) of one.
        to: "onnx", "openvino", "torch-export", "executorch", or what `register_exporter` has added.
        out: folder to write; ``<name>-<to>`` by default.
        images: a loader to check on, with labels or without; noise does where there is none, and the result says so.
        int8: quantise, as ONNX Runtime or OpenVINO do.
        calibration: images that say in which range the maps lie, for int8; at most 256 are used.
        batch_size: images that the file shall take at once; None for any number, where the format can.
        tolerance: of the outputs, as a part of the largest.

    Example:
        >>> exported = export_model(result.model, "onnx", "resnet20-onnx", images=loader)
        >>> sorted(path.name for path in Path("resnet20-onnx").iterdir())
        ['model.onnx', 'preprocessing.json']
        >>> exported.same_top1
        1.0
    """
    start = time.perf_counter()
    exporter = EXPORTERS.find(to.replace("-", "_"))
    exporter.check(int8)
    if int8 and calibration is None:
        raise RuntimeChoiceError("int8 needs images to calibrate on: calibration=loader")
    if batch_size is None and not exporter.dynamic_batch:
        batch_size = 1
    model, name = _loaded(model_or_folder)
    folder = Path(out or f"{name}-{exporter.name.replace('_', '-')}{'-int8' if int8 else ''}")
    module = copy_with(model, lambda _, tensor: tensor.detach().to("cpu", copy=True)).eval().requires_grad_(False)
    about = preprocessing.describe(model, name, batch_size)
    order = Order(
        module,
        torch.randn(example_input(model, batch_size=batch_size or 2), generator=torch.Generator().manual_seed(0)),
        preprocessing.as_texts(about),
        dynamic_batch=batch_size is None,
        calibration=_calibration(calibration, batch_size) if int8 else None,
    )
    with replacing_folder(folder) as new:
        path = new / exporter.file
        facts = exporter.write(order, path)
        run = exporter.read(path)
        if batch_size is not None:
            run = in_batches(run, batch_size)
        found = _compared(run, module, images, order.inputs, None if int8 else tolerance)
        _check(found, exporter, int8)
        write_json(new / preprocessing.FILE, {**about, "int8": int8, "export": facts})
        size = sum((new / file).stat().st_size for file in facts.get("files", [exporter.file]))
    return Export(
        str(folder / exporter.file), to, int8, size, **found, facts=facts, seconds=time.perf_counter() - start
    )


def _loaded(given: nn.Module | str | os.PathLike) -> tuple[nn.Module, str]:
    if isinstance(given, nn.Module):
        config = getattr(given, "pretrained_cfg", None) or {}
        return given, str(config.get("architecture") or type(given).__name__).lower()
    source = ModelSource(str(given))
    return source.load(), Path(source.name.removeprefix("local-dir:").removeprefix("hf-hub:")).name


def _calibration(loader: Iterable, batch_size: int | None) -> list[Tensor]:
    """At most 256 images in the loader's batches, or in the file's own."""
    batches = image_batches(loader, CALIBRATION_IMAGES, "cpu")
    if batch_size is None:
        return batches
    whole = torch.cat(batches)
    if len(whole) < batch_size:
        raise DataError(f"int8 with batch_size={batch_size} needs as many images to calibrate on, and got {len(whole)}")
    return list(whole[: len(whole) // batch_size * batch_size].split(batch_size))


def _compared(
    run: Run, module: nn.Module, images: Iterable | None, noise: Tensor, tolerance: float | None
) -> dict[str, Any]:
    """Outputs, classes and, with labels, accuracies of the file and the original on the same images."""
    generator = torch.Generator().manual_seed(1)
    batches = images if images is not None else [torch.randn((NOISE_IMAGES, *noise.shape[1:]), generator=generator)]
    count, same, right, labelled = 0, 0, [0, 0], images is not None
    largest = difference = 0.0
    with torch.no_grad():
        for batch in batches:
            taken = images_of(batch).cpu()
            labels = labels_of(batch) if labelled else None
            before, after = module(taken).float(), run(taken).float()
            if before.shape != after.shape:
                raise RuntimeChoiceError(f"the file gives {tuple(after.shape)}, the network {tuple(before.shape)}")
            largest = max(largest, float(before.abs().max()))
            difference = max(difference, float((before - after).abs().max()))
            seen = before.flatten(1).argmax(1), after.flatten(1).argmax(1)
            top = before.flatten(1).topk(min(2, before.flatten(1).shape[1]), dim=1).values
            tie = (top[:, 0] - top[:, -1]) <= (tolerance or 0.0) * largest  # either class is right
            same += int(((seen[0] == seen[1]) | tie).sum())
            count += len(taken)
            labelled = labelled and labels is not None
            if labelled:
                right = [r + int((s == labels).sum()) for r, s in zip(right, seen, strict=True)]
    if not count:
        raise DataError("there are no images to check the export on; check the data")
    top1 = tuple(100 * r / count for r in right) if labelled else None
    return {
        "images": count, "source": "images" if images is not None else "images of noise", "tolerance": tolerance,
        "error": difference / largest if largest else difference, "same_top1": same / count, "top1": top1,
    }  # fmt: skip


def _check(found: dict[str, Any], exporter: Exporter, int8: bool) -> None:
    if int8:
        return
    if found["error"] > found["tolerance"] or found["same_top1"] < 1:
        raise RuntimeChoiceError(
            f"the {exporter.name.replace('_', '-')} file is not the network: on {found['images']} {found['source']} "
            f"outputs differ by {found['error']:.2g} of the largest (at most {found['tolerance']:g} allowed), and the "
            f"class is the same on {found['same_top1']:.1%}; nothing was written. tolerance=… allows for more"
        )
