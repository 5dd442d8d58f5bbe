"""groups, score, latency, prune."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import KnapsackError
from . import console
from .console import (
    BatchOption,
    DataOption,
    DeviceOption,
    ImageColumnOption,
    JsonOption,
    LabelColumnOption,
    LabelsOption,
    LimitOption,
    ModelArgOption,
    PretrainedOption,
    RootOption,
    SplitOption,
    WeightsOption,
    WorkersOption,
)

ModelArgument = Annotated[str, typer.Argument(help="Name of a timm model, or a folder with a saved one.")]
CriterionOption = Annotated[str, typer.Option(help="abs (the paper's), sum, taylor_bn, magnitude or random (no data).")]


def groups(model: ModelArgument, model_args: ModelArgOption = None, as_json: JsonOption = False) -> None:
    """Show which channels of a model can be removed together, and what is frozen.

    Example: timm-knapsack groups resnet18
    """
    from rich.table import Table

    from ..channels.find_groups import find_channel_groups
    from ..human_numbers import human

    found = find_channel_groups(console.model_source(model, False, None, model_args).on_meta())
    if as_json:
        rows = [
            {
                "name": g.name,
                "units": g.size,
                "crosses_norm": g.crosses_norm,
                "slices": [[s.param, s.dim] for s in g.slices],
            }
            for g in found
        ]
        console.print_json({"model": model, "macs": found.macs(), "groups": rows, "frozen": dict(found.frozen)})
        return
    table = Table("group", "units", "layers that make it", title=f"{model}: {human(found.macs())}MACs")
    for group in found:
        made_by = [s.param.rsplit(".", 1)[0] for s in group.slices if s.role == "out"]
        more = f" and {len(made_by) - 3} more" if len(made_by) > 3 else ""
        table.add_row(group.name, str(group.size), ", ".join(made_by[:3]) + more)
    console.stdout().print(table)
    for name, reason in found.frozen.items():
        console.stdout().print(f"frozen: {name}: {reason}", markup=False)


def score(
    model: ModelArgument,
    data: DataOption = None,
    out: Annotated[str, typer.Option(help="File to write.", metavar="FILE")] = "scores.safetensors",
    criterion: CriterionOption = "abs",
    per_sample: Annotated[bool, typer.Option(help="Expectation over single images: exact, and slower.")] = False,
    labels: LabelsOption = "auto",
    split: SplitOption = None,
    limit: LimitOption = 1024,
    batch_size: BatchOption = 64,
    image_column: ImageColumnOption = None,
    label_column: LabelColumnOption = None,
    root: RootOption = None,
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    pretrained: PretrainedOption = True,
    weights: WeightsOption = None,
    model_args: ModelArgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score every channel in one pass over images; one file serves any number of budgets.

    Example: timm-knapsack score resnet18 --no-pretrained --criterion magnitude --out scores.safetensors
    """
    from ..channels.find_groups import find_channel_groups

    where = console.choose_device(device)
    console.check_writable(Path(out).parent)
    source = console.model_source(model, pretrained, weights, model_args)
    network = source.load().to(where)
    options = console.data_options(split, limit, image_column, label_column, root, workers, batch_size)
    found = find_channel_groups(network)
    scores = _scores(network, found, data, criterion, per_sample, labels, options)
    scores.save(out)
    if as_json:
        facts = {"file": out, "model": model, "criterion": criterion, "samples": scores.samples}
        console.print_json({**facts, "groups": {name: values.tolist() for name, values in scores.items()}})
        return
    console.stdout().print(
        f"{out}: {sum(map(len, scores.values()))} channels in {len(scores)} groups, {criterion}, "
        f"{scores.samples} images\nprune with: timm-knapsack prune {model} --budget macs=0.5 --scores {out}",
        markup=False,
    )


def _scores(network, groups, data, criterion, per_sample, labels, options):
    from ..values.taylor import CRITERIA, taylor_scores

    if criterion not in CRITERIA:
        raise KnapsackError(f"--criterion {criterion!r} is none of {', '.join(CRITERIA)}")
    loader = None
    if criterion not in ("magnitude", "random"):
        if data is None:
            raise KnapsackError(
                f"criterion {criterion!r} needs images: --data FOLDER; without any there is --criterion magnitude"
            )
        loader = console.calibration_loader(data, network, labels, options)
    return taylor_scores(network, groups, loader, criterion, per_sample=per_sample, data=data or "")


