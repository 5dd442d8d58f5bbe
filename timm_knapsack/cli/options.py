"""Groups of options that several verbs share, each written once as a frozen dataclass.

A verb names the group in its signature, `verb` spreads it into single options for typer, and the function gets the
filled dataclass:

    @verb(limit=1024)  # another default than the group's
    def score(network: NetworkOptions, data: DataOptions) -> None: ...
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..errors import KnapsackError
from .console import parse_settings

DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")]
BatchOption = Annotated[int, typer.Option(help="Images in a batch (on each process).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts, and nothing else, to stdout.")]
RefineOption = Annotated[
    bool, typer.Option("--refine", help="Then a few hundred gradient steps on the images, without labels: minutes.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote there.")]
CriterionOption = Annotated[
    str,
    typer.Option(help="How channels are valued: curves, abs, magnitude (no data) …; an unknown one lists all."),
]
LabelsOption = Annotated[
    str,
    typer.Option(
        help="auto: the data's labels, or where it has none the classes that the model itself sees; data: require "
        "labels; model: always the model's own classes."
    ),
]


@dataclass(frozen=True)
class ArchitectureOptions:
    """A network whose weights do not matter."""

    model: Annotated[str, typer.Argument(help="Name of a timm model, or a folder with a saved one.")]
    model_args: Annotated[
        list[str] | None,
        typer.Option("--model-arg", help="Argument of timm.create_model, as num_classes=100.", metavar="KEY=VALUE"),
    ] = None

    def source(self):
        """The `ModelSource` that these options describe."""
        from ..models.model_source import ModelSource

        weights = {"pretrained": getattr(self, "pretrained", False), "weights": getattr(self, "weights", None)}
        return ModelSource(self.model, args=parse_settings(self.model_args, "--model-arg"), **weights)

    @property
    def short_name(self) -> str:
        """For names of folders: without ``hf-hub:`` and owner."""
        name = Path(self.model).name
        return name.partition(":")[2] or name


@dataclass(frozen=True)
class NetworkOptions(ArchitectureOptions):
    """A network with its weights."""

    pretrained: Annotated[bool, typer.Option(help="Load timm's weights; random ones otherwise.")] = True
    weights: Annotated[str | None, typer.Option(help="A .safetensors (or .pth) file of weights.", metavar="FILE")] = (
        None
    )


@dataclass(frozen=True)
class DataOptions:
    """Images, and how to read them."""

    source: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Images: a folder (a subfolder for each class, or flat), parquet, a Hub dataset, timm:…",
            metavar="SOURCE",
        ),
    ] = None
    split: Annotated[str | None, typer.Option(help="Split of the data; the natural one by default.")] = None
    limit: Annotated[int | None, typer.Option(help="Use this many images only, a random choice.")] = None
    batch_size: BatchOption = 64
    image_column: Annotated[str | None, typer.Option(help="Column of the images in a table.")] = None
    label_column: Annotated[str | None, typer.Option(help="Column of the labels in a table.")] = None
    root: Annotated[str | None, typer.Option(help="Folder of a timm: dataset.")] = None
    workers: Annotated[int, typer.Option(help="Processes that read images ahead.")] = 0

    def reading(self) -> dict[str, Any]:
        """How the source is read, whatever for."""
        columns = {"image_column": self.image_column, "label_column": self.label_column}
        return {**columns, "root": self.root, "num_workers": self.workers}

    def loader_options(self) -> dict[str, Any]:
        """Arguments of `create_loader`."""
        return {**self.reading(), "split": self.split, "limit": self.limit, "batch_size": self.batch_size}


@dataclass(frozen=True)
class HeldOutDataOptions(DataOptions):
    """Images to work with, and others to evaluate on."""

    eval_source: Annotated[
        str | None,
        typer.Option("--eval-data", help="Images to evaluate on; a split of --data by default.", metavar="SOURCE"),
    ] = None
    eval_split: Annotated[str | None, typer.Option(help="Split to evaluate on.")] = None


@dataclass(frozen=True)
class TrainingDataOptions(HeldOutDataOptions):
    """Images to train on, and others to evaluate on."""

    split: Annotated[str | None, typer.Option("--train-split", help="Split to train on.")] = None
    augment: Annotated[
        list[str] | None, typer.Option(help="Field of the augmentation, as hflip=0.", metavar="KEY=VALUE")
    ] = None


@dataclass(frozen=True)
class TeacherOptions:
    """The network that was pruned: by default what the student's folder says."""

    teacher: Annotated[str | None, typer.Option(help="timm name or folder; what was pruned, by default.")] = None
    teacher_weights: Annotated[str | None, typer.Option(help="File of the teacher's weights.", metavar="FILE")] = None

    def load(self, record, student):
        """The teacher of a student, which has this record."""
        from ..models.model_source import ModelSource

        if self.teacher is not None:
            args = {"num_classes": student.num_classes} if not Path(self.teacher).is_dir() else {}
            return ModelSource(self.teacher, self.teacher_weights is None, self.teacher_weights, args).load()
        if not record.base:
            raise KnapsackError("the folder does not say what it was pruned from; name the teacher: --teacher MODEL")
        base = ModelSource(**{**record.base, **({"weights": self.teacher_weights} if self.teacher_weights else {})})
        if not base.pretrained and base.weights is None and not base.is_folder:
            raise KnapsackError(
                f"{base.name} had random weights when it was pruned, and they are gone; name a teacher with --teacher "
                "or --teacher-weights (finetune can do without: --kd-weight 0 --ikd-weight 0)"
            )
        return base.load()


