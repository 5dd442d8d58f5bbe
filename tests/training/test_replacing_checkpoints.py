"""What lies in a checkpoint's folder and is not the checkpoint's is never removed with it."""

import errno
import os

import pytest
import torch

from timm_knapsack.errors import CheckpointError
from timm_knapsack.training.checkpoints import check_replaceable, first_difference, read_checkpoint, write_checkpoint

PARTS = {"model": {"w": torch.ones(2)}}


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "last", PARTS, {"update": 1}, optimizer={"step": 1})


@pytest.mark.parametrize("name", ["mine.safetensors", "ema.safetensors", "model.safetensors.bak", "optimizer.pth"])
def test_a_file_that_the_checkpoint_does_not_list_stays(folder, name):
    (folder / name).write_bytes(b"years of work")
    with pytest.raises(CheckpointError, match=rf"last holds {name}, which .*, so it is not replaced"):
        write_checkpoint(folder, PARTS, {"update": 2})
    assert (folder / name).read_bytes() == b"years of work"
    assert read_checkpoint(folder).state == {"format": "timm-knapsack/checkpoint", "version": 1, "update": 1}
    (folder / name).unlink()
    assert read_checkpoint(write_checkpoint(folder, PARTS, {"update": 2})).state["update"] == 2


def test_weights_beside_a_state_that_is_damaged_stay(folder):
    text = (folder / "state.json").read_text()
    for damaged in (text[:-20], text.replace('"files"', '"flies"'), "[]", '{"files": {}}'):
        (folder / "state.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="last is no checkpoint of timm-knapsack"):
            check_replaceable(folder)


def test_a_checkpoint_of_another_version_and_an_empty_folder_are_replaced(folder, tmp_path):
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"version": 1', '"version": 2'))
    (tmp_path / "empty").mkdir()
    for path in (folder, tmp_path / "empty", tmp_path / "new"):
        assert read_checkpoint(write_checkpoint(path, PARTS, {"update": 3})).state["update"] == 3


def test_a_disk_that_is_full_is_said_in_the_systems_words(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("timm_knapsack.training.checkpoints.write_tensors", full)
    with pytest.raises(CheckpointError, match=r"last: No space left on device; a former one is still whole$"):
        write_checkpoint(tmp_path / "last", PARTS, {})
    with pytest.raises(CheckpointError, match=r"last: .* is not JSON serializable; a former one is still whole$"):
        write_checkpoint(tmp_path / "other" / "last", {}, {"loss": object()})


def test_where_two_states_differ_first():
    saved, now = {"lr": 1, "args": {"a": 1, "b": 2}}, {"lr": 1, "args": {"a": 1}, "more": 3}
    assert first_difference(saved, now) == "args.b is 2 in the checkpoint and missing now"
    assert first_difference(now, saved) == "args.b is not in the checkpoint and 2 now"
    assert first_difference({"lr": 1}, now, "config") == "config.args is not in the checkpoint and {'a': 1} now"
    assert first_difference({"lr": 1}, {"lr": 2}) == "lr is 1 in the checkpoint and 2 now"
    assert first_difference(saved, {**saved}) is None
