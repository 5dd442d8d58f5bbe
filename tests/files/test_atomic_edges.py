"""One by one what the writer does besides writing: locks and descriptors, what it tidies up, what it carries over."""

import ctypes
import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from timm_knapsack.files import atomic
from timm_knapsack.files.atomic import flush, replacing_file, replacing_folder, settle, write_text


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def write_folder(folder: Path, text: str, **options) -> None:
    with replacing_folder(folder, **options) as new:
        (new / "a.txt").write_text(text)


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_nothing_is_left_open_and_nothing_left_behind(tmp_path, locks, monkeypatch):
    if not locks:
        monkeypatch.setattr(atomic, "fcntl", None)
    before = descriptors()
    for text in ("old", "new"):
        write_text(tmp_path / "a.txt", text)
        write_folder(tmp_path / "net", text)
    settle(tmp_path / "net")
    flush(tmp_path)
    with pytest.raises(ZeroDivisionError), replacing_file(tmp_path / "a.txt"):
        raise ZeroDivisionError
    assert descriptors() == before
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "net"]
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "net" / "a.txt").read_text() == "new"


def test_a_place_is_locked_as_long_as_it_is_written_in(tmp_path):
    before = descriptors()
    with atomic._place_beside(tmp_path / "a.txt") as place:
        assert place.parent == tmp_path and not any(place.iterdir())
        for _ in range(2):  # the attempt to lock it leaves nothing open
            assert atomic._locked(place, wait=False) is None
            assert len(descriptors()) == len(before) + 1
        atomic._remove_abandoned(tmp_path / "a.txt")
        assert place.is_dir()
    assert not place.exists() and descriptors() == before
    assert atomic._locked(tmp_path / "nowhere") is None


def test_without_locks_nobody_holds_one_and_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "fcntl", None)
    assert atomic._locked(tmp_path) is None
    with atomic._place_beside(tmp_path / "a.txt") as place:
        atomic._remove_abandoned(tmp_path / "a.txt")
        assert place.is_dir()


@pytest.mark.parametrize("kind", [replacing_file, replacing_folder])
def test_what_a_killed_writer_leaves_the_next_one_and_settle_remove(tmp_path, kind):
    """Under the very name that a writer gives it."""
    for clean in (lambda: write_folder(tmp_path / "net", "") if kind is replacing_folder
                  else write_text(tmp_path / "net", ""), lambda: settle(tmp_path / "net")):  # fmt: skip
        child = os.fork()
        if child == 0:
            with kind(tmp_path / "net"):
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert [name for name in os.listdir(tmp_path) if ".writing." in name]
        before = descriptors()
        clean()
        assert os.listdir(tmp_path) == ["net"] and descriptors() == before


@pytest.mark.parametrize("mask, mode", [(0, 0o666), (0o022, 0o644), (0o077, 0o600), (0o111, 0o666)])
def test_a_file_is_for_those_that_the_umask_lets_and_never_a_program(tmp_path, mask, mode):
    former = os.umask(mask)
    try:
        with replacing_file(tmp_path / "a.txt") as new:
            new.touch(0o700)
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode & 0o777


def test_what_is_new_wins_over_what_is_carried_over(tmp_path):
    with replacing_folder(tmp_path / "net") as new:
        for name in ("a.txt", "mine.txt", "inner/b.txt", "kept/deep/c.txt"):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_text("old")
    with replacing_folder(tmp_path / "net") as new:
        (new / "a.txt").write_text("new")
        (new / "inner").mkdir()
    names = {str(p.relative_to(tmp_path / "net")): p.read_text() for p in (tmp_path / "net").rglob("*.txt")}
    assert names == {"a.txt": "new", "mine.txt": "old", "kept/deep/c.txt": "old"}
    write_folder(tmp_path / "net", "newest", carry_over=False)
    assert os.listdir(tmp_path / "net") == ["a.txt"]
    write_folder(tmp_path / "other", "first", carry_over=True)
    assert os.listdir(tmp_path / "other") == ["a.txt"]


