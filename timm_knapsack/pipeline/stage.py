"""What a stage is, and the job that stages share.

A stage is data: its name, what it needs, what it makes, and the function that does it. A job holds the settings, where
things run, and what has been made so far, each under a name:

    base         the network that is pruned           table        LatencyTable
    groups       its ChannelGroups                    scores       Scores
    student      `Student`: the slim network          evaluations  rows of accuracies
    tuned        FinetuneResult                       saved        folder of the saved model
    calibration, recovery, training, evaluation       loaders of images
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import KnapsackError
from ..models.model_source import ModelSource
from ..pruning.result import LossLine
from ..reports.run_record import RunRecord
from ..training.config import FinetuneConfig
from .loaders import open_loader, public_name
from .progress import say, signs_of_life
from .recipe import Settings, finetune_config


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes:
        run: does it; takes the job, returns its figures in words.
        needs: names of things in the job that it can't do without.
        uses: names of things that it takes where they are there.
        makes: names of things that it puts into the job.
        everywhere: every process runs it; otherwise only the first does, and the others wait.
        bar: it draws a progress bar of its own on a terminal.
        resumes: it goes on with what an interrupted run left in its folder.

    Example:
        >>> Stage("groups", lambda job: "12 groups", needs=("base",), makes=("groups",)).makes
        ('groups',)
    """

    name: str
    run: "Callable[[Job], str]"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    everywhere: bool = False
    bar: bool = False
    resumes: bool = False


@dataclass(frozen=True)
class Student:
    """The slim network at one point of its way: what was done to it last, and the record of all of it.

    Attributes:
        what: "pruned", "recovered" or "fine-tuned".
        result: the `PruneResult` it comes from, unless it was loaded from a folder.
    """

    model: nn.Module
    record: RunRecord
    what: str = "pruned"
    result: Any = None

    @property
    def kept(self) -> dict[str, Tensor] | None:
        """``{layer: indices of its output channels that stayed}``; None if the record is silent: the model may know."""
        return {name: torch.as_tensor(index) for name, index in self.record.kept_channels.items()} or None

    def then(self, what: str, model: nn.Module | None = None, note: str = "") -> "Student":
        """The student after a further step; its record gets a note of it for the model card."""
        if note:
            self.record.notes.append(note)
        model = self.model if model is None else model
        result = None if self.result is None else replace(self.result, model=model)
        return replace(self, model=model, what=what, result=result)

    def measured(self, loss: LossLine) -> "Student":
        """The student, with what it has lost in its report and its record."""
        self.record.pruning["loss"] = asdict(loss)
        if self.result is None:
            return self
        return replace(self, result=replace(self.result, report=replace(self.result.report, loss=loss)))

    @property
    def savable(self) -> Any:
        """What `save_pretrained` takes: the result, which knows what was asked for, or just the model."""
        return self.model if self.result is None else self.result


@dataclass
class Job:
    """What the stages of one run share; everything stays in memory.

    Attributes:
        settings: how each stage does its work.
        folder: where the model is saved.
        made: what there is by now, by name; may be given some of it.
        wanted: names of what the stages of this run take; loaders that nobody takes are not opened.
        data_name, eval_name, eval_split: words about the images, for records and cards.
        command, notes, saving: for the record, for the card of this job alone, further arguments of `save_pretrained`.
        words: how a user says things, for messages: ``labels``, ``resume``.
        options: settings of stages that recipes do not have.
        checkpoints: where fine-tuning writes its own; None for none.
        resume: the stage that runs next shall go on where it was interrupted.
        say: prints the line of a stage.
    """

    settings: Settings
    source: ModelSource | None = None
    device: str = "cpu"
    accelerator: Any = None
    folder: Path | None = None
    made: dict[str, Any] = field(default_factory=dict)
    wanted: frozenset[str] = frozenset()
    data_name: str = ""
    eval_name: str = ""
    eval_split: str | None = None
    command: str = ""
    notes: Sequence[str] = ()
    saving: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Path | None = None
    resume: bool = False
    say: Callable[[str], Any] = say

    def __post_init__(self):
        data = self.settings.data
        if self.source is None:
            self.source = self.settings.model.source()
        if data is not None:
            self.data_name = self.data_name or public_name(data.source)
            self.eval_name = self.eval_name or public_name(data.eval_source or data.source)
            self.eval_split = self.eval_split or data.eval_split

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise KnapsackError(f"there is no {name} in this job, and no stage before made it")
        return found

    def get(self, name: str) -> Any:
        """What was made under this name, or None."""
        return self.made.get(name)

    def versions(self) -> Iterator[tuple[str, nn.Module]]:
        """The original and the student, as ("original", model), ("recovered", model) …"""
        if (base := self.get("base")) is not None:
            yield "original", base
        student = self.get("student")
        if student is not None:
            yield student.what, student.model

    def open(self, purpose: str, **changes) -> Any:
        """A loader for calibration, recovery, training or evaluation; None where there are no such images."""
        return open_loader(self, purpose, **changes)

    def finetune_config(self) -> FinetuneConfig:
        values = {"seed": self.settings.seed, **self.settings.finetune}
        return finetune_config(values, output_dir=str(self.checkpoints) if self.checkpoints else None)

    @property
    def is_main(self) -> bool:
        return self.accelerator is None or self.accelerator.is_main_process


def run_stages(stages: Sequence[Stage], job: Job) -> Job:
    """Run stages one after the other; each prints one line with its figures.

    Example:
        >>> from timm_knapsack.pipeline.recipe import ModelPart
        >>> job = Job(Settings(model=ModelPart("resnet18")), say=lambda line: print(line.rpartition(",")[0]))
        >>> _ = run_stages([Stage("count", lambda job: "12 images")], job)
        count: 12 images
    """
    job.wanted = frozenset(name for stage in stages for name in stage.needs + stage.uses)
    for stage in stages:
        run_stage(stage, job)
    return job


def run_stage(stage: Stage, job: Job) -> None:
    """Run one stage and print its line."""
    start = time.monotonic()
    with signs_of_life(stage.name, stage.bar, job.say) if job.is_main else nullcontext():
        figures = stage.run(job)
    if job.is_main:
        job.say(f"{stage.name}: {figures}, {time.monotonic() - start:.1f} s")


def check_order(stages: Sequence[Stage], given: Sequence[str] = ()) -> None:
    """An error where a stage needs what no stage before it makes.

    Example:
        >>> check_order([Stage("score", str, needs=("groups",), makes=("scores",))])
        Traceback (most recent call last):
        timm_knapsack.errors.KnapsackError: the stage 'score' needs groups, which no stage before it makes
    """
    there = set(given)
    for stage in stages:
        missing = [name for name in stage.needs if name not in there]
        if missing:
            raise KnapsackError(f"the stage {stage.name!r} needs {missing[0]}, which no stage before it makes")
        there |= set(stage.makes)