def latency(
    model: ModelArgument,
    table: Annotated[
        str | None,
        typer.Option(help="Also measure every layer over its widths, for budgets of time; resumes.", metavar="FILE"),
    ] = None,
    batch_size: BatchOption = 1,
    device: DeviceOption = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    half: Annotated[bool, typer.Option(help="Measure in float16.")] = False,
    channels_last: Annotated[bool, typer.Option(help="Measure in channels_last memory format.")] = False,
    compile: Annotated[bool, typer.Option(help="Measure the network as torch.compile makes it.")] = False,
    seconds: Annotated[float, typer.Option(help="Time to measure for, at most, about.")] = 180.0,
    model_args: ModelArgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long a model takes on this device, and with --table how each layer's time depends on its width.

    Example: timm-knapsack latency resnet18 --batch-size 1 --seconds 5
    """
    import sys

    import torch

    from ..costs.latency.table import LatencyTable, measure_latency

    where = console.choose_device(device)
    if table is not None:
        console.check_writable(Path(table).parent)
    source = console.model_source(model, False, None, model_args)  # time does not depend on the weights' values
    network = source.load().to(where)
    options = {"batch_size": batch_size, "threads": threads, "channels_last": channels_last or None}
    options |= {"dtype": torch.float16 if half else None, "compile": compile}
    whole = measure_latency(network, max_seconds=min(10.0, seconds), **options)
    facts = {"model": model, "device": where, "batch_size": batch_size, "seconds": whole.median, "spread": whole.spread}
    facts["passes"] = len(whole.samples)
    if table is not None:
        measured = LatencyTable.measure(
            network, path=table, max_seconds=seconds, progress=sys.stderr.isatty() and not as_json, **options
        )
        facts |= {"table": table, "layers": len(measured.layers), "measured_for": measured.seconds}
    if as_json:
        console.print_json(facts)
        return
    console.stdout().print(f"{model}: {whole} at batch {batch_size} on {where}", markup=False)
    if table is not None:
        console.stdout().print(
            f"{table}: {facts['layers']} layers\nprune with: timm-knapsack prune {model} --budget latency=0.6 "
            f"--latency-table {table} --data FOLDER",
            markup=False,
        )


def prune(
    model: ModelArgument,
    budget: Annotated[
        str, typer.Option(help="macs=0.5, macs=2.05e9, params=0.6, latency=0.6 or latency=12ms; joined by commas.")
    ],
    data: DataOption = None,
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
    split: SplitOption = None,
    limit: LimitOption = 1024,
    batch_size: BatchOption = 64,
    image_column: ImageColumnOption = None,
    label_column: LabelColumnOption = None,
    root: RootOption = None,
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    pretrained: PretrainedOption = True,
    weights: WeightsOption = None,
    model_args: ModelArgOption = None,
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
    from ..values.taylor import Scores

    wanted = Budget.parse(budget, LatencyTable.load(latency_table) if latency_table else None)  # a typo costs no time
    where = console.choose_device(device)
    source = console.model_source(model, pretrained, weights, model_args)
    source.check()
    folder = console.check_writable(out or f"{Path(model).name.partition(':')[2] or Path(model).name}-pruned")
    network = source.load().to(where)
    found = find_channel_groups(network)
    options = console.data_options(split, limit, image_column, label_column, root, workers, batch_size)
    if scores is not None:
        values = Scores.load(scores, found)
    else:
        values = _scores(network, found, data, criterion, False, labels, options)
    min_keep = int(min_keep) if min_keep >= 1 else min_keep
    result = prune_model(
        network,
        scores=values,
        budget=wanted,
        round_to=round_to,
        min_keep=min_keep,
        ignore=ignore or (),
        groups=found,
        base_args=source.base_args,
    )
    notes = []
    if recover and data is not None:
        from ..images.loaders import create_loader
        from ..images.model_labels import CALIBRATION
        from ..recovery.closed_form import recover as recover_model

        console.note("recovering …")
        options = {**CALIBRATION, **options, "labels": "ignore", "limit": recover_images}
        images = create_loader(data, network, **options)
        recover_model(result.model, network, images, kept=result.kept_channels)
        notes.append(f"recovered in closed form with {len(images.dataset)} images")
    folder, record = save_run(result, folder, source, notes=notes)
    if as_json:
        console.print_json(
            {"folder": str(folder), **result.report.to_dict(), "channel_config": result.channel_config.to_dict()}
        )
        return
    console.print_costs(record.pruning, f"{model} → {folder}")
    kept = result.report.value / result.report.total_value if result.report.total_value else 1.0
    console.stdout().print(
        f"importance kept: {kept:.2%}\nimport timm, timm_knapsack\n"
        f'model = timm.create_model("local-dir:{folder}", pretrained=True)',
        markup=False,
    )
