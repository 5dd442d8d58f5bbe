"""Folders of image files: one subfolder for each class, or a flat folder of images without labels."""

import os
from pathlib import Path

import numpy as np
from timm.utils.misc import natural_key

from ..errors import DataError
from .sources import SPLITS, FolderImages, ImageSource, choose_split

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def open_folder(folder: Path, split: str | None = None, training: bool = False) -> ImageSource:
    """The images below a folder.

    The class of an image is the name of the folder it lies in; classes are numbered in natural order (2 before 10), as
    timm does. Images that lie directly in the folder have no label. A folder with subfolders ``train`` and ``val`` (or
    ``validation``, ``test``, …) holds splits.

    Args:
        folder: an existing folder.
        split: name of a split, or None to take the natural one.
        training: what the natural one is: the training split, or else validation, test, training.
    """
    splits = find_splits(folder)
    name = str(folder)
    if splits:
        if split is not None and "[" in split:
            raise DataError(f"split={split!r}: a folder's split can't be sliced; use limit=… for fewer images")
        split = choose_split(sorted(splits), split, training, name)
        folder, name = folder / split, f"{name}, split {split}"
    elif split is not None:
        raise DataError(f"{name} has no split {split!r}: it isn't divided into train, validation, …; leave split out")
    return scan_folder(folder, name)


def find_splits(folder: Path) -> list[str]:
    """The subfolders that are splits: all of them if all have a split's name, or if training and another are there.

    One alone may well be a class: trains and buses.
    """
    kinds = {synonym: kind for kind, synonyms in SPLITS.items() for synonym in synonyms}
    subfolders = [entry for entry in entries(folder) if (folder / entry).is_dir() and not entry.startswith(".")]
    splits = [entry for entry in subfolders if entry in kinds]
    found = {kinds[entry] for entry in splits}
    if splits and (len(splits) == len(subfolders) or ("train" in found and len(found) > 1)):
        return splits
    return []


def scan_folder(folder: Path, name: str) -> ImageSource:
    """All images below a folder, sorted, with the classes of their folders."""

    def stop(error: OSError):
        raise _unreadable(Path(error.filename), error)

    found = []
    for root, folders, files in os.walk(folder, followlinks=True, onerror=stop):
        folders[:] = [entry for entry in folders if not entry.startswith(".")]
        label = "" if os.path.samefile(root, folder) else os.path.basename(root)
        images = (file for file in files if file.lower().endswith(EXTENSIONS) and not file.startswith("."))
        found.extend((os.path.join(root, file), label) for file in images)
    if not found:
        raise DataError(f"no images in {name}: looked for {', '.join(EXTENSIONS)} there and in its subfolders")
    found.sort(key=lambda pair: natural_key(pair[0]))
    paths = tuple(path for path, _ in found)
    classes = sorted({label for _, label in found}, key=natural_key)
    if classes == [""]:
        return ImageSource(name, FolderImages(paths, None), has_labels=False)
    if "" in classes:
        flat = sum(label == "" for _, label in found)
        raise DataError(
            f"{name} has {flat} images beside its {len(classes) - 1} class folders; move each image into the folder of "
            "its class, or all into one folder for images without labels"
        )
    numbers = {label: number for number, label in enumerate(classes)}
    labels = np.array([numbers[label] for _, label in found], dtype=np.int64)
    return ImageSource(name, FolderImages(paths, labels), labels, tuple(classes))


def entries(folder: Path) -> list[str]:
    """Names in a folder, sorted; a DataError if it can't be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: OSError) -> DataError:
    if isinstance(error, PermissionError):
        return DataError(f"no permission to read the folder {folder}")
    return DataError(f"can't read the folder {folder}: {error.strerror or error}")
