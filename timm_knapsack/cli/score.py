"""score: a value for every channel."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import KnapsackError
from . import console
from .options import CriterionOption, DataOptions, DeviceOption, JsonOption, LabelsOption, NetworkOptions, verb


@verb(limit=1024)
def score(
    network: NetworkOptions,
    data: DataOptions,
    out: Annotated[str, typer.Option(help="File to write.", metavar="FILE")] = "scores.safetensors",
    criterion: CriterionOption = "abs",
    per_sample: Annotated[bool, typer.Option(help="Expectation over single images: exact, and slower.")] = False,
    labels: LabelsOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Score every channel in one pass over images; one file serves any number of budgets.

    Example: timm-knapsack score resnet18 --no-pretrained --criterion magnitude --out scores.safetensors
    """
    from ..channels.find_groups import find_channel_groups

    where = console.choose_device(device)
    console.check_writable(Path(out).parent)
    model = network.source().load().to(where)
    scores = scores_of(model, find_channel_groups(model), data, criterion, per_sample, labels)
    scores.save(out)
    if as_json:
        facts = {"file": out, "model": network.model, "criterion": criterion, "samples": scores.samples}
        console.print_json({**facts, "groups": {name: values.tolist() for name, values in scores.items()}})
        return
    console.stdout().print(
        f"{out}: {sum(map(len, scores.values()))} channels in {len(scores)} groups, {criterion}, "
        f"{scores.samples} images\nprune with: timm-knapsack prune {network.model} --budget macs=0.5 --scores {out}",
        markup=False,
    )


def scores_of(model, groups, data: DataOptions, criterion: str, per_sample: bool, labels: str):
    from ..values.criteria import CRITERIA
    from ..values.gradient_pass import taylor_scores

    loader = None
    if CRITERIA.find(criterion).needs_data:
        if data.source is None:
            raise KnapsackError(
                f"criterion {criterion!r} needs images: --data FOLDER; without any there is --criterion magnitude"
            )
        loader = console.calibration_loader(data, model, labels)
    return taylor_scores(model, groups, loader, criterion, per_sample=per_sample, data=data.source or "")
