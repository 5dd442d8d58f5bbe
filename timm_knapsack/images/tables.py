"""Hugging Face ``datasets``: a Hub id, local parquet files, a Dataset object, or a stream, as images with labels.

``datasets`` is imported on first use only: it takes a second, and most uses of this package don't need it.
"""

import os
import re
import socket
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..errors import DataError
from ..files.paths import named_path
from .sources import ImageSource, ImageStream, TableImages, choose_column, choose_split

TABLE_FILES = (".parquet", ".arrow")
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # of datasets' imagefolder
SAVED_FILES = ("state.json", "dataset_dict.json")  # of Dataset.save_to_disk
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def holds_tables(folder: Path) -> bool:
    """True if ``datasets`` should read this folder, rather than our own scan for image files."""
    if any((folder / name).exists() for name in (*METADATA_FILES, *SAVED_FILES)):
        return True
    return any(next(folder.glob(f"{depth}*{end}"), None) for end in TABLE_FILES for depth in ("", "*/"))


def load_table(
    source: str | Path, *, split: str | None, training: bool, subset: str | None = None, streaming: bool = False
) -> tuple[Any, str]:
    """A ``datasets`` Dataset or IterableDataset of one split, and the name to call it by.

    Args:
        source: Hub id, local folder of tables, or a single parquet or arrow file.
        split: name of a split, which may be sliced (``"train[:10%]"``), or None for the natural one.
        training: what the natural one is.
        subset: the Hub's name for one of several configurations of a dataset.
        streaming: read rows as they are needed; on the Hub, without downloading the whole.
    """
    path = named_path(source, DataError, home=True)
    local = path.exists()
    name = str(path) if local else str(source)
    with _datasets_errors(name, on_hub=not local) as datasets:
        if local and any((path / saved).exists() for saved in SAVED_FILES):
            table = datasets.load_from_disk(str(path))
            return pick_split(table, split, training, name)
        if path.is_file():
            builder = {".parquet": "parquet", ".arrow": "arrow"}[path.suffix]
            arguments = {"path": builder, "data_files": {split or "train": str(path)}}
            return datasets.load_dataset(**arguments, split=split or "train", streaming=streaming), name
        arguments = {"path": name, "name": subset}
        available = datasets.get_dataset_split_names(name, subset)
        split = choose_split(available, split, training, name)
        if streaming and "[" in split:
            raise DataError(f"split={split!r}: a stream can't be sliced; use limit=… for its first images")
        return datasets.load_dataset(**arguments, split=split, streaming=streaming), f"{name}, split {split}"


def pick_split(table: Any, split: str | None, training: bool, name: str) -> tuple[Any, str]:
    """One split of a DatasetDict; a Dataset that is no dict is taken as it is."""
    if not isinstance(table, dict):
        return table, name
    split = choose_split(list(table), split, training, name)
    if split not in table:
        raise DataError(f"split={split!r}: a DatasetDict in memory can't be sliced; use limit=… for fewer images")
    return table[split], f"{name}, split {split}"


def open_table(
    table: Any, name: str, image_column: str | None = None, label_column: str | None = None
) -> ImageSource | ImageStream:
    """Images and labels of a ``datasets`` object; the columns are found by their types and usual names."""
    from datasets import Dataset, IterableDataset
    from datasets import Image as ImageFeature

    if not isinstance(table, Dataset | IterableDataset):
        raise DataError(f"{name}: a {type(table).__name__} of datasets can't be used; give a Dataset or a DatasetDict")
    features = table.features
    if features is None:  # a stream that was mapped, or read from files without a schema
        first = next(iter(table), None)
        features = {} if first is None else dict.fromkeys(first)
    image_column = choose_column(features, image_column, "image", name)
    label_column = choose_column(features, label_column, "label", name)
    if isinstance(features[image_column], ImageFeature):
        # We decode, to be able to say which row is damaged, and to skip rows at no cost.
        table = table.cast_column(image_column, ImageFeature(decode=False))
    class_names = getattr(features[label_column], "names", None) if label_column else None
    class_names = tuple(class_names) if class_names else None
    if isinstance(table, IterableDataset):
        table = table.select_columns([image_column, *([label_column] if label_column else [])])
        return ImageStream(name, table, image_column, label_column, class_names)
    if len(table) == 0:
        raise DataError(f"{name} has no rows")
    labels = None
    if label_column:
        labels = np.asarray(table.select_columns([label_column]).with_format("numpy")[:][label_column])
        labels, class_names = _as_numbers(labels, class_names, f"{name}, column {label_column!r}")
        if (labels == -1).all():  # how the Hub marks a test split whose labels are kept secret
            labels = None
    images = TableImages(name, table.select_columns([image_column]).with_format(None), image_column, labels)
    return ImageSource(name, images, labels, class_names, has_labels=labels is not None)


def _as_numbers(labels: np.ndarray, class_names: tuple[str, ...] | None, place: str):
    if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        return labels.astype(np.int64), class_names
    if labels.ndim == 1 and all(isinstance(label, str) for label in labels):
        names, numbers = np.unique(labels.astype(str), return_inverse=True)
        return numbers.astype(np.int64), tuple(names.tolist())
    kind = type(labels.flat[0]).__name__ if labels.size else labels.dtype
    raise DataError(f"{place}: labels must be integers or class names, one for each image, not {kind}")


@contextmanager
def _datasets_errors(name: str, on_hub: bool):
    """Gives the ``datasets`` module, without bars where stderr is no terminal; its errors become one line."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name} needs the package datasets: pip install datasets ({error})") from error
    quiet = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if quiet:
        datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs before it raises would be said twice
    try:
        with _offline_if_unreachable(datasets) if on_hub else _as_it_is():
            yield datasets
    except DataError:
        raise
    except ConnectionError as error:
        what = f"can't reach {name!r} on the Hugging Face Hub, and there is no such local path"
        raise DataError(f"{what}; go online, or give a local folder") from error
    except PermissionError as error:
        raise DataError(f"no permission to read {error.filename or name}") from error
    except Exception as error:  # datasets and the libraries below it raise many kinds; what to say is in the text
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= 400 else reason[:400] + " …"
        where = " on the Hugging Face Hub, and no such local path" if on_hub else ""
        raise DataError(f"can't load {name!r}{where}: {reason}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if quiet:
            datasets.enable_progress_bars()


@contextmanager
def _as_it_is():
    yield


@contextmanager
def _offline_if_unreachable(datasets):
    """Without a network, tell the Hub client so: it answers at once, from its cache, not after 24 s of retries."""
    from huggingface_hub import constants

    proxies = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    saved = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not any(saved) and not proxies and not _resolves(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = saved


def _resolves(endpoint: str) -> bool:
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, None)
    except OSError:
        return False
    return True