def test_where_files_can_not_be_linked_they_are_copied(tmp_path, monkeypatch):
    def link(*_, **__):
        raise OSError(errno.EPERM, "no links here")

    write_folder(tmp_path / "net", "old")
    (tmp_path / "net" / "mine.txt").write_text("mine")
    os.symlink("nowhere", tmp_path / "net" / "dangling")
    monkeypatch.setattr(os, "link", link)
    write_folder(tmp_path / "net", "new")
    assert (tmp_path / "net" / "mine.txt").read_text() == "mine"
    assert os.readlink(tmp_path / "net" / "dangling") == "nowhere"


def test_a_folder_keeps_its_permissions(tmp_path):
    write_folder(tmp_path / "net", "old")
    (tmp_path / "net").chmod(0o750)
    write_folder(tmp_path / "net", "new")
    assert stat.S_IMODE((tmp_path / "net").stat().st_mode) == 0o750


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EIO])
def test_an_exchange_that_the_system_has_not_is_done_by_renames_and_any_other_error_is_one(
    tmp_path, monkeypatch, number
):
    class Library:
        def __init__(self, *_, **__):
            pass

        def renameat2(self, *_):
            ctypes.set_errno(number)
            return -1

    write_folder(tmp_path / "net", "old")
    monkeypatch.setattr(ctypes, "CDLL", Library)
    if number in (errno.EACCES, errno.EIO):
        with pytest.raises(OSError) as caught:
            write_folder(tmp_path / "net", "new")
        assert caught.value.errno == number and caught.value.filename == str(tmp_path / "net")
        assert (tmp_path / "net" / "a.txt").read_text() == "old"
    else:
        write_folder(tmp_path / "net", "new")
        assert (tmp_path / "net" / "a.txt").read_text() == "new"
    assert os.listdir(tmp_path) == ["net"]


def test_an_exchange_is_one_call_that_leaves_both(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange_by_renames", lambda *_: pytest.fail("two renames"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
    atomic._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "text").read_text() == "b" and (tmp_path / "b" / "text").read_text() == "a"


def test_renames_that_fail_leave_the_old_folder_where_it_was(tmp_path, monkeypatch):
    for name in ("new", "net"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name)
    atomic._exchange_by_renames(tmp_path / "new", tmp_path / "net")
    assert (tmp_path / "new" / "text").read_text() == "net" and (tmp_path / "net" / "text").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["net", "new"]
    shutil.rmtree(tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        atomic._exchange_by_renames(tmp_path / "new", tmp_path / "net")
    assert os.listdir(tmp_path) == ["net"]


@pytest.mark.parametrize("there", [True, False])
def test_an_old_folder_between_two_renames_is_put_back_or_no_longer_needed(tmp_path, there):
    write_folder(tmp_path / "net", "old")
    os.rename(tmp_path / "net", atomic._parked(tmp_path / "net"))
    if there:
        write_folder(tmp_path / "else", "new")
        os.rename(tmp_path / "else", tmp_path / "net")
    assert settle(tmp_path / "net")
    assert os.listdir(tmp_path) == ["net"]
    assert (tmp_path / "net" / "a.txt").read_text() == ("new" if there else "old")
    assert not settle(tmp_path / "nowhere")


@pytest.mark.parametrize("number, matters", [(errno.EIO, True), (errno.ENOSYS, False), (errno.ENOTSUP, False)])
def test_a_flush_that_fails_matters_unless_there_is_none(tmp_path, monkeypatch, number, matters):
    def fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    before = descriptors()
    if matters:
        with pytest.raises(OSError, match=os.strerror(number)):
            flush(tmp_path)
    else:
        flush(tmp_path)
    assert descriptors() == before
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "a folder")))
    assert flush(tmp_path) is None  # Windows


def test_the_old_name_is_gone_for_good_where_it_is_put_back(tmp_path, monkeypatch):
    """A rename is on the disk when the folder above is."""
    flushed, fsync = [], os.fsync
    write_folder(tmp_path / "net", "old")
    os.rename(tmp_path / "net", atomic._parked(tmp_path / "net"))

    def noted(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    settle(tmp_path / "net")
    assert flushed == [str(tmp_path)]
