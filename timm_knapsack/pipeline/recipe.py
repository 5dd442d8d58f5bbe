"""A recipe: one YAML file that says everything about a pruning run. Read strictly.

    name: resnet50_imagenet_2.05g
    model: {name: resnet50}
    data: {source: ILSVRC/imagenet-1k}
    budget: {macs: 2.05e9}
    finetune: {epochs: 50, lr: 0.02, batch_size: 192, distillation: {ikd_weight: 20}}

`timm-knapsack run RECIPE.yaml` runs it; an unknown key is answered with the right one.
"""

import difflib
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from ..costs.latency.conditions import MeasuringConditions
from ..errors import KnapsackError, RecipeError
from ..files.paths import named_path
from ..files.plain_json import read_limited, shortened
from ..files.strict_yaml import parse_yaml
from ..models.model_source import ModelSource
from ..pruning.budget import read_amounts
from ..training.config import FinetuneConfig
from ..training.distillation import DistillationConfig
from ..values.valuation import CRITERIA

MAX_BYTES = 2**16  # the longest recipe in this repository has 2 kB
_NAME = re.compile(r"(?!\.)[\w\-.+ ]{1,100}")


@dataclass(frozen=True)
class ModelPart:
    """What is pruned, as in `ModelSource`."""

    name: str
    pretrained: bool = True
    weights: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    def source(self) -> ModelSource:
        return ModelSource(**asdict(self))


@dataclass(frozen=True)
class DataPart:
    """Where the images are; splits and columns are found by themselves where they have usual names.

    Attributes:
        limit: score, recover and train with this many images at most, a random choice; evaluation sees all of its own.
    """

    source: str
    eval_source: str | None = None
    train_split: str | None = None
    eval_split: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    subset: str | None = None
    root: str | None = None
    input_size: int | None = None
    num_workers: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class ScorePart:
    """How channels are valued. ``labels``: data, model for images without, or auto for what there is."""

    criterion: str = "curves"
    images: int | None = 1024
    batch_size: int = 64
    per_sample: bool = False
    labels: str = "data"


@dataclass(frozen=True)
class LatencyPart:
    """How time is measured, for a budget of it."""

    device: str = "auto"
    batch_size: int = 1
    half: bool = False
    channels_last: bool = False
    runtime: str = "torch"
    int8: bool = False
    threads: int | None = None
    seconds: float = 180.0

    def conditions(self) -> MeasuringConditions:
        """As `MeasuringConditions`, for a network that is on its device already."""
        kind = {"dtype": torch.float16 if self.half else None, "channels_last": self.channels_last or None}
        common = {"batch_size": self.batch_size, "threads": self.threads, "max_seconds": self.seconds}
        return MeasuringConditions(**kind, **common, runtime=self.runtime, int8=self.int8)


@dataclass(frozen=True)
class PrunePart:
    """Options of `prune`."""

    round_to: int = 1
    min_keep: float = 1
    ignore: tuple[str, ...] = ()
    blocks: bool = False


