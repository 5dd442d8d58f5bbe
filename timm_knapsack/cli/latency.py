"""latency: how long a model takes, and how each layer's time depends on its width."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import console
from .options import ArchitectureOptions, JsonOption, MeasuringOptions, verb


@verb()
def latency(
    network: ArchitectureOptions,
    measuring: MeasuringOptions,
    table: Annotated[
        str | None,
        typer.Option(help="Also measure every layer over its widths, for budgets of time; resumes.", metavar="FILE"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long a model takes on this device, and with --table how each layer's time depends on its width.

    Example: timm-knapsack latency resnet18 --batch-size 1 --seconds 5
    """
    from ..costs.latency.table import LatencyTable, measure_latency

    where = console.choose_device(measuring.device)
    if table is not None:
        console.check_writable(Path(table).parent)
    model = network.source().load().to(where)  # random weights: time does not depend on their values
    conditions = measuring.conditions()
    whole = measure_latency(model, conditions=conditions, max_seconds=min(10.0, measuring.seconds))
    kind = f"{measuring.runtime}{' int8' if measuring.int8 else ''}"
    facts = {"model": network.model, "device": where, "batch_size": measuring.batch_size, "runtime": kind}
    facts |= {"seconds": whole.median, "spread": whole.spread, "passes": len(whole.samples)}
    if table is not None:
        progress = sys.stderr.isatty() and not as_json
        measured = LatencyTable.measure(model, path=table, conditions=conditions, progress=progress)
        facts |= {"table": table, "layers": len(measured.layers), "measured_for": measured.seconds}
    if as_json:
        console.print_json(facts)
        return
    out = console.stdout()
    out.print(f"{network.model}: {whole} at batch {measuring.batch_size} on {where} in {kind}", markup=False)
    if table is not None:
        out.print(
            f"{table}: {facts['layers']} layers\nprune with: timm-knapsack prune {network.model} --budget latency=0.6 "
            f"--latency-table {table} --data FOLDER",
            markup=False,
        )
