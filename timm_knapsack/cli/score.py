"""score: a value for every channel."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import KnapsackError
from . import console
from .options import (
    CriterionOption,
    DataOptions,
    DeviceOption,
    HeldOutDataOptions,
    JsonOption,
    LabelsOption,
    NetworkOptions,
    verb,
)


@verb(limit=1024)
def score(
    network: NetworkOptions,
    data: DataOptions,
    out: Annotated[str, typer.Option(help="File to write.", metavar="FILE")] = "values.safetensors",
    criterion: CriterionOption = "curves",
    per_sample: Annotated[bool, typer.Option(help="Expectation over single images: exact, and slower.")] = False,
    labels: LabelsOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Score every channel in one pass over images; one file serves any number of budgets.

    Example: timm-knapsack score resnet18 --no-pretrained --criterion magnitude --out scores.safetensors
    """
    from ..pipeline.stage import run_stages
    from ..pipeline.stages import SCORE, stages

    where = console.choose_device(device)
    console.check_writable(Path(out).parent)
    job = scoring_job(network, data, criterion, labels, where, per_sample=per_sample)
    scores = run_stages(stages(*SCORE, without=["data"] if data.source is None else []), job)["scores"]
    scores.save(out)
    if as_json:
        facts = {"file": out, "model": network.model, "criterion": criterion, "samples": scores.samples}
        worth = {group.name: scores.ladder(group).value.tolist() for group in job["groups"]}  # of each number of units
        console.print_json({**facts, "groups": worth})
        return
    console.stdout().print(
        f"{out}: {sum(job['groups'].sizes)} channels in {len(scores)} groups, {criterion}, "
        f"{scores.samples} images\nprune with: timm-knapsack prune {network.model} --budget macs=0.5 --scores {out}",
        markup=False,
    )


def scoring_job(
    network: NetworkOptions, data: DataOptions, criterion: str, labels: str, device: str, *, per_sample: bool = False,
    needs_data: bool = True, **settings,
):  # fmt: skip
    """A job that scores a network, or only reads scores, as the options say."""
    from ..pipeline.loaders import LABELS
    from ..pipeline.recipe import DataPart, ModelPart, ScorePart, Settings
    from ..pipeline.stage import Job
    from ..values.valuation import CRITERIA

    source = network.source()
    source.check()  # mistakes that cost no time to find come first
    if labels not in LABELS:
        raise KnapsackError(f"--labels {labels!r} is none of {', '.join(LABELS)}")
    if needs_data and CRITERIA.find(criterion).needs_data and data.source is None:
        raise KnapsackError(
            f"criterion {criterion!r} needs images: --data FOLDER; without any there is --criterion magnitude"
        )
    part = None if data.source is None else DataPart(data.source, train_split=data.split, **data.reading())
    if part is not None and isinstance(data, HeldOutDataOptions):
        part = replace(part, eval_source=data.eval_source, eval_split=data.eval_split)
    score = ScorePart(criterion, data.limit, data.batch_size, per_sample, labels)
    model = ModelPart(**source.to_dict())
    made = Settings(model=model, data=part, score=score, **settings)
    return Job(made, device=device, words={"labels": "--labels model"})
