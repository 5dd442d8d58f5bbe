"""sweep: the whole trade-off of accuracy against MACs and time, every point saved."""

from typing import Annotated

import typer

from ..errors import KnapsackError
from . import console
from .options import DeviceOption, HeldOutDataOptions, JsonOption, LabelsOption, NetworkOptions, verb
from .score import scoring_job


@verb(limit=1024)
def sweep(
    network: NetworkOptions,
    data: HeldOutDataOptions,
    budgets: Annotated[
        str, typer.Option(help="Fractions of the original's cost: FIRST:LAST:STEP, or joined by commas.")
    ] = "0.9:0.3:0.1",
    cost: Annotated[str, typer.Option(help="macs, params, latency …; an unknown one lists all.")] = "macs",
    out: Annotated[str | None, typer.Option(help="Folder to write; MODEL-sweep by default.", metavar="FOLDER")] = None,
    scores: Annotated[
        str | None, typer.Option(help="A file that `score` wrote, instead of scoring now.", metavar="FILE")
    ] = None,
    recover_images: Annotated[int, typer.Option(help="Images to recover with.")] = 1024,
    sides: Annotated[
        str | None, typer.Option(help="Image sizes for the unpruned network, as 192,160; like the budgets by default.")
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help="A smaller network to beat.", metavar="NAME=WEIGHTS")
    ] = None,
    latency_table: Annotated[
        str | None, typer.Option(help="A file that `latency --table` wrote, for --cost latency.", metavar="FILE")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="Where times are measured: torch by default.")] = None,
    time_batch: Annotated[int, typer.Option(help="Images in a timed batch.")] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    labels: LabelsOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Prune to several budgets with one scoring pass: accuracy after recovery against MACs and measured time.

    Beside the points stand the unpruned network on smaller images, and smaller networks (--baseline). Every point is a
    folder that timm.create_model reads, with the curve in its report; points that are there are not made again.

    Example: timm-knapsack sweep resnet20-half --data images --budgets 0.8,0.6 --limit 64 --recover-images 64
    """
    from ..costs.latency.conditions import MeasuringConditions
    from ..costs.latency.table import LatencyTable
    from ..human_numbers import human
    from ..pipeline.recipe import RecoverPart
    from ..pipeline.trade_off import parse_shares, sweep_budgets

    shares = parse_shares(budgets)
    if data.source is None:
        raise KnapsackError("sweep needs images with labels: --data FOLDER")
    try:
        chosen = None if sides is None else [int(side) for side in sides.split(",")]
    except ValueError:
        raise KnapsackError(f"--sides {sides!r}: expected sizes in pixels, joined by commas, such as 192,160") from None
    where = console.choose_device(device)
    table = LatencyTable.load(latency_table) if latency_table else None
    recover = RecoverPart(recover_images, data.batch_size)
    job = scoring_job(network, data, "curves", labels, where, needs_data=scores is None, recover=recover)
    job.folder = console.check_writable(out or f"{network.short_name}-sweep")
    job.folder.mkdir(parents=True, exist_ok=True)
    job.options = {"scores": scores}
    asked = None
    if runtime is not None or table is None:
        asked = MeasuringConditions(runtime=runtime or "torch", batch_size=time_batch, threads=threads)
    options = {"sides": chosen, "baselines": baseline or (), "conditions": asked}
    rows = sweep_budgets(job, shares, cost=cost, table=table, **options)
    if as_json:
        console.print_json({"folder": str(job.folder), "rows": rows})
        return
    lines = [
        [
            *(row["kind"], row["what"], f"{row['top1']:.2f} %", human(row["macs"]), human(row["seconds"], "s")),
            *(f"{row['ratio']:.3f} ± {row['ratio'] * row['error']:.3f}", row.get("folder", "–")),
        ]
        for row in rows
    ]
    head = ["", "", "top-1", "MACs", "time", "÷ original", "folder"]
    console.print_table(head, lines, f"{network.model} → {job.folder}")
