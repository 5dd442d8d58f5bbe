"""finetune: train a pruned model with its original as the teacher."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import KnapsackError
from . import console
from .options import DeviceOption, JsonOption, TeacherOptions, TrainingDataOptions, pruned_folder, verb

_EXAMPLE_SETTINGS = "any field of FinetuneConfig or DistillationConfig: mixup=0.2, ikd_at=convs, ema_decay=0.999 …"


@verb(batch_size=192)
def finetune(
    student: Annotated[str, typer.Argument(help="A folder that `prune` wrote.")],
    data: TrainingDataOptions,
    original: TeacherOptions,
    out: Annotated[
        str, typer.Option(help="Folder for checkpoints and the tuned model.", metavar="FOLDER")
    ] = "finetuned",
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 50,
    lr: Annotated[float | None, typer.Option(help="Learning rate; follows from the run if it is not given.")] = None,
    kd_weight: Annotated[float, typer.Option(help="Weight of knowledge distillation; 0 for none.")] = 1.0,
    ikd_weight: Annotated[float, typer.Option(help="Weight of inner distillation; 0 for none.")] = 20.0,
    settings: Annotated[list[str] | None, typer.Option("--set", help=_EXAMPLE_SETTINGS, metavar="KEY=VALUE")] = None,
    resume: Annotated[bool, typer.Option(help="Go on where a run in the same folder stopped.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in the same folder.")] = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Train a pruned model with its original as the teacher: KD + inner KD, and labels with --set ce_weight=1.

    Several GPUs or machines: accelerate launch -m timm_knapsack finetune … (recipes/accelerate has configs).

    Example: timm-knapsack finetune resnet20-half --data images --epochs 1 --batch-size 8 --out tuned
    """
    if console.choose_device(device) == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    from ..models.model_source import ModelSource
    from ..pipeline.loaders import public_name
    from ..pipeline.recipe import ModelPart, Settings
    from ..pipeline.stage import Job, Student, run_stages
    from ..pipeline.stages import FINETUNE, stages
    from ..reports.run_record import RunRecord
    from ..training.evaluation import start_accelerator

    if data.source is None:
        raise KnapsackError("finetune needs images: --data FOLDER")
    pruned = pruned_folder(student)
    folder = console.check_writable(out)
    if folder.resolve() == Path(student).expanduser().resolve():
        raise KnapsackError(f"--out {out} is the pruned model itself; choose another folder")
    values = _values(settings, {"epochs": epochs, "lr": lr, "overwrite": overwrite}, kd_weight, ikd_weight)
    job = Job(
        Settings(model=ModelPart(student), finetune=values), folder=folder / "model",
        checkpoints=folder / "checkpoints", resume=resume, eval_name=public_name(data.eval_source or data.source),
        words={"resume": "go on with the same command and --resume"},
    )  # fmt: skip
    config = job.finetune_config()
    record, network = RunRecord.load(pruned), ModelSource(student).load()
    if config.distillation.kd_weight or config.distillation.ikd_weight:
        job.made["base"] = original.load(record, network)
    job.made["student"] = Student(network, record)
    job.accelerator = start_accelerator(config.mixed_precision, config.trackers, config.output_dir)
    job.made["training"], job.made["evaluation"] = _loaders(network, data, config.seed)
    run_stages(stages(*FINETUNE, without=["evaluate"] if job.get("evaluation") is None else []), job)
    if not job.is_main:
        return
    result = job["tuned"]
    saved = run_stages(stages("save"), job)["saved"]
    if as_json:
        facts = {
            "folder": str(saved),
            "updates": result.updates,
            "chosen": result.config.choices(),
            "best_top1": result.best_top1,
            "last_top1": result.last_top1,
        }
        console.print_json({**facts, "history": result.history, "evaluations": result.evaluations})
        return
    top1 = f", top-1 {result.last_top1:.2f} %" if result.last_top1 is not None else ""
    console.stdout().print(f"{saved}: {result.updates} updates{top1}", markup=False)


def _values(settings: list[str] | None, given: dict[str, Any], kd_weight: float, ikd_weight: float) -> dict[str, Any]:
    """Fields of `FinetuneConfig` as plain values; those of --set win."""
    from ..pipeline.recipe import finetune_config

    weights = {"kd_weight": kd_weight, "ikd_weight": ikd_weight}
    try:
        finetune_config(given, weights)
    except KnapsackError as error:  # "finetune: kd_weight must be …": these have options of their own
        field, _, rest = str(error).removeprefix("finetune: ").partition(" ")
        raise KnapsackError(f"--{field.replace('_', '-')} {rest}") from None
    values = {**given, **console.parse_settings(settings, "--set")}
    finetune_config(values, weights, place="--set")  # a typo costs no time
    return {**values, "distillation": {**weights, **values.get("distillation", {})}}


def _loaders(model, data: TrainingDataOptions, seed: int):
    """Training and evaluation loaders. A source with one split only is trained on and not evaluated."""
    from ..images.loaders import DataConfig, create_loader, open_images

    augmentation = console.parse_settings(data.augment, "--augment") or None
    common = {**data.loader_options(), "labels": "auto", "seed": seed}
    train = create_loader(data.source, model, training=True, augmentation=augmentation, **common)
    common |= {"limit": None, "split": data.eval_split}
    if data.eval_source is not None or data.eval_split is not None:
        return train, create_loader(data.eval_source or data.source, model, **common)
    fields = {key: common[key] for key in ("image_column", "label_column", "root")}
    names = [
        open_images(data.source, DataConfig(split=s, training=t, **fields)).name
        for s, t in ((data.split, True), (None, False))
    ]
    if names[0] == names[1]:
        console.warn(f"{data.source} has no other split to evaluate on; name images for it with --eval-data")
        return train, None
    return train, create_loader(data.source, model, **common)
