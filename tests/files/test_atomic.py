"""The one writer of files and folders: whole or not at all, whenever the process dies; permissions by the umask."""

import ast
import errno
import json
import os
import signal
import stat
import threading
from pathlib import Path

import pytest
import torch

import timm_knapsack
from timm_knapsack import ChannelConfig, Scores
from timm_knapsack.files import atomic
from timm_knapsack.files.atomic import replacing_file, replacing_folder, settle, write_text
from timm_knapsack.files.plain_json import write_json
from timm_knapsack.slim.tensor_files import write_tensors

OPERATIONS = ("mkdir", "chmod", "fsync", "replace", "rename", "unlink", "rmdir")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o027, 0o002, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


# ---- permissions


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_text(path, "whole"),
        lambda path: write_json(path, {"a": 1}),
        lambda path: write_tensors(path, {"a": torch.ones(2)}),
        lambda path: Scores({"a": torch.ones(2)}).save(path),
        lambda path: ChannelConfig("resnet18", {}).save(path),
    ],
    ids=["text", "json", "tensors", "scores", "config"],
)
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, write):
    path = tmp_path / "file"
    for _ in range(2):  # written, and written again
        write(path)
        assert mode(path) == 0o666 & ~umask
    assert os.listdir(tmp_path) == ["file"]


def test_folders_have_the_permissions_of_the_umask_and_keep_their_own(tmp_path, umask):
    folder = tmp_path / "folder"
    with replacing_folder(folder) as new:
        write_tensors(new / "weights", {"a": torch.ones(2)})
    assert mode(folder) == 0o777 & ~umask and mode(folder / "weights") == 0o666 & ~umask
    folder.chmod(0o750)
    with replacing_folder(folder) as new:
        write_text(new / "other", "")
    assert mode(folder) == 0o750 and sorted(os.listdir(folder)) == ["other", "weights"]


# ---- errors leave what was there


def test_half_a_character_does_not_stop_a_text(tmp_path):
    """JSON can hold one, as a name of a file can; UTF-8 can't."""
    assert write_text(tmp_path / "a.txt", "caf\u00e9 \ud800").read_text(encoding="utf-8") == "caf\u00e9 \\ud800"