def pruned_folder(student: str) -> Path:
    """The folder of a pruned model, or an error with the command that makes one."""
    from ..hub.saving import CHANNELS
    from ..models.model_source import saved_folder

    folder = saved_folder(student)
    if not (folder / CHANNELS).is_file():
        raise KnapsackError(
            f"{student} is no folder with a pruned model; `timm-knapsack prune MODEL --out {student}` makes one"
        )
    return folder


@dataclass(frozen=True)
class MeasuringOptions:
    """Measuring conditions, as typed; the names are those of a recipe's `LatencyPart`."""

    batch_size: BatchOption = 1
    device: DeviceOption = "auto"
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None
    half: Annotated[bool, typer.Option(help="Measure in float16.")] = False
    channels_last: Annotated[bool, typer.Option(help="Measure in channels_last memory format.")] = False
    runtime: Annotated[
        str, typer.Option(help="What runs it: torch, compile, onnxruntime, openvino; an unknown one lists all.")
    ] = "torch"
    int8: Annotated[bool, typer.Option(help="Quantised by the runtime (onnxruntime, openvino).")] = False
    seconds: Annotated[float, typer.Option(help="Time to measure for, at most, about.")] = 180.0

    def conditions(self):
        """The `MeasuringConditions` for a network that is on its device already."""
        from ..pipeline.recipe import LatencyPart

        return LatencyPart(**asdict(self)).conditions()


def verb(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Spread the option groups in a verb's signature into single options; typer sees only those.

    Args:
        defaults: of single options, where the verb wants others than the group.

    Example:
        >>> @verb(limit=8)
        ... def show(data: DataOptions) -> None:
        ...     print(data.source, data.limit, data.batch_size)
        >>> show(source="images", batch_size=2)
        images 8 2
    """

    def spread(function: Callable[..., None]) -> Callable[..., None]:
        options, groups = _spread_out(function)
        unknown = sorted(set(defaults) - set(options))
        if unknown:
            raise TypeError(f"{function.__name__} has no option {unknown[0]!r} to give a default")
        options |= {name: options[name].replace(default=value) for name, value in defaults.items()}

        @functools.wraps(function)
        def called(**given: Any) -> None:
            values = {name: option.default for name, option in options.items() if option.default is not option.empty}
            values |= given
            filled = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups}
            return function(**filled, **values)

        called.__signature__ = inspect.Signature(list(options.values()))
        called.__annotations__ = {name: option.annotation for name, option in options.items()}
        return called

    return spread


def _spread_out(function: Callable) -> tuple[dict[str, inspect.Parameter], list[tuple[str, type]]]:
    """The single options of a verb by name, and its groups as (parameter, dataclass)."""
    options: dict[str, inspect.Parameter] = {}
    groups = []
    # not get_type_hints: Python 3.10 makes an Optional[Annotated[…]] of a None default, and the option loses its name
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind = parameter.annotation
        found = [(parameter.name, kind, parameter.default)]
        if is_dataclass(kind):
            groups.append((parameter.name, kind))
            inner = get_type_hints(kind, include_extras=True)
            found = [(f.name, inner[f.name], f.default) for f in fields(kind)]
        for name, annotation, default in found:
            if name in options:
                raise TypeError(f"{function.__name__}: the option {name!r} is there twice")
            default = inspect.Parameter.empty if default is MISSING else default
            keyword = inspect.Parameter.KEYWORD_ONLY
            options[name] = inspect.Parameter(name, keyword, default=default, annotation=annotation)
    return options, groups
