"""Where images come from: folders, tables of Hugging Face ``datasets``, streams, timm and torch datasets, arrays.

Each becomes an ``ImageSource`` (random access) or an ``ImageStream`` (in order only). Both give PIL images with an
integer label, -1 where there is none, and can say of every image where it was found, so that an error names the file.
``datasets`` is imported only where it is used.
"""

import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..errors import DataError

# The first name that is there wins; a single column of the right type wins over all names.
IMAGE_COLUMNS = ("img", "image", "images", "jpg", "jpeg", "png", "webp")
LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "targets", "class", "cls", "y")
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev", "eval"),
    "test": ("test", "testing"),
}


# What PIL raises for damaged files: OSError for truncated data, SyntaxError for PNG chunks …
_PIL_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class UnreadableImageError(DataError):
    """An image that can't be opened, by the name of its file or row."""

    def __init__(self, message: str):
        # torch re-raises a worker's error as type(text with the whole traceback); the user gets the one line again.
        marker = f"{type(self).__name__}: "
        if "Traceback (most recent call last)" in message and marker in message:
            message = message.rsplit(marker, 1)[1].strip().splitlines()[0]
        super().__init__(message)


class Images(Protocol):
    """Random access: ``read([3, 7])`` gives two (image, label) pairs, ``place(3)`` tells where the fourth is."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[tuple[Image.Image, int]]: ...

    def place(self, index: int) -> str: ...


@dataclass(frozen=True)
class ImageSource:
    """Images with random access.

    Attributes:
        name: what the user called it, with the split.
        images: the images themselves.
        labels: all labels, where they are known before the images are read.
        class_names: in the order of the labels, where they are known.
        has_labels: False if every label is -1.
    """

    name: str
    images: Images
    labels: np.ndarray | None = None
    class_names: tuple[str, ...] | None = None
    has_labels: bool = True

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class ImageStream:
    """Images that come in order only, from a streamed dataset of ``datasets``.

    Attributes:
        name: what the user called it, with the split.
        dataset: the ``datasets.IterableDataset``, images not decoded.
        image_column, label_column: where image and label are; None for no labels.
        class_names: in the order of the labels, where they are known.
    """

    name: str
    dataset: Any
    image_column: str
    label_column: str | None
    class_names: tuple[str, ...] | None = None

    @property
    def has_labels(self) -> bool:
        return self.label_column is not None

    def rows(self) -> Iterator[tuple[Any, int]]:
        """The undecoded image and the label of each row, the same in every worker process."""
        # Iterating the dataset itself in a DataLoader worker gives each worker other shards; iter() does not.
        for batch in self.dataset.iter(batch_size=16):
            labels = batch[self.label_column] if self.label_column else [-1] * len(batch[self.image_column])
            yield from zip(batch[self.image_column], labels, strict=True)


@dataclass(frozen=True)
class FolderImages:
    """Image files by their paths."""

    paths: tuple[str, ...]
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Sequence[int]) -> list[tuple[Image.Image, int]]:
        return [(decode(self.paths[index], self.place(index)), label_of(self, index)) for index in indices]

    def place(self, index: int) -> str:
        return self.paths[index]


@dataclass(frozen=True)
class TableImages:
    """The image column of a ``datasets.Dataset``, not decoded."""

    name: str
    dataset: Any
    column: str
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Sequence[int]) -> list[tuple[Image.Image, int]]:
        read = []
        for index, value in zip(indices, self.dataset[list(map(int, indices))][self.column], strict=True):
            path = value.get("path") if isinstance(value, dict) else None
            place = f"{path} ({self.place(index)})" if path else self.place(index)
            read.append((decode(value, place), label_of(self, index)))
        return read

    def place(self, index: int) -> str:
        return f"row {index} of {self.name}, column {self.column!r}"


@dataclass(frozen=True)
class PairImages:
    """A torch, torchvision or timm dataset of (image, label) pairs, without a transform of its own."""

    name: str
    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Sequence[int]) -> list[tuple[Image.Image, int]]:
        read = []
        for index in indices:
            try:
                value, label = self.dataset[int(index)][:2]
            except _PIL_ERRORS as error:
                raise UnreadableImageError(f"can't read {self.place(index)}: {error}") from error
            read.append((decode(value, self.place(index)), -1 if label is None else int(label)))
        return read

    def place(self, index: int) -> str:
        return f"image {index} of {self.name}"


@dataclass(frozen=True)
class ArrayImages:
    """A uint8 array [n, height, width] or [n, height, width, channels] in memory."""

    pixels: np.ndarray
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Sequence[int]) -> list[tuple[Image.Image, int]]:
        pixels = self.pixels[..., 0] if self.pixels.shape[3:] == (1,) else self.pixels
        return [(Image.fromarray(pixels[index]), label_of(self, index)) for index in indices]

    def place(self, index: int) -> str:
        return f"image {index} of the array"


@dataclass(frozen=True)
class ListImages:
    """PIL images, or paths of image files, in a list."""

    items: Sequence[Any]
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.items)

    def read(self, indices: Sequence[int]) -> list[tuple[Image.Image, int]]:
        return [(decode(self.items[index], self.place(index)), label_of(self, index)) for index in indices]

    def place(self, index: int) -> str:
        item = self.items[index]
        return str(item) if isinstance(item, str | os.PathLike) else f"image {index} of the list"


def label_of(images: Any, index: int) -> int:
    return -1 if images.labels is None else int(images.labels[index])


def decode(value: Any, place: str) -> Image.Image:
    """A loaded PIL image from whatever a source holds: path, bytes, array, PIL image, or ``datasets``' own dict."""
    try:
        if isinstance(value, dict):
            if value.get("bytes") is None and value.get("path") and not os.path.exists(value["path"]):
                from datasets import Image as ImageFeature

                value = ImageFeature().decode_example(value)  # a remote path of a streamed dataset
            else:
                value = value["bytes"] if value.get("bytes") is not None else value["path"]
        if isinstance(value, bytes):
            value = io.BytesIO(value)
        if isinstance(value, np.ndarray):
            value = Image.fromarray(value)
        if not isinstance(value, Image.Image | str | os.PathLike) and not hasattr(value, "read"):
            kinds = "a PIL image, path, bytes or array; a table's column is named with image_column=…"
            raise UnreadableImageError(f"{place} holds {type(value).__name__}, not {kinds}")
        image = value if isinstance(value, Image.Image) else Image.open(value)
        image.load()
        return image
    except UnreadableImageError:
        raise
    except PermissionError as error:
        raise UnreadableImageError(f"no permission to read {place}") from error
    except FileNotFoundError as error:
        raise UnreadableImageError(f"{place} is no longer there") from error
    except UnidentifiedImageError as error:
        raise UnreadableImageError(f"{place} is not an image, or is damaged; remove or replace it") from error
    except (*_PIL_ERRORS, TypeError, KeyError, AttributeError) as error:
        raise UnreadableImageError(f"can't read {place}: {error}; remove or replace it") from error


