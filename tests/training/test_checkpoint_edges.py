"""Checkpoints: what their state.json says, byte by byte, and each way in which one is refused."""

import json
import os
import zlib

import pytest
import torch

from timm_knapsack.errors import CheckpointError
from timm_knapsack.training import checkpoints
from timm_knapsack.training.checkpoints import check_replaceable, first_difference, read_checkpoint, write_checkpoint


@pytest.fixture
def folder(tmp_path):
    tensors = {"model": {"w": torch.arange(3.0)}, "best": {"w": torch.ones(2)}}
    return write_checkpoint(tmp_path / "last", tensors, {"update": 7}, {"step": torch.tensor(3)})


def edit(folder, change):
    state = json.loads((folder / "state.json").read_text())
    state = change(state) or state
    (folder / "state.json").write_text(json.dumps(state))


def test_the_state_lists_every_file_with_size_and_crc(folder):
    """So that another version reads it, too."""
    state = json.loads((folder / "state.json").read_text())
    files = {"model.safetensors", "best.safetensors", "optimizer.pt"}
    assert set(os.listdir(folder)) == {*files, "state.json"} and set(state) == {"format", "version", "files", "update"}
    assert (state["format"], state["version"], state["update"]) == ("timm-knapsack/checkpoint", 1, 7)
    expected = {n: (folder / n).read_bytes() for n in files}
    assert state["files"] == {n: {"bytes": len(data), "crc32": zlib.crc32(data)} for n, data in expected.items()}
    read = read_checkpoint(folder)
    assert read.path == folder and read.optimizer == {"step": torch.tensor(3)} and read.state["update"] == 7
    assert {part: list(named) for part, named in read.tensors.items()} == {"model": ["w"], "best": ["w"]}
    assert torch.equal(read.tensors["model"]["w"], torch.arange(3.0)) and "files" not in read.state


def test_a_large_file_is_summed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_READ_BLOCK", 7)
    (tmp_path / "file").write_bytes(bytes(range(100)))
    expected = {"bytes": 100, "crc32": zlib.crc32(bytes(range(100)))}
    assert checkpoints._fingerprint(tmp_path / "file") == expected
    (tmp_path / "file").write_bytes(b"")
    assert checkpoints._fingerprint(tmp_path / "file") == {"bytes": 0, "crc32": 0}


def test_without_an_optimiser_there_is_none(tmp_path):
    path = write_checkpoint(tmp_path / "last", {}, {"update": 0})
    assert os.listdir(path) == ["state.json"] and read_checkpoint(path).optimizer is None
    path = write_checkpoint(tmp_path / "last", {}, {"update": 0}, {})
    assert sorted(os.listdir(path)) == ["optimizer.pt", "state.json"] and read_checkpoint(path).optimizer == {}
    assert sorted(os.listdir(write_checkpoint(path, {}, {}))) == ["state.json"]  # nothing of the old one stays


REFUSED = {
    "no state": (lambda f: (f / "state.json").unlink(), "state.json can't be read: No such file"),
    "another format": (lambda f: edit(f, lambda s: s.update(format="x")), "is not a checkpoint of timm-knapsack"),
    "another version": (lambda f: edit(f, lambda s: s.update(version=2)), "has version 2, this .* reads 1"),
    "a list": (lambda f: edit(f, lambda s: [s]), "is not a checkpoint of timm-knapsack"),
    "no files": (lambda f: edit(f, lambda s: s.pop("files") and None), "state.json lists no files"),
    "files in a list": (lambda f: edit(f, lambda s: s.update(files=[])), "state.json lists no files"),
    "a path": (lambda f: edit(f, lambda s: s["files"].update({"../a.safetensors": {}})), r"lists the file '../a.safe"),
    "another kind of file": (lambda f: edit(f, lambda s: s["files"].update({"a.bin": {}})), "lists the file 'a.bin'"),
    "a file is gone": (lambda f: (f / "best.safetensors").unlink(), "best.safetensors is missing; the checkpoint is"),
    "a bit": (lambda f: flip(f / "best.safetensors"), "best.safetensors is not what was written"),
    "another size": (lambda f: edit(f, lambda s: s["files"]["best.safetensors"].update(bytes=1)), "is not what was"),
}


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", REFUSED)
def test_each_way_to_be_none_is_said(folder, name):
    damage, words = REFUSED[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_one_that_is_replaced_while_it_is_read_is_not_half_of_each(folder, monkeypatch):
    load_file = checkpoints.load_file

    def slow(file):
        edit(folder, lambda state: state.update(update=8))
        return load_file(file)

    monkeypatch.setattr(checkpoints, "load_file", slow)
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["mine.txt", "a.safetensors", "inner"])
def test_what_is_no_part_of_a_checkpoint_is_named(folder, name):
    if name == "inner":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("mine")
    for attempt in (check_replaceable, lambda path: write_checkpoint(path, {}, {})):
        with pytest.raises(CheckpointError, match=f"holds {name}, which (no checkpoint has|its state.json does not)"):
            attempt(folder)
    assert (folder / name).exists()


@pytest.mark.parametrize("state", ['[]', '{"format": "x", "files": {}}', '{"format": "timm-knapsack/checkpoint"}',
                                   '{"format": "timm-knapsack/checkpoint", "files": []}', "3", "{"])  # fmt: skip
def test_a_folder_that_does_not_say_it_is_one_is_not_replaced(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(CheckpointError, match="does not say so"):
        check_replaceable(tmp_path)


def test_what_may_be_replaced(folder, tmp_path):
    check_replaceable(folder)
    check_replaceable(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty")
    os.symlink("nowhere", tmp_path / "dangling")
    (tmp_path / "file").touch()
    for name in ("dangling", "file"):
        with pytest.raises(CheckpointError, match="is a file, expected a folder"):
            check_replaceable(tmp_path / name)
    edit(folder, lambda state: state.update(version=99))  # a later version's
    check_replaceable(folder)


@pytest.mark.parametrize(
    "saved, now, words",
    [
        ({}, {}, None),
        ({"a": [1, 2]}, {"a": [1, 2]}, None),
        ({"a": 1}, {"a": 2}, "c.a is 1 in the checkpoint and 2 now"),
        ({"a": 1}, {}, "c.a is 1 in the checkpoint and missing now"),
        ({}, {"a": 1}, "c.a is not in the checkpoint and 1 now"),
        ({"a": {"b": 1}}, {"a": {"b": 1, "d": None}}, "c.a.d is not in the checkpoint and None now"),
        ({"a": {"b": 1}}, {"a": 3}, "c.a is {'b': 1} in the checkpoint and 3 now"),
        (3, {"a": 1}, "c is 3 in the checkpoint and {'a': 1} now"),
        ({"a": 1, "b": 1}, {"b": 2, "a": 2}, "c.a is 1 in the checkpoint and 2 now"),
    ],
)
def test_first_differences(saved, now, words):
    assert first_difference(saved, now, "c") == words
