"""The batches of any epoch from any position, the same in every run: what makes exact resume possible.

Random numbers are derived, not stored. Before each batch is fetched, and again before each training step, all global
generators are seeded from ``(seed, epoch, position, process)``; before each epoch, so is every generator that the
loader owns. A run that starts in the middle therefore draws the same numbers as one that came there by itself. How the
position is reached depends on the loader:

- timm_knapsack's own loaders (``image_data``) skip without reading: their images depend on (seed, epoch, index) only;
- a list of batches is indexed;
- any loader or dataset with ``set_epoch`` promises the same, and is skipped through Accelerate;
- any other ``DataLoader`` or iterable is replayed: the skipped batches are loaded again and thrown away, so that
  augmentation with global random numbers comes out the same. The exception is ``persistent_workers=True``: such workers
  keep their random state from epoch to epoch, and only a dataset without randomness resumes exactly.

On several processes a ``DataLoader`` is sharded by Accelerate (its batch size is per process); any other iterable is
taken to yield global batches, and each process uses its share of the rows.
"""

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..errors import TrainingError
from ..images.sampling import EpochLoader, resume_at
from ..maps.batches import split_batch

_logger = logging.getLogger(__name__)


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from any integers and words, the same on every machine.

    Example:
        >>> derive_seed(0, "step", 1) == derive_seed(0, "step", 1) != derive_seed(0, "step", 2)
        True
    """
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def seed_all(*key: int | str) -> None:
    """Seed Python's, NumPy's and torch's global generators (every device) from a key."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


class EpochBatches:
    """A loader, prepared for this process, that gives the batches of a chosen epoch from a chosen position.

    Args:
        loader: a ``DataLoader``, a list of batches, or any iterable of them: ``(images, labels)`` or dicts.
        accelerator: places batches on the device and divides them among processes.
        seed: of the whole run.
        length: batches of an epoch, where the loader has no length or fewer are wanted.

    Example:
        >>> from accelerate import Accelerator
        >>> batches = EpochBatches([(torch.zeros(2, 1), torch.tensor([0, 1]))] * 3, Accelerator(cpu=True), seed=0)
        >>> len(batches), len(list(batches.epoch(0, start=1)))
        (3, 2)
    """

    def __init__(self, loader: Any, accelerator: Any, seed: int, length: int | None = None):
        self.original = loader
        self.accelerator = accelerator
        self.seed = seed
        self.is_torch = isinstance(loader, DataLoader)
        _give_generator(loader)
        self.loader = accelerator.prepare(loader) if self.is_torch else loader
        self.has_epochs = _has_epochs(loader)
        self.length = _length(self.loader, length)
        if getattr(loader, "persistent_workers", False) and not self.has_epochs:
            _logger.warning("persistent_workers=True: after a resume, random augmentation will differ from this run's")

    def __len__(self) -> int:
        return self.length

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches ``start``, ``start + 1`` … of an epoch, on the device."""
        self._set_epoch(epoch)
        source, index = self._source(epoch, start)
        iterator = iter(source)
        # the first fetch also draws the order, which must not depend on the position or the process
        seed_all(self.seed, "order", epoch)
        try:
            while index < self.length:
                try:
                    batch = next(iterator)
                except StopIteration:
                    raise TrainingError(
                        f"the training loader ended after {index} batches of epoch {epoch}, {self.length} were "
                        "expected; give FinetuneConfig(steps_per_epoch=…) what every epoch can deliver"
                    ) from None
                if index >= start:
                    yield self._own_share(batch)
                index += 1
                seed_all(self.seed, "fetch", epoch, index, self.accelerator.process_index)
        finally:
            if hasattr(source, "end"):  # else Accelerate would take this loader for the one that is being evaluated
                source.end()

    def _source(self, epoch: int, start: int) -> tuple[Any, int]:
        """What to iterate, and the position of its first batch."""
        if not start:
            return self.loader, 0
        if isinstance(self.loader, Sequence):
            return self.loader[start:], start
        if self.is_torch and self.has_epochs:
            if isinstance(self.original, EpochLoader):
                return resume_at(self.loader, epoch, start), start
            from accelerate import skip_first_batches

            rest = skip_first_batches(self.loader, start)
            if hasattr(self.loader, "iteration"):  # prepared: Accelerate before 1.15 starts at epoch 0 again
                rest.iteration = self.loader.iteration
            return rest, start
        return self.loader, 0

    def _set_epoch(self, epoch: int) -> None:
        # Accelerate's set_epoch stops at the sampler where both sampler and dataset have one: reach each ourselves
        for layer in {id(layer): layer for top in (self.original, self.loader) for layer in _layers(top)}.values():
            if callable(getattr(layer, "set_epoch", None)):
                layer.set_epoch(epoch)
            generator = getattr(layer, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(derive_seed(self.seed, "generator", epoch))

    def _own_share(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = split_batch(batch)
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        if not self.is_torch and processes > 1:
            rows, rest = divmod(len(images), processes)
            if rest or not rows:
                raise TrainingError(
                    f"a batch of {len(images)} images can't be shared by {processes} processes equally; "
                    "use a multiple, or a DataLoader"
                )
            images, targets = (part[process * rows : (process + 1) * rows] for part in (images, targets))
        device = self.accelerator.device
        return images.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def _layers(loader: Any) -> Iterator[Any]:
    """A loader and everything below it that may own an epoch or a generator."""
    waiting, seen = [loader], set()
    while waiting:
        layer = waiting.pop()
        if layer is None or id(layer) in seen or isinstance(layer, (list, tuple)):
            continue
        seen.add(id(layer))
        yield layer
        if isinstance(layer, (DataLoader, torch.utils.data.Sampler)) or hasattr(layer, "batch_sampler"):
            names = ("dataset", "sampler", "batch_sampler", "base_dataloader")
            waiting.extend(getattr(layer, name, None) for name in names)


def _give_generator(loader: Any) -> None:
    """Let a plain shuffling sampler have a generator of its own, as Accelerate does on several processes only: without
    one the order on one process would be drawn differently from that on two."""
    for layer in _layers(loader):
        if isinstance(layer, torch.utils.data.RandomSampler) and layer.generator is None:
            layer.generator = torch.Generator()


def _has_epochs(loader: Any) -> bool:
    return hasattr(loader, "set_epoch") or hasattr(getattr(loader, "dataset", None), "set_epoch")


def _length(loader: Any, length: int | None) -> int:
    try:
        available = len(loader)
    except TypeError:
        if length is None:
            raise TrainingError(
                "the training loader has no length (a stream?): say FinetuneConfig(steps_per_epoch=…)"
            ) from None
        return length
    if not available:
        raise TrainingError("the training loader is empty; check the dataset, or drop_last with a small one")
    if length is not None and length > available:
        raise TrainingError(f"steps_per_epoch is {length}, but an epoch of the training loader has {available} batches")
    return length or available
