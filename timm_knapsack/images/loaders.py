"""Loaders of one shape for scoring, recovery, fine-tuning and evaluation: ``(images, labels)``, from any source.

    loader = create_loader("uoft-cs/cifar10", model, split="train", batch_size=128, training=True)
    for epoch in range(10):
        loader.set_epoch(epoch)
        for images, labels in loader: ...

Images are float32 [batch, channels, height, width], normalised as the model expects; labels are int64 [batch], -1 where
the data has none (``loader.has_labels`` says so). ``sampling`` explains order, resuming and several processes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset
from torch import nn

from ..errors import DataError
from ..files.paths import named_path
from .augmentation import Augmentation, Preprocessing, Transform, check_names
from .datasets import ImageDataset, StreamDataset, SyntheticDataset, outside
from .folders import entries, open_folder
from .sampling import EpochLoader, EpochSampler, resume_at
from .sources import ArrayImages, ImageSource, ImageStream, ListImages, PairImages
from .tables import HUB_ID, TABLE_FILES, holds_tables, load_table, open_table, pick_split

__all__ = [
    "Augmentation", "DataConfig", "create_loader", "image_loader", "open_images", "resume_at", "synthetic_loader",
]  # fmt: skip

TIMM_KINDS = ("torch", "hfds", "hfids")  # prefixes of timm.data.create_dataset that are known without "timm:" as well


@dataclass(frozen=True)
class DataConfig:
    """How to read a source. Every field can be given to ``create_loader`` by name.

    Attributes:
        split: name of the split, as the source calls it or by a usual synonym; ``datasets`` can slice it
            (``"train[:10%]"``). None takes the training split for training, else validation, test or training.
        batch_size: images in a batch, on each process.
        training: augment and shuffle; False gives the model's own evaluation preprocessing.
        augmentation: an Augmentation, or a mapping of its fields; used only in training.
        shuffle: None for "as ``training``".
        drop_last: leave out an incomplete last batch; None for "as ``training``", unless nothing would be left.
        seed: fixes order, augmentation and the choice of ``limit`` images.
        num_workers: processes that read ahead; 0 reads in this one. No result depends on it.
        limit: use this many images only, a random choice that depends on ``seed``; of a stream, the first.
        skip: leave so many images out, those that the same ``seed`` and ``limit=skip`` would choose: what is left is
            held out. Not of a stream.
        labels: ``"auto"`` gives labels where there are any and -1 otherwise; ``"required"`` is an error without;
            ``"ignore"`` gives -1 and checks nothing.
        num_classes: checked against the data; None for the model's own number, 0 for no check.
        image_column, label_column: columns of a table; None finds them by type and usual name.
        subset: one of several configurations of a dataset on the Hub.
        root: folder of a timm or torchvision dataset.
        streaming: read a table in order, as it is needed; see ``StreamDataset``.
        shuffle_buffer: how many rows of a stream are shuffled together.
        in_memory: decode once and keep the pixels: over 10 times faster for CIFAR. None does it for images of at most
            64 pixels that fit into 1 GiB.
        input_size: overrides the model's, as a side length, (height, width) or (channels, height, width).
    """

    split: str | None = None
    batch_size: int = 64
    training: bool = False
    augmentation: Augmentation | Mapping[str, Any] | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    seed: int = 0
    num_workers: int = 0
    limit: int | None = None
    skip: int = 0
    labels: Literal["auto", "required", "ignore"] = "auto"
    num_classes: int | None = None
    image_column: str | None = None
    label_column: str | None = None
    subset: str | None = None
    root: str | Path | None = None
    streaming: bool = False
    shuffle_buffer: int = 4096
    in_memory: bool | None = None
    input_size: int | Sequence[int] | None = None

    def __post_init__(self):
        object.__setattr__(self, "augmentation", Augmentation.read(self.augmentation))
        for name, least in (("batch_size", 1), ("num_workers", 0), ("limit", 1), ("skip", 0), ("shuffle_buffer", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise DataError(f"{name}={value!r}: give an integer of at least {least}")
        if self.labels not in ("auto", "required", "ignore"):
            raise DataError(f"labels={self.labels!r} is none of auto, required, ignore")


def create_loader(
    source: Any, model_or_data_config: nn.Module | Mapping[str, Any], config: DataConfig | None = None, **options
) -> EpochLoader:
    """A loader of ``(images, labels)`` batches for a model.

    Args:
        source: one of
            a folder with a subfolder for each class, or with splits of such; a flat folder of images without labels;
            a folder or file of parquet or arrow tables, or what ``Dataset.save_to_disk`` wrote;
            a dataset on the Hugging Face Hub (``"uoft-cs/cifar10"``);
            ``"timm:torch/cifar100"`` and other names of ``timm.data.create_dataset``, with ``root``;
            a ``datasets`` Dataset, DatasetDict or IterableDataset; a torch dataset of (PIL image, label) pairs;
            a uint8 array of images, or a list of PIL images or of paths; or a pair (either of them, labels).
        model_or_data_config: a timm model, which says input size, normalisation and number of classes; or a mapping
            with these, such as a ``pretrained_cfg``.
        config: a DataConfig.
        **options: fields of DataConfig; they win over ``config``.

    Raises:
        DataError: for anything that is missing, unreadable or does not fit, in one line.

    Example:
        >>> images = np.zeros((5, 8, 8, 3), np.uint8)
        >>> config = {"input_size": (3, 8, 8), "crop_pct": 1.0, "num_classes": 2}
        >>> loader = create_loader((images, [0, 1, 0, 1, 1]), config, batch_size=4)
        >>> [(tuple(x.shape), y.tolist()) for x, y in loader]
        [((4, 3, 8, 8), [0, 1, 0, 1]), ((1, 3, 8, 8), [1])]
    """
    check_names(options, DataConfig, "data")
    config = replace(config or DataConfig(), **options)
    preprocessing = Preprocessing.read(model_or_data_config, config.input_size)
    transform = Transform(preprocessing, config.augmentation if config.training else None)
    opened = open_images(source, config)
    num_classes = _number_of_classes(model_or_data_config) if config.num_classes is None else config.num_classes
    opened = _check_labels(opened, config, num_classes)
    shuffle = config.training if config.shuffle is None else config.shuffle
    common = {"batch_size": config.batch_size, "num_workers": config.num_workers}
    common["pin_memory"] = torch.cuda.is_available()
    if isinstance(opened, ImageStream):
        if config.skip:
            raise DataError(f"skip={config.skip}: images of a stream can't be held out; name another split for them")
        buffer = config.shuffle_buffer if shuffle else 0
        dataset = StreamDataset(
            opened,
            transform,
            batch_size=config.batch_size,
            seed=config.seed,
            limit=config.limit,
            shuffle_buffer=buffer,
            num_classes=num_classes,
        )
        drop_last = config.training if config.drop_last is None else config.drop_last
        return EpochLoader(dataset, drop_last=drop_last, **common)
    dataset = ImageDataset(
        opened,
        transform,
        seed=config.seed,
        limit=config.limit,
        skip=config.skip,
        in_memory=config.in_memory,
        num_classes=num_classes,
    )
    drop_last = config.drop_last
    if drop_last is None:
        drop_last = config.training and len(dataset) >= config.batch_size
    sampler = EpochSampler(len(dataset), seed=config.seed, shuffle=shuffle)
    return EpochLoader(
        dataset, sampler=sampler, drop_last=drop_last, persistent_workers=config.num_workers > 0, **common
    )


def image_loader(
    source: Any,
    model: nn.Module | Mapping[str, Any],
    *,
    split: str | None = None,
    batch_size: int = 64,
    limit: int | None = None,
    **options,
) -> EpochLoader:
    """Images as a model wants them: ``(images, labels)`` batches for `prune`, `recover`, `finetune` and `evaluate`.

    They come in an order that is random and always the same, so that a part of them stands for all. Without
    ``training=True`` each image is as the model sees it in evaluation: resized, cropped and normalised as its config
    says. Labels are -1 where there are none.

    Args:
        source: a folder of images (with a subfolder for each class, or flat), parquet files, a dataset of the Hub
            (``"uoft-cs/cifar10"``) or of ``datasets``, ``"timm:torch/cifar100"``, a torch dataset, a list of PIL images
            or of paths, a uint8 array; the last three as a pair with their labels, too.
        model: a timm model, or its data config.
        split: ``"train"`` to prune and train with, ``"test"`` to evaluate on; None takes the validation split, the test
            split, or what there is, and with ``training=True`` the training split.
        batch_size: images in a batch, on each process.
        limit: this many images only, a random choice; a few hundred do for `prune`.
        options: whatever else `DataConfig` has: ``training=True`` for augmented images, ``num_workers=4``,
            ``image_column="picture"``, ``labels="required"``, ``seed=1`` …

    Example:
        >>> from PIL import Image
        >>> pictures = [Image.new("RGB", (40, 30)), Image.new("RGB", (64, 64))]
        >>> loader = image_loader((pictures, [3, 7]), model, batch_size=2)
        >>> images, labels = next(iter(loader))
        >>> tuple(images.shape), sorted(labels.tolist())
        ((2, 3, 32, 32), [3, 7])
    """
    options = {"shuffle": True, **options, "split": split, "batch_size": batch_size, "limit": limit}
    return create_loader(source, model, **options)


def open_images(source: Any, config: DataConfig) -> ImageSource | ImageStream:
    """Find out what ``source`` is and open it; see ``create_loader`` for what it may be."""
    try:
        return _open_any(source, config)
    except PermissionError as error:  # merely asking whether something is there may be forbidden
        raise DataError(f"no permission to read {error.filename or source}") from error


def _open_any(source: Any, config: DataConfig) -> ImageSource | ImageStream:
    split, training = config.split, config.training
    columns = config.image_column, config.label_column
    if isinstance(source, str | os.PathLike):
        text, path = str(source), named_path(source, DataError, home=True)
        if text.startswith("timm:") or (text.split("/")[0] in TIMM_KINDS and not path.exists()):
            return _open_timm(text.removeprefix("timm:"), config)
        if path.is_dir():
            entries(path)  # may we look?
        if path.is_dir() and not holds_tables(path):
            return open_folder(path, split, training)  # also for streaming: files can be read in any order
        if path.is_file() and path.suffix not in TABLE_FILES:
            raise DataError(f"{path} is a file; give a folder of images, or a {' or '.join(TABLE_FILES)} file")
        if not path.exists() and not HUB_ID.fullmatch(text):
            raise DataError(f"no such folder or file: {path}")
        table, name = load_table(
            source, split=split, training=training, subset=config.subset, streaming=config.streaming
        )
        return open_table(table, name, *columns)
    if type(source).__module__.split(".")[0] == "datasets":
        table, name = pick_split(source, split, training, f"this {type(source).__name__}")
        return open_table(table, name, *columns)
    paired = isinstance(source, tuple) and len(source) == 2 and hasattr(source[0], "__len__")
    pixels, labels = source if paired else (source, None)
    if isinstance(pixels, np.ndarray | torch.Tensor):
        return _open_array(np.asarray(pixels), labels)
    if isinstance(pixels, list | tuple) and not pixels:
        raise DataError("the list has no images")
    if isinstance(pixels, list | tuple) and isinstance(pixels[0], Image.Image | str | os.PathLike):
        labels = None if labels is None else _one_for_each(labels, len(pixels))
        return ImageSource("this list", ListImages(pixels, labels), labels, has_labels=labels is not None)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _open_pairs(source, f"this {type(source).__name__}")
    raise DataError(f"can't read images from a {type(source).__name__}; give a folder, a dataset or an array")


def _open_array(pixels: np.ndarray, labels) -> ImageSource:
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] not in (1, 3)):
        raise DataError(f"images must be uint8 [n, height, width(, 1 or 3)], not {pixels.dtype} {list(pixels.shape)}")
    labels = None if labels is None else _one_for_each(labels, len(pixels))
    if len(pixels) == 0:
        raise DataError("the array has no images")
    return ImageSource("this array", ArrayImages(pixels, labels), labels, has_labels=labels is not None)


def _one_for_each(labels: Any, images: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.shape != (images,):
        raise DataError(f"{images} images, but labels of shape {list(labels.shape)}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels must be class numbers, not {labels.dtype}")
    return labels.astype(np.int64)


def _open_pairs(dataset: Any, name: str) -> ImageSource:
    if len(dataset) == 0:
        raise DataError(f"{name} is empty")
    targets = getattr(dataset, "targets", None)  # torchvision
    labels = None if targets is None or len(targets) != len(dataset) else np.asarray(targets).astype(np.int64)
    class_names = getattr(dataset, "classes", None)
    return ImageSource(name, PairImages(name, dataset), labels, tuple(map(str, class_names)) if class_names else None)


def _open_timm(name: str, config: DataConfig) -> ImageSource | ImageStream:
    kind, _, rest = name.partition("/")
    if kind in ("hfds", "hfids"):  # timm's own readers lower-case the path, or fail with today's datasets
        return open_images(rest, replace(config, streaming=config.streaming or kind == "hfids"))
    if kind in ("tfds", "wds"):
        raise DataError(f"timm:{name} comes in no fixed order, so training could not be resumed; use datasets instead")
    split = config.split or ("train" if config.training else "validation")
    try:
        dataset = create_dataset(name, root=None if config.root is None else str(config.root), split=split)
    except Exception as error:  # timm asserts on unknown names, torchvision raises RuntimeError for missing files …
        reason = " ".join(str(error).split()) or type(error).__name__
        root = "give its folder with root=…" if config.root is None else f"root={config.root}"
        raise DataError(f"timm can't open {name!r}: {reason}; {root}") from error
    return _open_pairs(dataset, f"timm:{name}, split {split}")


def _number_of_classes(model_or_data_config: nn.Module | Mapping[str, Any]) -> int:
    if isinstance(model_or_data_config, nn.Module):
        return getattr(model_or_data_config, "num_classes", 0) or 0
    return model_or_data_config.get("num_classes") or 0


def _check_labels(opened: ImageSource | ImageStream, config: DataConfig, num_classes: int):
    """The source, with labels that fit the model, or without any if they are to be ignored."""
    if config.labels == "ignore":
        if isinstance(opened, ImageStream):
            return replace(opened, label_column=None, class_names=None)
        return replace(opened, labels=None, class_names=None, has_labels=False)
    if not opened.has_labels:
        if config.labels == "required":
            raise DataError(
                f"{opened.name} has no labels, and this needs them; put the images into a folder for each class, or "
                "name the column with label_column=…"
            )
        return opened
    names = opened.class_names
    if num_classes and names is not None and len(names) != num_classes:
        raise DataError(
            f"{opened.name} has {len(names)} classes, but the model has {num_classes} outputs; use a model with "
            f"num_classes={len(names)}, or data with {num_classes} classes"
        )
    labels = getattr(opened, "labels", None)
    if labels is not None:
        _check_range(labels, num_classes, opened)
    return opened


def _check_range(labels: np.ndarray, num_classes: int, source: ImageSource) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= (num_classes or np.iinfo(np.int64).max)))
    if len(wrong):
        index = int(wrong[0])
        raise DataError(outside(int(labels[index]), num_classes, source.images.place(index)))


def synthetic_loader(
    model: nn.Module | Mapping[str, Any] | Sequence[int],
    batch_size: int = 8,
    batches: int = 1,
    num_classes: int | None = None,
    seed: int = 0,
) -> EpochLoader:
    """A loader of noise with random labels, in the shape of a real one, for dry runs.

    Args:
        model: a timm model, its data config, or just (channels, height, width).
        batch_size: images in a batch.
        batches: batches in an epoch.
        num_classes: labels are below it; None for the model's own number.
        seed: fixes images and labels.

    Example:
        >>> images, labels = next(iter(synthetic_loader((3, 16, 16), batch_size=4, num_classes=10)))
        >>> images.shape, labels.dtype
        (torch.Size([4, 3, 16, 16]), torch.int64)
    """
    if isinstance(model, nn.Module | Mapping):
        input_size = Preprocessing.read(model).input_size
        num_classes = num_classes or _number_of_classes(model)
    else:
        input_size = tuple(model)
    dataset = SyntheticDataset(input_size, batch_size * batches, num_classes or 1, seed)
    return EpochLoader(dataset, sampler=EpochSampler(len(dataset), seed=seed, shuffle=False), batch_size=batch_size)
