"""A folder reaches the disk before its name does, in one call where there is one, and folders above it are made."""

import ctypes
import os
from pathlib import Path

import pytest

from timm_knapsack.files import atomic
from timm_knapsack.files.atomic import replacing_folder, settle


@pytest.fixture
def done(monkeypatch):
    """What was flushed and renamed, in order, by name."""
    done, fsync, rename, exchange = [], os.fsync, os.rename, atomic._exchange

    def noted(descriptor):
        done.append(("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".writing")[0]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(("named", Path(b).name)), rename(a, b)))
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: (done.append(("named", Path(b).name)), exchange(a, b)))
    return done


def write(folder: Path, text: str) -> None:
    with replacing_folder(folder) as new:
        (new / "a.txt").write_text(text)
        (new / "inner").mkdir()
        (new / "inner" / "b.txt").write_text(text)


@pytest.mark.parametrize("there", [False, True])
def test_all_files_reach_the_disk_then_the_name_then_the_folder_above(tmp_path, done, there):
    folder = tmp_path / "deep" / "net"
    if there:
        write(folder, "old")
        done.clear()
    write(folder, "new")
    assert (folder / "a.txt").read_text() == (folder / "inner" / "b.txt").read_text() == "new"
    before = {("flushed", name) for name in ("a.txt", "b.txt", "inner", ".net")}
    assert set(done[:-2]) == before and done[-2:] == [("named", "net"), ("flushed", "deep")]


def test_an_old_folder_that_is_put_back_is_put_back_for_good(tmp_path, done):
    write(tmp_path / "net", "old")
    os.rename(tmp_path / "net", atomic._parked(tmp_path / "net"))  # killed between two renames
    done.clear()
    assert settle(tmp_path / "net") and (tmp_path / "net" / "a.txt").read_text() == "old"
    assert done == [("named", "net"), ("flushed", tmp_path.name)]


def test_one_call_exchanges_two_folders_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange_by_renames", lambda *_: pytest.fail("two renames"))
    for text in ("old", "new"):
        write(tmp_path / "net", text)
    assert (tmp_path / "net" / "a.txt").read_text() == "new"


@pytest.mark.parametrize("problem", [OSError, AttributeError, TypeError])
def test_two_renames_do_it_where_there_is_none(tmp_path, monkeypatch, problem):
    class NoLibrary:
        def __init__(self, *_, **__):
            raise problem

    write(tmp_path / "net", "old")
    monkeypatch.setattr(ctypes, "CDLL", NoLibrary)
    write(tmp_path / "net", "new")
    assert (tmp_path / "net" / "a.txt").read_text() == "new" and os.listdir(tmp_path) == ["net"]