def choose_split(available: Sequence[str], asked: str | None, training: bool, name: str) -> str:
    """The split to use: the one that was asked for, under any of its usual names, or the natural one.

    Training takes the training split, anything else validation, then test, then training.

    Example:
        >>> choose_split(["train", "validation"], None, training=False, name="flowers")
        'validation'
        >>> choose_split(["train", "val"], "validation[:100]", training=False, name="flowers")
        'val[:100]'
    """
    if asked is None:
        order = ("train",) if training else ("validation", "test", "train")
        for kind in order:
            for synonym in SPLITS[kind]:
                if synonym in available:
                    return synonym
        if len(available) == 1:
            return available[0]
        raise DataError(f"{name} has the splits {', '.join(available)}: choose one with split=…")

    def find(match: re.Match) -> str:
        for synonyms in ((match[0],), *(s for s in SPLITS.values() if match[0] in s)):
            for synonym in synonyms:
                if synonym in available:
                    return synonym
        raise DataError(f"{name} has no split {match[0]!r}; it has {', '.join(available) or 'none'}")

    return re.sub(r"(?:(?<=^)|(?<=\+))[^\[\]+]+", find, asked)


def choose_column(features: dict[str, Any], asked: str | None, kind: str, name: str) -> str | None:
    """The column with the images (``kind="image"``) or labels (``"label"``) of a table; None for no labels."""
    if asked is not None:
        if asked not in features:
            raise DataError(f"{name} has no column {asked!r} for the {kind}s; it has {', '.join(features) or 'none'}")
        return asked
    names, type_name = (IMAGE_COLUMNS, "Image") if kind == "image" else (LABEL_COLUMNS, "ClassLabel")
    typed = [column for column, feature in features.items() if type(feature).__name__ == type_name]
    if len(typed) == 1:
        return typed[0]
    for column in names:
        if column in (typed or features):
            return column
    if kind == "label" and not typed:
        return None
    what = f"{len(typed)} {kind} columns ({', '.join(typed)})" if typed else f"no {kind} column"
    raise DataError(f"{name} has {what}; name one with {kind}_column=… out of {', '.join(features) or 'none'}")
