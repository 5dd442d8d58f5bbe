"""Order and augmentation depend on (seed, epoch, index) only: resumed = uninterrupted, 1 process = 2, 0 workers = 2."""

import random

import accelerate
import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import RandomSampler

from timm_knapsack.images.loaders import create_loader, synthetic_loader
from timm_knapsack.images.sampling import EpochLoader, EpochSampler, SampleRandomness, resume_at, sample_keys
from timm_knapsack.images.sources import ArrayImages

CONFIG = {"input_size": (3, 16, 16), "crop_pct": 1.0, "num_classes": 10}
HEAVY = {"auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.4, "re_prob": 0.5, "crop": "rrc"}
AUGMENTATIONS = {"vectorised": {}, "timm": HEAVY, "augmix": {"auto_augment": "augmix-m5-w2", "hflip": 0.2}}


@pytest.fixture(autouse=True, scope="module")
def forget_processes():
    """Accelerate remembers its processes for good; tests of other files start with none."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def pixels(count=30, size=16):
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def make(batch_size=4, **options):
    options = {"training": True, "seed": 3, **options}
    return create_loader((pixels(), np.arange(30) % 10), CONFIG, batch_size=batch_size, **options)


def batches(loader, epoch=None):
    if epoch is not None:
        loader.set_epoch(epoch)
    return list(loader)


def same(left, right):
    """True if two lists of (images, labels) are equal to the last bit."""
    return len(left) == len(right) and all(
        torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_the_comparison_can_fail():
    one = batches(make())
    assert same(one, one)
    other = [(images.clone(), labels) for images, labels in one]
    other[3][0][0, 0, 0, 0] += 1e-6
    assert not same(one, other) and not same(one, one[:-1])


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_workers_change_nothing(augmentation):
    loaders = [make(num_workers=workers, augmentation=augmentation) for workers in (0, 2)]
    for epoch in (0, 1):  # twice: the workers are kept from one epoch to the next
        assert same(*(batches(loader, epoch) for loader in loaders))


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_resumed_equals_uninterrupted(augmentation):
    whole = batches(make(augmentation=augmentation), epoch=2)
    assert not same(whole, batches(make(augmentation=augmentation), epoch=1))
    assert not same(whole, batches(make(augmentation=augmentation, seed=4), epoch=2))
    for step in (0, 1, len(whole) - 1, len(whole)):
        torch.manual_seed(step)  # what ran before does not matter
        rest = resume_at(make(augmentation=augmentation), epoch=2, step=step)
        assert len(rest) == len(whole) - step and same(batches(rest), whole[step:])


def test_skipped_images_are_not_read(monkeypatch):
    loader = make(in_memory=False)
    seen, read = [], ArrayImages.read
    monkeypatch.setattr(ArrayImages, "read", lambda self, indices: seen.extend(indices) or read(self, indices))
    batches(resume_at(loader, epoch=0, step=5))
    assert len(seen) == 2 * 4


def prepared(process, processes, batch_size, epoch, step=0, **options):
    """What one of several processes sees, through Accelerate's own sharding."""
    loader = prepare_data_loader(
        make(batch_size, **options),
        num_processes=processes,
        process_index=process,
        put_on_device=False,
        even_batches=options.get("even_batches", True),
    )
    loader.set_epoch(epoch)
    return batches(resume_at(loader, epoch, step) if step else loader)


def joined(shards):
    """Global batches: those of all processes at the same step, one after the other."""
    return [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in zip(*shards, strict=True)]


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_two_processes_see_the_global_batches_of_one(augmentation, step):
    alone = prepared(0, 1, 8, epoch=3, step=step, augmentation=augmentation)
    assert same(alone, batches(make(8, augmentation=augmentation), epoch=3)[step:]) and len(alone) == 3 - step
    shards = [prepared(process, 2, 4, epoch=3, step=step, augmentation=augmentation) for process in (0, 1)]
    assert same(joined(shards), alone)
    assert not same(joined(shards[::-1]), alone)


def test_a_random_sampler_would_not_resume():
    """The property above is the sampler's doing: torch's own sampler fails it."""
    dataset = make().dataset
    loader = EpochLoader(dataset, sampler=RandomSampler(dataset), batch_size=4)
    assert not same(list(loader), list(loader))


def launched(folder):
    AcceleratorState._reset_state(reset_partial_state=True)  # forked: the parent's single process is still known here
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    loader = accelerator.prepare_data_loader(make())
    seen = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        seen.extend(loader)
    seen.extend(resume_at(loader, epoch=1, step=2))
    torch.save(seen, f"{folder}/{accelerator.process_index}.pt")
    evaluation = accelerator.prepare_data_loader(make(training=False, batch_size=8))
    labels = [accelerator.gather_for_metrics(labels) for _, labels in evaluation]
    torch.save(torch.cat(labels), f"{folder}/labels{accelerator.process_index}.pt")


def test_two_real_processes(tmp_path):
    accelerate.debug_launcher(launched, (str(tmp_path),), num_processes=2)
    shards = [torch.load(tmp_path / f"{process}.pt") for process in (0, 1)]
    loader = make(8)
    expected = batches(loader, 0) + batches(loader, 1)
    expected += expected[-1:]
    assert same(joined(shards), expected)
    for process in (0, 1):  # 30 images on 2 processes: nothing counted twice
        assert torch.load(tmp_path / f"labels{process}.pt").tolist() == (np.arange(30) % 10).tolist()


def global_state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_a_loader_leaves_global_random_state_alone(augmentation):
    loader = make(augmentation=augmentation)
    before = global_state()
    batches(loader, 0)
    batches(resume_at(loader, 1, 3))
    assert global_state() == before


def test_randomness_is_restored_after_an_error():
    before = global_state()
    with pytest.raises(RuntimeError), SampleRandomness() as randomness:
        randomness.seed(5)
        raise RuntimeError
    assert global_state() == before


def test_every_image_once_in_an_epoch_and_in_another_order_in_the_next():
    sampler = EpochSampler(100, seed=1)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        draws = list(sampler)
        assert {e for e, _ in draws} == {epoch} and sorted(i for _, i in draws) == list(range(100))
        orders.append([i for _, i in draws])
    assert orders[0] != orders[1] != list(range(100))


@pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_every_epoch_augments_anew(augmentation):
    dataset = make(augmentation=augmentation).dataset
    differ = [not torch.equal(dataset[(0, index)][0], dataset[(1, index)][0]) for index in range(30)]
    assert sum(differ) > 20 and torch.equal(dataset[(1, 4)][0], dataset[(1, 4)][0])


def test_keys_are_spread():
    keys = np.concatenate([sample_keys(seed, epoch, np.arange(1000)) for seed in (0, 1) for epoch in range(5)])
    assert len(np.unique(keys)) == len(keys)
    assert abs(np.unpackbits(keys.view(np.uint8)).mean() - 0.5) < 0.003
    assert sample_keys(0, 0, 5) == sample_keys(0, 0, [4, 5])[1]


def test_order_and_keys_stay_what_they_are():
    """Checkpoints of an earlier version must resume into the same batches."""
    assert [hex(key) for key in sample_keys(1, 2, [3, 4]).tolist()] == ["0x6ae515c1c0ac7e37", "0xc313915189c4ec21"]
    sampler = EpochSampler(8, seed=1)
    sampler.set_epoch(2)
    assert [index for _, index in sampler] == [0, 3, 2, 4, 6, 1, 5, 7]


def test_synthetic_batches():
    loader = synthetic_loader(CONFIG, batch_size=4, batches=3, seed=1)
    first = batches(loader, 0)
    assert len(first) == 3 and first[0][0].shape == (4, 3, 16, 16) and first[0][1].dtype == torch.int64
    assert same(first, batches(synthetic_loader(CONFIG, batch_size=4, batches=3, seed=1), 0))
    assert not same(first, batches(loader, 1))
    assert all(0 <= label < 10 for _, labels in first for label in labels.tolist())
    assert same(batches(resume_at(loader, 0, 1)), first[1:])
