"""Which image comes when, and with which random numbers: a pure function of (seed, epoch, index).

A draw is the pair ``(epoch, index)``. The sampler hands out draws, not bare indices, so the epoch reaches every worker
process with the request itself: nothing has to be told to a worker, and no state can be stale. What follows:

* The order of an epoch, and what augmentation does to each of its images, depend neither on the number of workers or
  processes nor on what ran before.
* A run that stopped after ``step`` steps of an epoch goes on with ``resume_at(loader, epoch, step)``. It sees exactly
  the batches that it would have seen; the images that are skipped are not read.
* Iterating a loader leaves Python's, NumPy's and torch's global random state as it was, so dropout and mixup of the
  training process do not depend on the loader, or on how often it was started.

With Accelerate, prepare the loader with the default ``split_batches=False``. Global step ``s`` of ``p`` processes with
``batch_size=b`` is then batches ``s * p … s * p + p - 1``, which are the images of step ``s`` of one process with
``batch_size = p * b``, in the same order, process after process. With ``drop_last=True`` (the default of training
loaders) the number of steps is the same too. Without it the last step may be incomplete, and Accelerate fills it with
images from the start of the epoch (``even_batches``), so that some are seen twice on several processes: evaluate with
``gather_for_metrics``, which cuts them off again, or prepare with ``even_batches=False``.
"""

import copy
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

Draw = tuple[int, int]  # (epoch, index)

_MASK = (1 << 64) - 1


