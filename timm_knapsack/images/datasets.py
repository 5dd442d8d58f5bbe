"""The torch datasets behind every loader: a sample is a function of (seed, epoch, index), wherever it is computed."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..errors import DataError
from .augmentation import SMALL, Transform
from .sampling import Draw, sample_keys
from .sources import ArrayImages, ImageSource, ImageStream, UnreadableImageError, decode

MAX_BYTES_IN_MEMORY = 2**30


class ImageDataset(Dataset):
    """Images with random access, transformed; asked for by draws ``(epoch, index)``, or by a bare index for epoch 0.

    Attributes:
        indices: where in the source each image is; fewer than all under ``limit``.
        pixels: all images as uint8 [n, channels, height, width], if they are kept in memory.
    """

    def __init__(
        self,
        source: ImageSource,
        transform: Transform,
        *,
        seed: int = 0,
        limit: int | None = None,
        skip: int = 0,
        in_memory: bool | None = None,
        num_classes: int = 0,
    ):
        self.source = source
        self.transform = transform
        self.seed = seed
        self.num_classes = num_classes
        self.has_labels = source.has_labels
        self.class_names = source.class_names
        count = len(source)
        self.indices = np.arange(count)
        if skip >= count:
            raise DataError(f"{source.name} has {count} images, and {skip} of them are used elsewhere: none are left")
        end = count if limit is None else min(skip + limit, count)
        if skip or end < count:
            generator = torch.Generator().manual_seed(int(sample_keys(seed, -1, 0)) >> 1)  # no epoch
            self.indices = np.sort(torch.randperm(count, generator=generator)[skip:end].numpy())
        self.description = f"{source.name}, {len(self.indices)} images"
        self.pixels, self._labels = None, None
        if in_memory is not False:
            self._keep_in_memory(force=bool(in_memory))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, draw: Draw | int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[Draw | int]) -> list[tuple[torch.Tensor, int]]:
        pairs = np.array([draw if isinstance(draw, tuple) else (0, draw) for draw in draws])
        keys = np.empty(len(pairs), dtype=np.uint64)
        for epoch in np.unique(pairs[:, 0]):  # one, as a rule
            chosen = pairs[:, 0] == epoch
            keys[chosen] = sample_keys(self.seed, int(epoch), self.indices[pairs[chosen, 1]])
        positions = pairs[:, 1]
        if self.pixels is not None:
            labels = self._labels[positions].tolist()
            if self.transform.takes_pixels(*self.pixels.shape[2:]):
                return list(zip(self.transform.pixels(self.pixels[positions], keys), labels, strict=True))
            channels_last = np.ascontiguousarray(self.pixels[positions].transpose(0, 2, 3, 1))
            read = [image for image, _ in ArrayImages(channels_last, None).read(range(len(positions)))]
        else:
            read, labels = zip(*self._read(positions), strict=True)
        return list(zip(self.transform.images(read, keys), labels, strict=True))

    def _read(self, positions: Sequence[int]) -> list[tuple[Image.Image, int]]:
        indices = self.indices[np.asarray(positions)]
        mode = self.transform.preprocessing.mode
        read = []
        for index, (image, label) in zip(indices, self.source.images.read(indices), strict=True):
            if not self.has_labels:
                label = -1
            elif label < 0 or (self.num_classes and label >= self.num_classes):
                raise UnreadableImageError(outside(label, self.num_classes, self.source.images.place(index)))
            read.append((image if image.mode == mode else image.convert(mode), label))
        return read

    def _keep_in_memory(self, force: bool) -> None:
        """Decode everything once, if it is small, or if asked to; images of several sizes stay where they are."""
        width, height = self._read([0])[0][0].size
        shape = (len(self), self.transform.preprocessing.input_size[0], height, width)
        if not force and (max(height, width) > SMALL or np.prod(shape, dtype=np.int64) > MAX_BYTES_IN_MEMORY):
            return
        pixels = np.empty(shape, dtype=np.uint8)
        labels = np.empty(len(self), dtype=np.int64)
        for start in range(0, len(self), 256):
            for position, (image, label) in enumerate(self._read(range(start, min(start + 256, len(self)))), start):
                if image.size != (width, height):
                    return
                pixels[position] = np.asarray(image).reshape(height, width, -1).transpose(2, 0, 1)
                labels[position] = label
        self.pixels, self._labels = pixels, labels


class StreamDataset(IterableDataset):
    """A streamed table, transformed. Its place in the stream is what an image's random numbers belong to.

    * ``limit`` takes the first rows, and shuffling mixes only ``shuffle_buffer`` rows at a time.
    * Each worker reads the whole stream, undecoded, and decodes only its own batches: the order does not depend on
      the number of workers, but every worker downloads everything. Prefer few workers, or download the dataset.
    * To resume means to read again what was seen, without decoding it.
    * On several processes Accelerate reads on the first and hands out (``dispatch_batches``, its default for streams).
    """

    def __init__(
        self,
        stream: ImageStream,
        transform: Transform,
        *,
        batch_size: int,
        seed: int = 0,
        limit: int | None = None,
        shuffle_buffer: int = 0,
        num_classes: int = 0,
    ):
        if shuffle_buffer:
            stream = replace(stream, dataset=stream.dataset.shuffle(seed=seed, buffer_size=shuffle_buffer))
        self.stream = stream
        self.transform = transform
        self.seed = seed
        self.limit = limit
        self.batch_size = batch_size
        self.num_classes = num_classes
        self.has_labels = stream.has_labels
        self.class_names = stream.class_names
        self.description = f"{stream.name}, streamed"
        self.epoch = 0
        self._start = (0, 0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.stream.dataset.set_epoch(epoch)

    def starting_at(self, epoch: int, count: int) -> "StreamDataset":
        """This stream without the first ``count`` images of ``epoch``; other epochs are whole."""
        other = copy.copy(self)
        other._start = (epoch, count)
        return other

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        start = self._start[1] if self._start[0] == self.epoch else 0
        worker = get_worker_info()
        if worker is not None:
            import fsspec

            fsspec.asyn.reset_lock()  # a lock that was forked with the process would never be released
        for position, (value, label) in enumerate(self.stream.rows()):
            if self.limit is not None and position >= self.limit:
                return
            # DataLoader takes one batch from each worker in turn, so batch n is the work of worker n modulo workers.
            batch = (position - start) // self.batch_size
            if position < start or (worker is not None and batch % worker.num_workers != worker.id):
                continue
            place = f"row {position} of {self.stream.name}"
            image = decode(value, place).convert(self.transform.preprocessing.mode)
            if not self.has_labels:
                label = -1
            elif not isinstance(label, int) or label < 0 or (self.num_classes and label >= self.num_classes):
                text = f"label {label!r} of {place} is no integer; a stream needs numbered labels"
                if isinstance(label, int):
                    text = outside(label, self.num_classes, place)
                raise UnreadableImageError(text)
            yield self.transform.images([image], sample_keys(self.seed, self.epoch, [position]))[0], label


class SyntheticDataset(Dataset):
    """Noise with random labels, a function of (seed, epoch, index); for dry runs."""

    has_labels = True
    class_names = None

    def __init__(self, input_size: tuple[int, int, int], length: int, num_classes: int, seed: int = 0):
        self.input_size = input_size
        self.length = length
        self.num_classes = num_classes
        self.seed = seed
        self.description = f"{length} synthetic images"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, draw: Draw | int) -> tuple[torch.Tensor, int]:
        epoch, index = draw if isinstance(draw, tuple) else (0, draw)
        key = int(sample_keys(self.seed, epoch, index))
        image = torch.randn(self.input_size, generator=torch.Generator().manual_seed(key >> 1))
        return image, key % self.num_classes


def outside(label: int, num_classes: int, place: str) -> str:
    if label < 0:
        return f"label {label} of {place} is negative; classes are numbered from 0 (labels='ignore' does without them)"
    return f"label {label} of {place} is outside 0 … {num_classes - 1}: the model has {num_classes} outputs"
