"""A disk that is full: one line that says so, from every writer, and what was there before is whole."""

import errno
import os
import resource
import signal
import threading
from contextlib import contextmanager

import pytest
import torch

import timm_knapsack as tk
from timm_knapsack.cli.console import one_line
from timm_knapsack.errors import CheckpointError, HubError
from timm_knapsack.slim.tensor_files import write_state, write_tensors
from timm_knapsack.training import checkpoints
from timm_knapsack.training.checkpoints import read_checkpoint, write_checkpoint
from timm_knapsack.values.scores import Scores

import timm  # isort: skip

BIG = {"w": torch.ones(100_000)}


@contextmanager
def files_of_at_most(size: int):
    """The system refuses larger files while they are written, as a full disk does (EFBIG in place of ENOSPC)."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("write", [write_tensors, write_state, lambda path, data: Scores(data).save(path)])
def test_writers_of_tensors_raise_the_systems_error(tmp_path, write):
    write(tmp_path / "file", {"w": torch.ones(3)})
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(OSError) as caught, files_of_at_most(50_000):
        write(tmp_path / "file", BIG)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == before
    caught.value.errno = errno.ENOSPC
    assert one_line(caught.value)[0].startswith(f"the disk is full ({tmp_path / 'file'})")


@pytest.mark.parametrize("part", ["tensors", "optimizer"])
def test_a_checkpoint_on_a_full_disk_is_one_line_and_the_old_one_whole(tmp_path, part):
    write_checkpoint(tmp_path / "last", {"model": {"w": torch.ones(2)}}, {"update": 7}, {"step": torch.tensor(1)})
    new = ({"model": BIG}, {"update": 8}, {}) if part == "tensors" else ({}, {"update": 8}, BIG)
    with pytest.raises(CheckpointError, match="File too large; a former one is still whole") as caught:
        with files_of_at_most(50_000):
            write_checkpoint(tmp_path / "last", *new)
    assert "\n" not in str(caught.value)
    assert read_checkpoint(tmp_path / "last").state["update"] == 7 and os.listdir(tmp_path) == ["last"]


def test_a_model_on_a_full_disk_is_one_line_and_the_old_one_whole(tmp_path):
    model = timm.create_model("knapsack_pruned", channels=tk.ChannelConfig("cifar_resnet20", {}))
    tk.save_pretrained(model, tmp_path / "net", verify=False)
    before = (tmp_path / "net" / "model.safetensors").read_bytes()
    with pytest.raises(HubError, match="File too large; what stood there before is whole"), files_of_at_most(50_000):
        tk.save_pretrained(model, tmp_path / "net", verify=False)
    assert (tmp_path / "net" / "model.safetensors").read_bytes() == before and os.listdir(tmp_path) == ["net"]


def test_two_writers_of_scores_at_once_leave_one_of_them_whole(tmp_path):
    failures = []

    def write(number):
        try:
            for _ in range(10):
                Scores({"a": torch.full((3000,), float(number)).double()}, model=str(number)).save(tmp_path / "s")
                read = Scores.load(tmp_path / "s")
                assert (read["a"] == float(read.model)).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and os.listdir(tmp_path) == ["s"]


def test_scores_are_read_from_one_file_while_another_takes_its_place(tmp_path, monkeypatch):
    """What a file says about itself and its numbers belong together, also where it is replaced in between."""
    first, second = (Scores({"a": torch.full((30,), float(n)).double()}, model=str(n)) for n in (1, 2))
    first.save(tmp_path / "s")
    for home, name in ((torch.UntypedStorage, "from_file"), (torch, "frombuffer")):  # where the numbers come in
        original = getattr(home, name)

        def replaced_before(*args, original=original, **kwargs):
            second.save(tmp_path / "s")
            return original(*args, **kwargs)

        monkeypatch.setattr(home, name, replaced_before)
    read = Scores.load(tmp_path / "s")
    assert read.model == "1" and (read["a"] == 1).all()
    assert Scores.load(tmp_path / "s").model == "2"


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "last", {"model": {"w": torch.ones(2)}}, {"update": 7})

    def replaced_before(file, load=checkpoints.load_file):
        write_checkpoint(tmp_path / "last", {"model": {"w": torch.zeros(2)}}, {"update": 8})
        return load(file)

    monkeypatch.setattr(checkpoints, "load_file", replaced_before)
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        read_checkpoint(tmp_path / "last")
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "last").state["update"] == 8
