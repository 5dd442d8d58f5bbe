"""The checkpoint folder: whole or not there, read only where it is what was written, and nothing else is replaced."""

import json
import os
import zlib

import pytest
import safetensors.torch
import torch

import timm_knapsack  # noqa: F401  (before timm)
from timm_knapsack.errors import CheckpointError
from timm_knapsack.files import atomic
from timm_knapsack.files.atomic import settle
from timm_knapsack.training.checkpoints import check_replaceable, first_difference, read_checkpoint, write_checkpoint


class Stop(BaseException):
    pass


def write(path, value, **more):
    tensors = {"model": {"w": torch.full((50,), float(value))}, "ema": {"w": torch.full((3,), float(value))}}
    write_checkpoint(path, tensors, {"value": value, **more}, {"state": {0: {"step": torch.tensor(float(value))}}})


@pytest.mark.parametrize("one_call", [True, False], ids=["exchange", "renames"])
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_whole(tmp_path, one_call, monkeypatch):
    """Every call that touches the disk is made to fail once; in between the reader always finds a whole checkpoint."""
    if not one_call:  # as on a system without renameat2
        monkeypatch.setattr(atomic, "_exchange", atomic._exchange_by_renames)
    points, outcomes = 0, set()
    while True:
        folder = tmp_path / str(points)
        write(folder / "last", 1)
        calls = [0]

        def counted(function, limit=points, calls=calls):
            def call(*args, **kwargs):
                if calls[0] == limit:
                    raise Stop  # not an Exception: as final as a kill
                calls[0] += 1
                return function(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            places = [(os, name) for name in ("rename", "replace", "fsync", "rmdir", "unlink", "mkdir", "chmod")]
            for home, name in [*places, (atomic, "_exchange"), (safetensors.torch, "save_file"), (torch, "save")]:
                patch.setattr(home, name, counted(getattr(home, name)))
            try:
                write(folder / "last", 2)
                crashed = False
            except Stop:
                crashed = True
        assert settle(folder / "last")
        checkpoint = read_checkpoint(folder / "last")
        value = checkpoint.state["value"]
        assert value in (1, 2) and checkpoint.optimizer["state"][0]["step"] == value
        assert all((part["w"] == value).all() for part in checkpoint.tensors.values())
        assert sorted(p.name for p in folder.iterdir()) == ["last"]
        outcomes.add(value)
        if not crashed:
            break
        points += 1
    assert points > 12 and outcomes == {1, 2} and value == 2


def test_without_the_protocol_the_crash_test_would_fail(tmp_path):
    """A writer that overwrites in place is what the test above must catch."""
    write(tmp_path / "last", 1)
    (tmp_path / "last" / "ema.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"ema\.safetensors is not what was written"):
        read_checkpoint(tmp_path / "last")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda p: (p / "optimizer.pt").write_bytes(b""), "optimizer.pt is not what was written"),
        (lambda p: (p / "state.json").write_text("{"), "state.json is not JSON"),
        (lambda p: (p / "state.json").write_text("[]"), "state.json is not a checkpoint of timm-knapsack"),
        (lambda p: edit(p, version=99), "version 99"),
        (lambda p: edit(p, files={"../../etc/passwd": {}}), "lists the file '../../etc/passwd', which no checkpoint"),
        (lambda p: edit(p, files={"1" * 300 + ".safetensors": {}}), "which no checkpoint has"),
        (lambda p: edit(p, files={"optimizer.pt": forged(p / "optimizer.pt", b"")}), "optimizer.pt can't be read: EOF"),
        (lambda p: edit(p, files={"ema.safetensors": forged(p / "ema.safetensors", b"{}")}), "ema.* can't be read"),
        (lambda p: edit(p, files=["model.safetensors"]), "lists no files"),
        (lambda p: edit(p, files=None), "lists no files"),
    ],
)
def test_damaged_checkpoints_are_named(tmp_path, damage, words):
    write(tmp_path / "last", 1)
    damage(tmp_path / "last")
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(tmp_path / "last")


def forged(file, data):
    """A file that was damaged by somebody who put its checksum right."""
    file.write_bytes(data)
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def edit(folder, **changes):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | changes))


def test_checkpoints_keep_bits_ties_and_layouts(tmp_path):
    tied = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    tensors = {"a": tied, "b": tied, "c": torch.randn(3).bfloat16(), "d": torch.tensor(7), "e": torch.zeros(0)}
    write_checkpoint(tmp_path / "x", {"model": tensors}, {})
    read = read_checkpoint(tmp_path / "x").tensors["model"]
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in tensors.items())
    with pytest.raises(CheckpointError, match="can't write"):
        write_checkpoint(tmp_path / "x", {}, {"loss": float("nan")})
    assert read_checkpoint(tmp_path / "x").tensors["model"]["d"] == 7


def test_pickles_that_run_code_are_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, ("touch /tmp/timm_knapsack_was_here",))

    write_checkpoint(tmp_path / "x", {}, {}, {"optimizer": Evil()})
    with pytest.raises(CheckpointError, match=r"optimizer.pt can't be read"):
        read_checkpoint(tmp_path / "x")


def test_first_difference_goes_into_depth():
    assert first_difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) is None
    assert (
        first_difference({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}) == "a.b is [1, 2] in the checkpoint and [1, 3] now"
    )
    assert "missing now" in first_difference({"a": 1, "b": 2}, {"a": 1})
    assert "not in the checkpoint" in first_difference({}, {"a": 1})


def test_only_checkpoints_are_replaced(tmp_path):
    folder = tmp_path / "last"
    check_replaceable(folder)  # nothing there
    folder.mkdir()
    check_replaceable(folder)
    write(folder, 1)
    check_replaceable(folder)
    with pytest.raises(CheckpointError, match=r"holds thesis.tex, which no checkpoint has, so it is not replaced"):
        (folder / "thesis.tex").write_text("years of work")
        write(folder, 2)
    (folder / "thesis.tex").unlink()
    edit(folder, format="another")
    with pytest.raises(CheckpointError, match=r"is no checkpoint of timm-knapsack .its state.json does not say so"):
        write(folder, 2)
    (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match="is no checkpoint of timm-knapsack"):
        write(folder, 2)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file is a file, expected a folder"):
        write(tmp_path / "file", 2)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link is a file, expected a folder"):
        write(tmp_path / "link", 2)