@dataclass(frozen=True)
class RecoverPart:
    """Closed-form recovery; 0 images for none. ``refine``: then gradients on the same images, without labels."""

    images: int = 1024
    batch_size: int = 64
    refine: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the stages of a job do their work, each its part; a `Recipe` is this with a name, from a file.

    Attributes:
        data: None where the loaders come from elsewhere.
        budget: None where nothing is pruned.
        finetune: fields of `FinetuneConfig`, ``batch_size`` (images on each process), ``augmentation`` and
            ``distillation``; an empty mapping for no fine-tuning.

    Example:
        >>> Settings(model=ModelPart("resnet18", pretrained=False)).score.criterion
        'curves'
    """

    model: ModelPart
    data: DataPart | None = None
    budget: Any = None
    score: ScorePart = field(default_factory=ScorePart)
    latency: LatencyPart = field(default_factory=LatencyPart)
    prune: PrunePart = field(default_factory=PrunePart)
    recover: RecoverPart = field(default_factory=RecoverPart)
    finetune: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """A whole run.

    Attributes:
        name: also the folder it is written to, by default.
        budget: what may be left, cost by cost, as `Budget` takes it: ``{macs: 0.5}``.
        about: words.
        paper: what the paper reports for this row, to compare with; free-form.

    Example:
        >>> recipe = Recipe.from_dict({"name": "half", "model": {"name": "resnet18"}, "budget": {"macs": 0.5},
        ...     "data": {"source": "images"}})
        >>> recipe.budget["macs"], recipe.score.criterion
        (0.5, 'curves')
    """

    name: str
    data: DataPart
    budget: Mapping[str, Any]
    about: str = ""
    paper: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for part in ("data", "budget"):  # settings without are fine, a recipe is not: dataclasses inherit the default
            if getattr(self, part) is None:
                raise RecipeError(f"{part} is missing")
        if not _NAME.fullmatch(self.name):  # it names a folder
            raise RecipeError(
                f"name is {shortened(self.name)}, expected up to 100 letters, digits, spaces and -_.+, no dot first"
            )
        folder = self.finetune.get("output_dir")
        if isinstance(folder, str) and ".." in Path(folder).parts:
            raise RecipeError(f"finetune.output_dir is {shortened(folder)}: in a recipe it can't lead upwards with ..")
        amounts = {name: _number(value) for name, value in self.budget.items() if value is not None}
        object.__setattr__(self, "budget", amounts)
        try:
            read_amounts(amounts)
            CRITERIA.find(self.score.criterion)
            if self.finetune:
                finetune_config(self.finetune, place="finetune")
        except RecipeError:
            raise
        except KnapsackError as error:
            raise RecipeError(str(error)) from None

    @classmethod
    def from_dict(cls, data: Any, source: str = "recipe") -> "Recipe":
        try:
            return _read(cls, data, "")
        except RecipeError as error:
            raise RecipeError(f"{source}: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike, changes: Mapping[str, Any] | None = None) -> "Recipe":
        """Read a YAML file; ``changes`` (``{"model.weights": …}``) win over what it says."""
        path = named_path(path, RecipeError)
        if not path.exists():
            near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1, cutoff=0.5)
            hint = f"; did you mean {path.parent / near[0]}?" if near else ""
            raise RecipeError(f"there is no recipe {path}{hint}")
        data = parse_yaml(read_limited(path, MAX_BYTES, RecipeError), str(path), RecipeError)
        if not isinstance(data, dict):
            raise RecipeError(f"{path}: expected keys such as model and budget, got {shortened(data)}")
        for key, value in (changes or {}).items():
            place = data
            *parents, last = key.split(".")
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise RecipeError(f"changes {key}: {parent} holds no keys")
            place[last] = value
        return cls.from_dict(data, str(path))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def finetune_config(
    values: Mapping[str, Any],
    distillation: Mapping[str, Any] | None = None,
    *,
    output_dir: str | None = None,
    place: str = "finetune",
):
    """A `FinetuneConfig` from plain keys; those of `DistillationConfig` may stand among them.

    Example:
        >>> finetune_config({"epochs": 2, "ikd_at": "convs"}).distillation.ikd_at
        'convs'
    """
    values = {key: value for key, value in values.items() if key not in ("batch_size", "augmentation")}
    inner = {**(distillation or {}), **_mapping(values.pop("distillation", {}), f"{place}.distillation")}
    own, inside = ([f.name for f in fields(c)] for c in (FinetuneConfig, DistillationConfig))
    for key in list(values):
        if key in inside:
            inner[key] = values.pop(key)
    _check_keys(values, [*own, *inside, "batch_size", "augmentation", "distillation"], place)
    _check_keys(inner, inside, f"{place}.distillation")
    values, inner = ({k: _number(v) for k, v in part.items()} for part in (values, inner))
    try:
        config = DistillationConfig(**inner)
        return FinetuneConfig(**{**values, "distillation": config, "output_dir": values.get("output_dir", output_dir)})
    except KnapsackError as error:
        raise RecipeError(f"{place}: {error}") from None
    except TypeError as error:
        raise RecipeError(f"{place}: a value has the wrong type: {error}") from None


def _read(cls: type, data: Any, place: str) -> Any:
    data = _mapping(data, place or "a recipe")
    _check_keys(data, [f.name for f in fields(cls)], place)
    hints = typing.get_type_hints(cls)
    values = {}
    for f in fields(cls):
        here = f"{place}.{f.name}" if place else f.name
        if f.name in data:
            values[f.name] = _value(data[f.name], hints[f.name], here)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise RecipeError(f"{here} is missing")
    return cls(**values)


def _value(value: Any, kind: Any, place: str) -> Any:
    if is_dataclass(kind):
        return _read(kind, {} if value is None else value, place)
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in kinds:
        return None
    for one in kinds:
        origin = typing.get_origin(one) or one
        if origin is Mapping:
            return _mapping({} if value is None else value, place)
        if origin is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) for item in items):
                return tuple(items)
        elif one is float:
            number = _number(value)
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                return number
        elif one is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif isinstance(one, type) and one is not type(None) and isinstance(value, one):
            return value
    words = {float: "a number", int: "a whole number", str: "text", bool: "true or false", type(None): "nothing"}
    expected = " or ".join(words.get(one, "a list of texts") for one in kinds)
    raise RecipeError(f"{place} is {shortened(value)}, expected {expected}")


def _number(value: Any) -> Any:
    """YAML reads 2.05e9 as text and only 2.05e+9 as a number; both are accepted."""
    if isinstance(value, str) and value[:1].isdigit() and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RecipeError(f"{place} is {shortened(value)}, expected keys with values")
    return dict(value)


def _check_keys(data: Mapping[str, Any], known: list[str], place: str) -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise RecipeError(f"unknown key {shortened(key)}{f' in {place}' if place else ''}; {hint}")
