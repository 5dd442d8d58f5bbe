"""A run that was killed, wherever, and resumed ends with the bits of a run that was not."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import timm_knapsack  # noqa: F401  (before timm)
from timm_knapsack.training.checkpoints import read_checkpoint, write_checkpoint
from timm_knapsack.training.distillation import DistillationConfig
from timm_knapsack.training.finetuning import FinetuneConfig, finetune

# ---- a run with randomness from every source ----


class Noisy(Dataset):
    """Augments with Python's, NumPy's and torch's global random numbers, as careless datasets do."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        image = torch.full((3, 8, 8), float(index % 4))
        return image + torch.randn(3, 8, 8) + random.random() + np.random.rand(), index % 4


class Indexed(Dataset):
    """Depends on the epoch and the index only, and says so with ``set_epoch``: it can be skipped."""

    def __init__(self):
        self.epoch, self.reads = 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.reads += 1
        generator = torch.Generator().manual_seed(100 * self.epoch + index)
        return torch.randn(3, 8, 8, generator=generator) + index % 4, index % 4


def network(width, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    layers += [nn.Conv2d(width, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


CONFIG = FinetuneConfig(
    epochs=3,
    optimizer="adamw",
    lr=0.01,
    warmup_epochs=1,
    mixup=0.3,
    cutmix=0.5,
    ema_decay=0.8,
    clip_grad=1.0,
    grad_accumulation=2,
    checkpoint_every=1,
    log_interval=3,
    distillation=DistillationConfig(ikd_at="convs", ikd_weight=1.0),
)


def loaders(kind):
    torch.manual_seed(random.randrange(1000))  # nothing may depend on the global state
    if kind == "list":
        torch.manual_seed(0)
        return [(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])) for _ in range(5)]
    if kind == "image_data":
        from timm_knapsack.images.loaders import synthetic_loader

        return synthetic_loader((3, 8, 8), batch_size=4, batches=5, num_classes=4)
    workers = 2 if kind == "workers" else 0
    generator = torch.Generator() if kind == "generator" else None
    dataset = Indexed() if kind == "indexed" else Noisy()
    return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers, generator=generator)


def train(output, kind="noisy", resume=False, loader=None, config=CONFIG):
    torch.manual_seed(1)
    evaluation = [(torch.randn(6, 3, 8, 8), torch.arange(6) % 4)]
    config = replace(config, output_dir=None if output is None else str(output))
    given = loaders(kind) if loader is None else loader
    return finetune(network(3, 7), network(6, 8), given, evaluation, config, resume=resume)


def everything(result):
    """All numbers that a run leaves behind."""
    tensors = {f"{who}.{k}": v for who in ("student", "model") for k, v in getattr(result, who).state_dict().items()}
    return tensors, [result.history, result.evaluations, result.best_top1, result.updates]


def assert_equal_runs(first, second):
    (tensors, numbers), (other_tensors, other_numbers) = everything(first), everything(second)
    assert tensors.keys() == other_tensors.keys() and numbers == other_numbers
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name


class Stop(BaseException):
    pass


def stop_after(loader, batches):
    """The loader, which raises after a number of batches in all; for DataLoaders through their dataset."""
    count = [0]

    def tick(size=1):
        count[0] += size
        if count[0] > batches:
            raise Stop

    if isinstance(loader, list):

        class Stopping(list):
            def __iter__(self):
                for batch in list.__iter__(self):
                    tick()
                    yield batch

        return Stopping(loader)
    collate = loader.collate_fn

    def stopping(samples):
        tick()
        return collate(samples)

    loader.collate_fn = stopping
    return loader


