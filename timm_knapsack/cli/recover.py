"""recover: refit a pruned model to its original by least squares, without labels."""

import os
from typing import Annotated

import typer

from ..errors import KnapsackError
from . import console
from .options import (
    DataOptions,
    DeviceOption,
    JsonOption,
    OverwriteOption,
    RefineOption,
    TeacherOptions,
    pruned_folder,
    verb,
)


@verb(limit=1024)
def recover(
    student: Annotated[str, typer.Argument(help="A folder that `prune` wrote.")],
    data: DataOptions,
    original: TeacherOptions,
    out: Annotated[
        str | None, typer.Option(help="Folder to write; STUDENT-recovered by default.", metavar="FOLDER")
    ] = None,
    refine: RefineOption = False,
    device: DeviceOption = "auto",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Refit a pruned model to its original on images, by least squares: no labels, nothing to choose, minutes.

    `prune` does it already where it has images; this is for other images, more of them, or several devices:
    accelerate launch -m timm_knapsack recover … (recipes/accelerate has configs).

    Example: timm-knapsack recover resnet20-half --data images --limit 20 --out recovered
    """
    where = console.choose_device(device)
    if where == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if data.source is None:
        raise KnapsackError("recover needs images, with labels or without: --data FOLDER")
    from ..models.model_source import ModelSource
    from ..pipeline.recipe import DataPart, ModelPart, RecoverPart, Settings
    from ..pipeline.stage import Job, Student, run_stages
    from ..pipeline.stages import RECOVER, stages
    from ..pruning.result import LossLine
    from ..reports.run_record import RunRecord
    from ..training.evaluation import start_accelerator

    folder = pruned_folder(student)
    target = console.check_new(out or f"{str(student).rstrip('/')}-recovered", overwrite)
    images = DataPart(data.source, train_split=data.split, **data.reading())
    settings = Settings(model=ModelPart(student), data=images, recover=RecoverPart(data.limit, data.batch_size, refine))
    job = Job(settings, folder=target, accelerator=start_accelerator())
    job.device = where if job.accelerator.num_processes == 1 else str(job.accelerator.device)  # each process its own
    record, network = RunRecord.load(folder), ModelSource(student).load().to(job.device)
    job.made["base"] = original.load(record, network).to(job.device)
    job.made["student"] = Student(network, record)
    run_stages(stages(*RECOVER), job)
    job.accelerator.wait_for_everyone()
    if not job.is_main:
        return
    saved = run_stages(stages("save"), job)["saved"]
    loss = job["student"].record.pruning["loss"]
    if as_json:
        console.print_json({"folder": str(saved), "loss": loss})
        return
    console.stdout().print(f"{saved}: {LossLine(**loss)}", markup=False)
