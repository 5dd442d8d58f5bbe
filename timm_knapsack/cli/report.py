"""report: one HTML page about a pruned model, with its pictures."""

from typing import Annotated

import typer

from . import console
from .options import JsonOption


def report(
    folder: Annotated[str, typer.Argument(help="A folder that prune, finetune, run or quickstart wrote.")],
    out: Annotated[
        str | None, typer.Option(help="Folder for report.html and the pictures; FOLDER itself by default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write report.html, one self-contained file, and pictures (PNG, SVG) for a model card.

    Example: timm-knapsack report resnet18-half
    """
    from ..models.model_source import saved_folder
    from ..reports.page import write_report
    from ..reports.run_record import RunRecord

    if out is not None:
        console.check_writable(out)
    folder = saved_folder(folder)
    files = write_report(folder, out)
    if as_json:
        from dataclasses import asdict

        console.print_json({"files": [str(file) for file in files], "record": asdict(RunRecord.load(folder))})
        return
    for file in files:
        console.stdout().print(str(file), markup=False)
