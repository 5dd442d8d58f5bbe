"""quickstart: the whole way on handwritten digits."""

from typing import Annotated

import typer

from . import console
from .options import JsonOption


def quickstart(
    out: Annotated[str, typer.Option(help="Folder to write.", metavar="FOLDER")] = "quickstart",
    epochs: Annotated[int, typer.Option(help="Epochs to train the base network for.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """The whole way on real handwritten digits, offline, in a few minutes on two CPU cores.

    Example: timm-knapsack quickstart --out quickstart
    """
    from ..pipeline.quickstart import quickstart as start

    folder = console.check_writable(out)
    result = start(folder, base_epochs=epochs)
    if as_json:
        console.print_json(result)
        return
    from rich.table import Table

    head, *rows = result["table"]
    table = Table(*head, title="handwritten digits, step by step")
    for row in rows:
        table.add_row(*row)
    console.stdout().print(table)
    console.stdout().print(f"{result['speed']}\n", markup=False, highlight=False)
    console.stdout().print(f"{result['report']} shows how. To use the result:\n\n{result['code']}", markup=False)
