"""run: a whole recipe, stage by stage."""

from typing import Annotated

import typer

from . import console
from .options import DeviceOption, JsonOption


def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file; recipes/ has one for each row of the paper's tables.")],
    out: Annotated[str | None, typer.Option(help="Folder to write; runs/NAME by default.", metavar="FOLDER")] = None,
    from_stage: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Redo from here: latency, score, prune, recover, finetune, evaluate, save, report.",
            metavar="STAGE",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a value of the recipe: data.source=images.", metavar="KEY=VALUE"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Build model, groups, budget and optimiser, do one synthetic step, write nothing."
        ),
    ] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Run a whole recipe: score, prune, recover, fine-tune, evaluate, save, report.

    Each stage is kept on disk and skipped as long as its inputs are unchanged.

    Example: timm-knapsack run recipes/resnet18_imagenet_1.17g.yaml --dry-run
    """
    from ..pipeline.recipe import Recipe
    from ..pipeline.recipe_run import run_recipe
    from ..pipeline.rehearsal import dry_run as rehearse

    where = console.choose_device(device)
    loaded = Recipe.load(recipe, console.parse_settings(settings, "--set"))
    if dry_run:
        facts = rehearse(loaded)
        if as_json:
            console.print_json(facts)
            return
        console.print_costs(facts, f"{loaded.name}: dry run")
        step = "one training step, of random weights on random images, ran; " if facts["loss"] is not None else ""
        console.stdout().print(
            f"{facts['groups']} groups, {facts['units']} units; {step}nothing was written", markup=False
        )
        return
    folder = console.check_writable(out or f"runs/{loaded.name}")
    result = run_recipe(loaded, folder, from_stage=from_stage, device=where)
    if not result["main_process"]:
        return
    if as_json:
        console.print_json(result)
        return
    for stage, state in result["stages"].items():
        console.stdout().print(f"{stage:<10}{state}", markup=False)
    console.print_costs(result["pruning"], loaded.name)
    for row in result["evaluations"]:
        console.stdout().print(f"{row['what']}: top-1 {row['top1']:.2f} % on {row['samples']} images", markup=False)
    console.stdout().print(f"{result['model']}\n{result['report']}", markup=False)