def sample_keys(seed: int, epoch: int, indices) -> np.ndarray:
    """A 64-bit key for each (seed, epoch, index), well mixed: splitmix64, the same on every machine.

    Example:
        >>> sample_keys(0, 0, [0, 1]) == sample_keys(0, 0, [0, 1, 2])[:2]
        array([ True,  True])
        >>> int(sample_keys(0, 0, 1)) == int(sample_keys(0, 1, 0))
        False
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is what is meant
        start = _mix(_mix(np.uint64(seed & _MASK)) + np.uint64(epoch & _MASK))
        return _mix(start + np.asarray(indices).astype(np.uint64))


def _mix(x):
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleRandomness:
    """Inside it, ``seed(key)`` sets all three global generators; leaving it puts back what they were.

    timm's transforms draw from ``random``, ``numpy.random`` and torch, all of them global. Saving and restoring costs
    0.2 ms, which is why it is done for a whole batch of samples at a time.

    Example:
        >>> before = torch.get_rng_state()
        >>> with SampleRandomness() as randomness:
        ...     randomness.seed(7)
        ...     first = torch.rand(())
        ...     randomness.seed(7)
        ...     second = torch.rand(())
        >>> bool(first == second), torch.equal(before, torch.get_rng_state())
        (True, True)
    """

    def __enter__(self) -> "SampleRandomness":
        self._saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
        return self

    def __exit__(self, *_) -> None:
        python, numpy, torch_state = self._saved
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)

    def seed(self, key: int) -> None:
        random.seed(int(key))
        np.random.seed(int(key) & 0xFFFFFFFF)
        torch.default_generator.manual_seed(int(key) >> 1)  # torch.manual_seed would reset CUDA's generators too


class EpochSampler(Sampler[Draw]):
    """Yields ``(epoch, index)`` for every index, in an order given by (seed, epoch) alone.

    It does not move on by itself: call ``set_epoch`` before each epoch, on the loader or, once it is prepared by
    Accelerate, on the prepared loader.

    Example:
        >>> sampler = EpochSampler(3, shuffle=False)
        >>> sampler.set_epoch(5)
        >>> list(sampler)
        [(5, 0), (5, 1), (5, 2)]
    """

    def __init__(self, length: int, *, seed: int = 0, shuffle: bool = True):
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Draw]:
        epoch = self.epoch  # a loop that calls set_epoch while workers prefetch must not mix two epochs
        if self.shuffle:
            key = int(sample_keys(self.seed, epoch, 0)) >> 1
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(key)).tolist()
        else:
            order = range(self.length)
        return ((epoch, index) for index in order)


class EpochLoader(DataLoader):
    """A torch DataLoader of ``(images, labels)`` whose epochs can be chosen and resumed.

    What it knows about its data (``has_labels``, ``class_names``, ``description``) it asks of its dataset; a loader
    that Accelerate has prepared is another object, but has the same ``dataset``.
    """

    def __init__(self, dataset, **kwargs):
        # Its own generator: DataLoader draws a seed for its workers each time it is started, and would take it from
        # the global generator, so that a resumed run's dropout would differ from an uninterrupted run's.
        super().__init__(dataset, generator=torch.Generator(), **kwargs)

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.dataset, IterableDataset):
            self.dataset.set_epoch(epoch)
        else:
            epoch_sampler(self).set_epoch(epoch)

    @property
    def has_labels(self) -> bool:
        """False if every label is -1, because the data has none."""
        return self.dataset.has_labels

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.dataset.class_names

    @property
    def description(self) -> str:
        return self.dataset.description


def epoch_sampler(loader: DataLoader) -> EpochSampler | None:
    """The EpochSampler below a loader, through whatever Accelerate has wrapped around it; None if there is none."""
    layer = loader.batch_sampler
    while layer is not None and not isinstance(layer, EpochSampler):
        layer = getattr(layer, "batch_sampler", None) or getattr(layer, "sampler", None)
    return layer


def resume_at(loader: DataLoader, epoch: int, step: int = 0) -> DataLoader:
    """A loader for the rest of ``epoch`` after ``step`` steps, to be iterated once.

    For the next epoch go back to ``loader`` itself, and call its ``set_epoch``. A streamed dataset has to read its way
    to the place, but decodes nothing of what it skips.

    Args:
        loader: what ``create_loader`` gave, or what ``accelerator.prepare`` made of it.
        epoch: the epoch that was interrupted.
        step: how many steps of it are done; on several processes, how many each process has done.

    Example:
        >>> from timm_knapsack.images.loaders import synthetic_loader
        >>> loader = synthetic_loader((3, 8, 8), batch_size=2, batches=4, num_classes=10)
        >>> whole = [labels.tolist() for _, labels in loader]
        >>> [labels.tolist() for _, labels in resume_at(loader, epoch=0, step=1)] == whole[1:]
        True
    """
    loader.set_epoch(epoch)
    prepared = not isinstance(loader, EpochLoader)
    if step == 0:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return _resume_stream(loader, epoch, step)
    if prepared:
        from accelerate import skip_first_batches

        rest = skip_first_batches(loader, step)
        rest.iteration = loader.iteration  # Accelerate before 1.15 starts at epoch 0 again
        return rest
    from accelerate.data_loader import SkipBatchSampler

    rest = SkipBatchSampler(loader.batch_sampler, skip_batches=step)
    return EpochLoader(loader.dataset, batch_sampler=rest, **_settings(loader))


def _resume_stream(loader: DataLoader, epoch: int, step: int) -> DataLoader:
    prepared = not isinstance(loader, EpochLoader)
    processes = 1
    if prepared and not getattr(loader, "split_batches", False):
        from accelerate import PartialState

        processes = PartialState().num_processes
    dataset = loader.dataset
    if hasattr(dataset, "starting_at"):
        dataset = dataset.starting_at(epoch, step * processes * dataset.batch_size)
    else:  # Accelerate's IterableDatasetShard, with dispatch_batches=False
        dataset = copy.copy(dataset)
        dataset.dataset = dataset.dataset.starting_at(epoch, step * processes * dataset.dataset.batch_size)
    settings = {**_settings(loader), "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not prepared:
        return EpochLoader(dataset, **settings)
    # The same prepared loader around another DataLoader. Accelerate's own skipping would decode what it skips, and a
    # start that is noted in the shared dataset would still be there when the epoch is run again.
    rest = object.__new__(type(loader))
    rest.__dict__.update(loader.__dict__)
    rest.base_dataloader = DataLoader(dataset, **settings)
    return rest


def _settings(loader: DataLoader) -> dict:
    return {name: getattr(loader, name) for name in ("num_workers", "collate_fn", "pin_memory")}