def test_an_error_leaves_the_old_file_and_no_litter(tmp_path):
    path = write_text(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), replacing_file(path) as new:
        new.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_can_not_write_is_an_error(tmp_path, monkeypatch, number):
    path = write_text(tmp_path / "a.txt", "old")

    def fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_text(path, "new")
    with pytest.raises(OSError, match=os.strerror(number)), replacing_folder(tmp_path / "folder") as new:
        (new / "a").touch()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_the_data_reaches_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    """Else a crash of the machine could leave an empty file under the right name, or the old one after a return."""
    done = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        done.append(("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def noted_replace(source, target):
        done.append(("named", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_text(tmp_path / "a.txt", "new")
    assert done == [("flushed", "a.txt"), ("named", "a.txt"), ("flushed", tmp_path.name)]
    done.clear()
    with replacing_folder(tmp_path / "net") as new:
        (new / "inner").mkdir()
        (new / "inner" / "weights").touch()
    names = [name for _, name in done]
    assert names[:2] == ["weights", "inner"] and names[2].startswith(".net.writing.") and names[3:] == [tmp_path.name]


def test_a_file_system_without_fsync_is_none(tmp_path, monkeypatch):
    def fsync(_):
        raise OSError(errno.EINVAL, "no fsync here")

    monkeypatch.setattr(os, "fsync", fsync)
    assert write_text(tmp_path / "a.txt", "new").read_text() == "new"


def test_errors_name_the_place_that_was_meant(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file") as caught:
        write_text(tmp_path / "nowhere" / "a.txt", "")
    assert caught.value.filename == str(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path, "")
    assert caught.value.filename == str(tmp_path) and os.listdir(tmp_path) == []


def test_a_folder_without_permission_is_named_by_the_file(tmp_path, monkeypatch):
    def mkdir(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(PermissionError) as caught:
        write_text(tmp_path / "a.txt", "")
    assert caught.value.filename == str(tmp_path / "a.txt")


def test_links_are_carried_over_wherever_they_lead(tmp_path, monkeypatch):
    """They are no data of this folder: what they lead to is not flushed, and one that leads nowhere is no error."""
    folder, fsync, flushed = tmp_path / "net", os.fsync, []

    def noted_fsync(descriptor):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    (tmp_path / "large").touch()
    with replacing_folder(folder) as new:
        (new / "inner").mkdir()
        os.symlink("nowhere", new / "dangling")
        os.symlink("nowhere", new / "inner" / "dangling")
        os.symlink(tmp_path, new / "up")
        os.symlink(tmp_path / "large", new / "outside")
    with replacing_folder(folder) as new:
        (new / "other").touch()
    assert sorted(os.listdir(folder)) == ["dangling", "inner", "other", "outside", "up"]
    assert "other" in flushed and "large" not in flushed
    assert os.readlink(folder / "dangling") == "nowhere" and os.readlink(folder / "up") == str(tmp_path)


def test_where_the_new_folder_can_not_take_the_name_the_old_one_has_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", atomic._exchange_by_renames)  # as on a system without renameat2
    folder, rename = tmp_path / "net", os.rename
    with replacing_folder(folder) as new:
        (new / "a").write_text("old")

    def refusing(source, target):
        if Path(target) == folder and ".writing." in Path(source).name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), replacing_folder(folder) as new:
        (new / "a").write_text("new")
    assert (folder / "a").read_text() == "old" and os.listdir(tmp_path) == ["net"]


# ---- a process that is killed


def killed_at(operation_number, write):
    """Run ``write`` in a child that is killed at its n-th operation on the disk; returns whether it came that far."""
    child = os.fork()
    if child == 0:
        left = [operation_number]

        def counted(function):
            def call(*args, **kwargs):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return function(*args, **kwargs)

            return call

        for name in OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
        atomic._exchange = counted(atomic._exchange)
        try:
            write()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_file_is_old_or_new_whenever_its_writer_is_killed(tmp_path):
    path, number, seen = tmp_path / "a.txt", 0, set()
    while True:
        write_text(path, "old")
        if not killed_at(number, lambda: write_text(path, "new")):
            break
        seen.add(path.read_text())
        number += 1
    assert seen == {"old", "new"} and number >= 6
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]  # the last writer tidied up


@pytest.mark.parametrize("one_call", [True, False], ids=["exchange", "renames"])
def test_a_folder_is_old_or_new_whenever_its_writer_is_killed(tmp_path, one_call, monkeypatch):
    if not one_call:  # as on a system without renameat2
        monkeypatch.setattr(atomic, "_exchange", atomic._exchange_by_renames)
    folder, number, seen = tmp_path / "folder", 0, set()

    def write(value):
        with replacing_folder(folder, carry_over=False) as new:
            for name in ("a", "b"):
                (new / name).write_text(value)
            (new / value).mkdir()

    while True:
        write("old")
        if not killed_at(number, lambda: write("new")):
            break
        assert settle(folder) and os.listdir(tmp_path) == ["folder"]
        value = (folder / "a").read_text()
        assert (folder / "b").read_text() == value and (folder / value).is_dir() and len(os.listdir(folder)) == 3
        seen.add(value)
        number += 1
    assert seen == {"old", "new"} and number >= 8


def test_without_the_writer_a_kill_would_leave_half_a_folder(tmp_path):
    """A writer that changes files in place is what the test above must catch."""

    def in_place():
        for name in ("a", "b"):
            (tmp_path / name).write_text("new")
            os.fsync(os.open(tmp_path / name, os.O_RDONLY))

    for name in ("a", "b"):
        (tmp_path / name).write_text("old")
    assert killed_at(0, in_place)
    assert {(tmp_path / name).read_text() for name in ("a", "b")} == {"old", "new"}


# ---- several writers


def test_a_place_in_use_is_left_alone(tmp_path):
    path = tmp_path / "a.txt"
    with replacing_file(path) as new:
        new.write_text("first")
        write_text(path, "second")  # tidies up, but not this one
        assert not settle(tmp_path / "b.txt") and settle(path)
        assert new.read_text() == "first" and path.read_text() == "second"
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["a.txt"]


def test_an_abandoned_place_is_removed(tmp_path):
    abandoned = tmp_path / ".a.txt.writing.0badcafe"
    abandoned.mkdir()
    (abandoned / "a.txt").write_text("half")
    (tmp_path / ".aXtxt.writing.0badcafe").mkdir()  # another file's
    write_text(tmp_path / "a.txt", "whole")
    assert sorted(os.listdir(tmp_path)) == [".aXtxt.writing.0badcafe", "a.txt"]


def test_a_place_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    locked, places = atomic._locked, []

    def too_late(place, wait=True):
        lock = locked(place, wait)
        places.append(place)
        if len(places) == 1:
            place.rmdir()
        return lock

    monkeypatch.setattr(atomic, "_locked", too_late)
    before = sorted(os.listdir("/proc/self/fd"))
    write_text(tmp_path / "a.txt", "whole")
    assert len(set(places)) == 2 and (tmp_path / "a.txt").read_text() == "whole"
    assert sorted(os.listdir("/proc/self/fd")) == before, "a lock is still held"


def test_writers_at_the_same_time_do_not_mix(tmp_path):
    failures = []

    def write(number):
        try:
            for _ in range(15):
                write_json(tmp_path / "a.json", [number] * 5000)
                assert len(set(json.loads((tmp_path / "a.json").read_text()))) == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and os.listdir(tmp_path) == ["a.json"]


# ---- nobody else


def test_nobody_else_writes_files():
    """Renames, flushes, temporary files and bare writes stand in the room ``files`` and in the writer of tensors."""
    library = Path(timm_knapsack.__file__).parent
    names = {"replace": "os", "rename": "os", "fsync": "os", "umask": "os", "chmod": "os", "dump": "json"}
    anywhere = {"write_text", "write_bytes", "mkstemp", "mkdtemp", "NamedTemporaryFile", "save_file"}
    found = set()
    for path in library.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if node.attr in anywhere or names.get(node.attr, " ") == owner:
                    found.add(path.relative_to(library).as_posix())
    # files for a runtime, in temporary folders, and an export inside a folder that is put in its place whole
    scratch = {"costs/latency/stopwatch.py", "runtimes/onnx_runtime.py", "pipeline/memory_probe.py", "export/files.py"}
    assert found == {"files/atomic.py", "slim/tensor_files.py", "pipeline/compare.py", *scratch}
