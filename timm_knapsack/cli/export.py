"""export: a network as a file for another runtime, checked."""

from typing import Annotated

import typer

from ..errors import KnapsackError
from . import console
from .options import DataOptions, JsonOption, NetworkOptions, verb


@verb(limit=1000)
def export(
    network: NetworkOptions,
    data: DataOptions,
    to: Annotated[
        str, typer.Option(help="onnx, openvino, torch-export, executorch; an unknown one lists all.")
    ] = "onnx",
    out: Annotated[str | None, typer.Option(help="Folder to write; MODEL-TO by default.", metavar="FOLDER")] = None,
    int8: Annotated[bool, typer.Option(help="Quantise; needs --data to calibrate on.")] = False,
    batch: Annotated[
        int | None, typer.Option(help="Images that the file takes at once; any number by default.", metavar="N")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference of outputs, as a part of the largest output.")
    ] = 1e-4,
    as_json: JsonOption = False,
) -> None:
    """Write a network as a file for another runtime, with its preprocessing, and check it against the original.

    In fp32 a file whose outputs differ is not written. With --int8 the accuracy before and after is measured on --data,
    which also calibrates: on its training split, where it has one.

    Example: timm-knapsack export resnet18 --no-pretrained --to torch-export
    """
    from ..export.export_model import export_model
    from ..export.kinds import EXPORTERS
    from ..images.loaders import create_loader
    from ..images.model_labels import CALIBRATION

    EXPORTERS.find(to.replace("-", "_")).check(int8)  # what is missing is said before anything is loaded
    if int8 and data.source is None:
        raise KnapsackError("--int8 needs images to calibrate and to compare on: --data FOLDER")
    source = network.source()
    source.check()
    model = source.load()
    images = calibration = None
    if data.source is not None:
        images = create_loader(data.source, model, **data.loader_options())
    if int8:
        options = {**data.loader_options(), **CALIBRATION, "labels": "ignore", "limit": 256}
        calibration = create_loader(data.source, model, **options)
    folder = out or f"{network.short_name}-{to}{'-int8' if int8 else ''}"
    options = {"images": images, "int8": int8, "calibration": calibration, "batch_size": batch, "tolerance": tolerance}
    done = export_model(model, to, console.check_writable(folder), **options)
    if as_json:
        console.print_json(done.to_dict())
        return
    console.stdout().print(f"{done}\npreprocessing: {folder}/preprocessing.json", markup=False)
    if data.source is None:
        console.warn("checked on noise; --data FOLDER checks on real images")