@pytest.mark.parametrize("kind", ["list", "noisy", "generator", "indexed", "workers", "image_data"])
def test_resumed_equals_uninterrupted(tmp_path, kind):
    whole = train(None, kind)
    if kind == "workers":  # a worker can't stop its parent: end the session after some updates instead
        breaking = {"checkpoint_every": 4}
        partial = train(tmp_path, kind, config=replace(CONFIG, **breaking))
        assert_equal_runs(partial, whole)
        rewind(tmp_path, kind)
    else:
        # 2 batches or 3 to look at the shapes and the data, 5 for the ridge fit, then the middle of the second epoch
        with pytest.raises(Stop):
            train(tmp_path, kind, loader=stop_after(loaders(kind), 16))
    state = read_checkpoint(tmp_path / "last").state
    assert 0 < state["update"] < whole.updates
    loader = loaders(kind)
    resumed = train(tmp_path, kind, resume=True, loader=loader)
    assert_equal_runs(resumed, whole)
    if kind == "indexed":
        remaining = 22 * (3 - state["epoch"]) - 4 * state["batch"]
        assert loader.dataset.reads <= remaining + 22 + 8  # the ridge fit's peek, not the skipped images


def rewind(folder, kind):
    """Leave the checkpoint of an earlier session: train again, and stop it by SIGTERM in the second epoch."""
    shutil.rmtree(folder)
    Path(folder).mkdir()
    loop = sys.modules["timm_knapsack.training.finetuning"]
    record = loop._Run._record

    def terminate(self, values, lr):
        record(self, values, lr)
        if self.update == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "_record", terminate)
        assert train(folder, kind).interrupted


def test_the_comparison_notices_lost_state(tmp_path):
    """Each part of the state, when dropped, changes the end: so the equality above says something."""
    with pytest.raises(Stop):
        train(tmp_path, "list", loader=stop_after(loaders("list"), 14))
    whole = train(None, "list")
    for lost in ("momentum", "ema", "projections", "position"):
        copy = tmp_path.parent / f"{tmp_path.name}-{lost}"
        shutil.copytree(tmp_path, copy)
        checkpoint = read_checkpoint(copy / "last")
        optimizer, state = checkpoint.optimizer, checkpoint.state
        if lost == "momentum":
            for entry in optimizer["optimizer"]["state"].values():
                entry["exp_avg"].zero_()
        elif lost == "position":
            state["batch"] -= 2
            state["update"] -= 1
        else:
            for tensor in checkpoint.tensors[lost].values():
                tensor.zero_()
        write_checkpoint(copy / "last", checkpoint.tensors, state, optimizer)
        with pytest.raises(AssertionError):
            assert_equal_runs(train(copy, "list", resume=True), whole)


# ---- SIGKILL: a process that imports everything once, and forks the runs ----


def digest(result):
    tensors, numbers = everything(result)
    return {name: value.double().flatten().tolist() for name, value in tensors.items()}, numbers


def in_child(work):
    """Run ``work`` in a forked process; returns whether it ended by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def kill_at(folder, operation, count):
    """Train in this process and SIGKILL it at the ``count``-th call of an operation of ``os``."""
    original = getattr(os, operation)

    def call(*args, **kwargs):
        nonlocal count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, operation, call)
    train(folder)


def main(folder):
    import accelerate  # noqa: F401  (once, for all forks)
    import timm.optim
    import timm.scheduler  # noqa: F401

    torch.set_num_threads(1)
    folder = Path(folder)

    def save(result, name):
        (folder / name).write_text(json.dumps(digest(result)))

    assert in_child(lambda: save(train(folder / "whole"), "whole.json"))
    for number, (operation, count) in enumerate([("fsync", 48), ("replace", 9), ("rmdir", 8), ("fsync", 74)]):
        place = folder / f"killed{number}"
        assert not in_child(lambda: kill_at(place, operation, count))  # noqa: B023
        leftovers = sorted(p.name for p in place.iterdir())
        assert in_child(lambda: save(train(place, resume=True), f"{number}.json"))  # noqa: B023
        (folder / f"{number}.leftovers").write_text(" ".join(leftovers))


def test_killed_while_writing_a_checkpoint(tmp_path):
    environment = dict(os.environ)
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for number in range(4):  # each was killed in the middle of a write, with the checkpoint before it in place
        leftovers = (tmp_path / f"{number}.leftovers").read_text()
        assert leftovers.startswith(".last.writing.") and leftovers.endswith(" last"), leftovers
    whole = (tmp_path / "whole.json").read_text()
    assert [(tmp_path / f"{number}.json").read_text() == whole for number in range(4)] == [True] * 4


if __name__ == "__main__":
    main(sys.argv[1])
