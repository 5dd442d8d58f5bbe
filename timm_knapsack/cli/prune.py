"""prune: a smaller model, as a folder that timm.create_model reads."""

from typing import Annotated

import typer

from ..errors import KnapsackError
from . import console
from .options import (
    DeviceOption,
    HeldOutDataOptions,
    JsonOption,
    LabelsOption,
    NetworkOptions,
    OverwriteOption,
    RefineOption,
    verb,
)
from .score import scoring_job


@verb(limit=1024)
def prune(
    network: NetworkOptions,
    data: HeldOutDataOptions,
    budget: Annotated[
        str | None,
        typer.Option(
            help="COST=AMOUNT, as macs=50%, macs=2.05e9 or latency=12ms; joined by commas; an unknown cost lists all."
        ),
    ] = None,
    target_drop: Annotated[
        float | None,
        typer.Option(
            help="Instead of a budget: the smallest network (in MACs, or with --latency-table in time) that loses at "
            "most so many points of top-1 on held-out images.",
            metavar="POINTS",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder to write; MODEL-pruned by default.", metavar="FOLDER")] = None,
    scores: Annotated[
        str | None, typer.Option(help="A file that `score` wrote, instead of scoring now.", metavar="FILE")
    ] = None,
    method: Annotated[
        str, typer.Option(help="curves, or paper: Taylor scores as published, nothing refitted.")
    ] = "curves",
    criterion: Annotated[
        str | None, typer.Option(help="Another way to value channels than the method's; an unknown one lists all.")
    ] = None,
    recover: Annotated[
        bool | None, typer.Option(help="Refit what is left on the images; not with the paper's method.")
    ] = None,
    refine: RefineOption = False,
    blocks: Annotated[
        bool, typer.Option(help="Residual blocks may go as a whole, where the images show that this loses less.")
    ] = False,
    recover_images: Annotated[int, typer.Option(help="Images to recover with.")] = 1024,
    round_to: Annotated[int, typer.Option(help="Keep multiples of this many channels.")] = 1,
    min_keep: Annotated[
        float, typer.Option(help="Least number (or fraction below 1) of channels to keep in a group.")
    ] = 1,
    ignore: Annotated[list[str] | None, typer.Option(help="Pattern of layers to leave alone, as 'layer4.*'.")] = None,
    latency_table: Annotated[
        str | None, typer.Option(help="A file that `latency --table` wrote.", metavar="FILE")
    ] = None,
    labels: LabelsOption = "auto",
    device: DeviceOption = "auto",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Prune a model to a budget and save it as a folder that timm.create_model reads.

    Labels are not needed, except by Taylor scores (--labels), and the last line says what was lost.

    Example: timm-knapsack prune resnet18 --no-pretrained --criterion magnitude --budget macs=0.5 --out resnet18-half
    """
    from ..costs.kinds import COSTS
    from ..costs.latency.table import LatencyTable
    from ..pipeline.measured_loss import collapse_warning
    from ..pipeline.recipe import PrunePart, RecoverPart
    from ..pipeline.stage import run_stages
    from ..pipeline.stages import PRUNE, stages
    from ..pipeline.trade_off import smallest_within
    from ..pruning.budget import Budget, parse_budget
    from ..values.valuation import METHODS

    if budget is None and target_drop is None:
        raise KnapsackError("prune needs a budget: --budget macs=50%, or --target-drop POINTS")
    if budget is not None and target_drop is not None:
        raise KnapsackError("--budget and --target-drop exclude each other: leave one of them out")
    if recover_images < 1:
        raise KnapsackError(f"--recover-images {recover_images}: give at least 1, or leave recovery out: --no-recover")
    table = LatencyTable.load(latency_table) if latency_table else None
    wanted = None if budget is None else parse_budget(budget)  # a typo costs no time
    to_measure = table is None and wanted is not None and any(COSTS[name].needs_table for name in wanted)
    wanted = wanted if to_measure or wanted is None else Budget(**wanted, table=table)
    if method not in METHODS:
        raise KnapsackError(f"--method {method!r} is none of {', '.join(METHODS)}")
    recover = method != "paper" if recover is None else recover
    if refine and (not recover or data.source is None):
        raise KnapsackError("--refine goes on from a recovered network: it needs --data FOLDER, and --recover")
    if blocks and (not recover or data.source is None):
        raise KnapsackError("--blocks tries networks on images: it needs --data FOLDER, and --recover")
    where = console.choose_device(device)
    min_keep = int(min_keep) if min_keep >= 1 else min_keep
    folder = console.check_new(out or f"{network.short_name}-pruned", overwrite)
    job = scoring_job(
        network, data, criterion or METHODS[method], labels, where, needs_data=scores is None, budget=wanted,
        prune=PrunePart(round_to, min_keep, tuple(ignore or ()), blocks),
        recover=RecoverPart(recover_images, data.batch_size, refine),
    )  # fmt: skip
    job.folder = folder
    job.options = {"scores": scores}
    if target_drop is None:
        names = ["read scores" if name == "score" and scores is not None else name for name in PRUNE]
        if to_measure:  # as a recipe does: its table stands before the values, and nothing is kept of it
            names.insert(names.index("groups") + 1, "latency")
        without = ["data", "recover"] if data.source is None else [] if recover else ["recover"]
        run_stages(stages(*names, without=without), job)
    else:
        if data.source is None or not recover:
            raise KnapsackError("--target-drop needs images with labels (--data FOLDER), and recovery on them")
        job, _ = smallest_within(job, target_drop, cost="macs" if table is None else "latency", table=table)
        run_stages(stages("save"), job)
    student, folder = job["student"], job["saved"]
    result = student.result
    loss, costly = result.report.loss, result.report.group_losses
    if loss is not None and not loss.recovered and (warning := collapse_warning(result.report.model, loss, costly)):
        job.say(f"warning: {warning}")
    if as_json:
        console.print_json(
            {"folder": str(folder), **result.report.to_dict(), "channel_config": result.channel_config.to_dict()}
        )
        return
    console.print_costs(student.record.pruning, f"{network.model} → {folder}")
    gone = f"blocks removed: {', '.join(result.report.blocks)}\n" if result.report.blocks else ""
    console.stdout().print(
        f"{result.report.outcome}\n{gone}import timm, timm_knapsack\n"
        f'model = timm.create_model("local-dir:{folder}", pretrained=True)',
        markup=False,
    )
