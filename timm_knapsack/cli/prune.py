"""prune: a smaller model, as a folder that timm.create_model reads."""

from pathlib import Path
from typing import Annotated

import typer

from . import console
from .options import CriterionOption, DataOptions, DeviceOption, JsonOption, LabelsOption, NetworkOptions, verb
from .score import scores_of


@verb(limit=1024)
def prune(
    network: NetworkOptions,
    budget: Annotated[
        str,
        typer.Option(
            help="COST=AMOUNT, as macs=0.5, macs=2.05e9 or latency=12ms; joined by commas; an unknown cost lists all."
        ),
    ],
    data: DataOptions,
    out: Annotated[str | None, typer.Option(help="Folder to write; MODEL-pruned by default.", metavar="FOLDER")] = None,
    scores: Annotated[
        str | None, typer.Option(help="A file that `score` wrote, instead of scoring now.", metavar="FILE")
    ] = None,
    criterion: CriterionOption = "abs",
    recover: Annotated[bool, typer.Option(help="Re-fit what is left on the images, in closed form.")] = True,
    recover_images: Annotated[int, typer.Option(help="Images to recover with.")] = 256,
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
    as_json: JsonOption = False,
) -> None:
    """Prune a model to a budget and save it as a folder that timm.create_model reads.

    Images without labels do: the model's own classes stand in for them (see --labels).

    Example: timm-knapsack prune resnet18 --no-pretrained --criterion magnitude --budget macs=0.5 --out resnet18-half
    """
    from ..channels.find_groups import find_channel_groups
    from ..costs.latency.table import LatencyTable
    from ..pipeline.saving import save_run
    from ..pruning.budget import Budget
    from ..pruning.prune import prune as prune_model
    from ..values.scores import Scores

    wanted = Budget.parse(budget, LatencyTable.load(latency_table) if latency_table else None)  # a typo costs no time
    where = console.choose_device(device)
    source = network.source()
    source.check()
    folder = console.check_writable(out or f"{_short(network.model)}-pruned")
    model = source.load().to(where)
    found = find_channel_groups(model)
    if scores is not None:
        values = Scores.load(scores, found)
    else:
        values = scores_of(model, found, data, criterion, False, labels)
    min_keep = int(min_keep) if min_keep >= 1 else min_keep
    result = prune_model(
        model,
        scores=values,
        budget=wanted,
        round_to=round_to,
        min_keep=min_keep,
        ignore=ignore or (),
        groups=found,
        base_args=source.base_args,
    )
    notes = []
    if recover and data.source is not None:
        from ..images.loaders import create_loader
        from ..images.model_labels import CALIBRATION
        from ..recovery.closed_form import recover as recover_model

        console.note("recovering …")
        options = {**CALIBRATION, **data.loader_options(), "labels": "ignore", "limit": recover_images}
        images = create_loader(data.source, model, **options)
        recover_model(result.model, model, images, kept=result.kept_channels)
        notes.append(f"recovered in closed form with {len(images.dataset)} images")
    folder, record = save_run(result, folder, source, notes=notes)
    if as_json:
        console.print_json(
            {"folder": str(folder), **result.report.to_dict(), "channel_config": result.channel_config.to_dict()}
        )
        return
    console.print_costs(record.pruning, f"{network.model} → {folder}")
    kept = result.report.value / result.report.total_value if result.report.total_value else 1.0
    console.stdout().print(
        f"importance kept: {kept:.2%}\nimport timm, timm_knapsack\n"
        f'model = timm.create_model("local-dir:{folder}", pretrained=True)',
        markup=False,
    )


def _short(model: str) -> str:
    """A name for a folder: without ``hf-hub:`` and owner."""
    name = Path(model).name
    return name.partition(":")[2] or name
