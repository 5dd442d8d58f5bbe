"""The images of a job: one loader for each purpose, as the settings say."""

import os
from typing import Any

from ..errors import DataError, RecipeError
from ..files.paths import named_path
from ..images.loaders import create_loader
from ..images.model_labels import CALIBRATION, ModelLabels
from ..images.tables import HUB_ID
from ..values.valuation import CRITERIA

PURPOSES = ("calibration", "recovery", "training", "evaluation")
LABELS = {"auto": "auto", "data": "required", "model": "ignore"}  # of score.labels: labels of create_loader
EVAL_BATCH = 64
# Names of folders that say nothing about what is in them
USUAL = ("images", "imgs", "data", "dataset", "train", "training", "val", "valid", "validation", "test")


def public_name(source: Any) -> str:
    """What records and cards call a source: an id of the Hub as it is, a local folder by its name alone.

    Example:
        >>> public_name("uoft-cs/cifar10"), public_name("/home/me/flowers/images")
        ('uoft-cs/cifar10', 'flowers')
    """
    if not isinstance(source, str | os.PathLike):
        return f"this {type(source).__name__}"
    path = named_path(source, DataError, home=True)
    if not path.is_absolute() and not path.exists():
        return str(source)
    parts = [part for part in path.resolve().parts if part.lower() not in USUAL]
    return parts[-1] if parts else path.name


def on_the_hub(source: Any) -> bool:
    """Is it the id of a dataset on the Hub, with its owner?"""
    if not isinstance(source, str) or named_path(source, DataError, home=True).exists():
        return False
    return "/" in source and HUB_ID.fullmatch(source) is not None


def open_loader(job: Any, purpose: str, **changes) -> Any:
    """A loader of the job's data; ``changes`` are arguments of `create_loader` that win, or another ``model``."""
    data, settings = job.settings.data, job.settings
    names = ("image_column", "label_column", "subset", "root", "input_size", "num_workers")
    reading = {"seed": settings.seed, **{name: getattr(data, name) for name in names}}
    source, reading["split"] = data.source, data.train_split
    if purpose == "calibration" and CRITERIA.find(settings.score.criterion).curves is not None:
        part = settings.score
        reading |= {**CALIBRATION, "limit": _least(part.images, data), "batch_size": part.batch_size}
        reading["labels"] = "ignore"
    elif purpose == "calibration":
        return _labelled(job, source, {**reading, **changes})
    elif purpose == "recovery":
        part = settings.recover
        reading |= {**CALIBRATION, "limit": _least(part.images, data), "batch_size": part.batch_size}
        return _perhaps_labelled(job, source, {**reading, **changes})
    elif purpose == "training":
        part = settings.finetune
        reading |= {"training": True, "labels": "required", "augmentation": part.get("augmentation")}
        reading |= {"batch_size": int(part.get("batch_size", EVAL_BATCH)), "limit": data.limit}
    else:
        source = data.eval_source or data.source
        reading |= {"split": data.eval_split, "batch_size": EVAL_BATCH, "labels": "required"}
        reading["skip"] = job.options.get("held_out", 0)
    return create_loader(source, changes.pop("model", job["base"]), **{**reading, **changes})


def _least(images: int | None, data: Any) -> int | None:
    return min((n for n in (images, data.limit) if n is not None), default=None)


def _labelled(job: Any, source: Any, reading: dict[str, Any]) -> Any:
    """Images to score with: labelled by the data, or by the model itself."""
    part, base = job.settings.score, job["base"]
    if part.labels not in LABELS:
        raise RecipeError(f"score.labels is {part.labels!r}, expected {', '.join(LABELS)}")
    say_so = job.words.get("labels", "score.labels: model")
    options = {**CALIBRATION, "limit": _least(part.images, job.settings.data), "batch_size": part.batch_size}
    options["labels"] = LABELS[part.labels]
    try:
        loader = create_loader(source, base, **{**options, **reading})
    except DataError as error:
        if part.labels == "auto" and "classes, but the model has" in str(error):
            raise DataError(f"{error}; or let the model label the images: {say_so}") from None
        raise
    if part.labels == "auto" and not getattr(loader.dataset, "has_labels", True):
        if job.is_main:
            job.say(f"note: {source} has no labels; the model's own classes stand in for them ({say_so})")
        return ModelLabels(loader, base)
    return ModelLabels(loader, base) if part.labels == "model" else loader


def _perhaps_labelled(job: Any, source: Any, reading: dict[str, Any]) -> Any:
    """Images to recover with; their labels, where they are the model's classes, say what top-1 was lost."""
    if job.settings.score.labels != "model":
        try:
            return create_loader(source, job["base"], **{"labels": "auto", **reading})
        except DataError:
            pass  # labels of something else; whatever else is wrong comes up again
    return create_loader(source, job["base"], **{"labels": "ignore", **reading})


def hold_out(job: Any) -> int:
    """Make sure that evaluation sees no image that values or recovery have seen; returns how many it sees.

    Another split, or another source, needs nothing. Where all come from one set of images, those that were drawn for
    the values and for recovery are left out of the evaluation.
    """
    evaluation, used = job["evaluation"], [job.get(name) for name in ("calibration", "recovery")]
    used = [getattr(one, "loader", one) for one in used if one is not None]
    own = _origin(evaluation)
    drawn = [len(one.dataset) for one in used if own is not None and _origin(one) == own]
    if drawn and max(drawn) >= own[1]:
        raise DataError(
            f"all {own[1]} images of {own[0]} are used for values and recovery, and none are left to evaluate on; give "
            "others (eval_source), or use fewer"
        )
    if drawn:
        job.options = {**job.options, "held_out": max(drawn)}  # the same seed: the smaller choice is part of the larger
        job.made["evaluation"] = evaluation = job.open("evaluation")
    return count_images(evaluation) or 0


def _origin(loader: Any) -> tuple[str, int] | None:
    source = getattr(getattr(loader, "dataset", None), "source", None)
    return None if source is None else (source.name, len(source))


def count_images(loader: Any) -> int | None:
    """How many images a loader gives in an epoch; None where nobody knows before it is read."""
    loader = loader.loader if isinstance(loader, ModelLabels) else loader
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None
