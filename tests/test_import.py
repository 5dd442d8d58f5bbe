"""Importing is lean, works where torchvision's compiled operators are missing, and every public name is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import timm_knapsack as tk
from timm_knapsack import _torchvision_operators
from timm_knapsack.cli import doctor
from timm_knapsack.errors import KnapsackError

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def packages() -> str:
    """The environment's site-packages: python -S starts without it, and so without what .pth files do."""
    import torch

    return str(Path(torch.__file__).parent.parent)


def test_import_pulls_in_nothing_heavy():
    done = run("import sys, timm_knapsack; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"timm_knapsack", "timm"} <= loaded
    assert not loaded & {"matplotlib", "datasets", "accelerate", "scipy", "sklearn", "pandas", "typer", "rich"}


def test_import_works_without_the_doctors_hook():
    """A fresh interpreter that reads no .pth file, as in an environment that was never mended."""
    start = f"import sys; sys.path[:0] = [{packages()!r}, {str(ROOT)!r}]; "
    alone = run(start + "import timm", "-S")
    ours = run(start + "import timm_knapsack, timm; print(timm.create_model('resnet18').num_features)", "-S")
    assert ours.returncode == 0 and ours.stdout.strip() == "512", ours.stderr
    if _torchvision_operators.operators_are_missing():
        assert "torchvision::nms does not exist" in alone.stderr, "the fault that we work around is there"


def test_the_hook_mends_a_plain_import_of_timm():
    start = f"import sys; sys.path[:0] = [{packages()!r}, {str(ROOT)!r}]; "
    load = (
        "import importlib.util as u; s = u.spec_from_file_location('hook', 'timm_knapsack/_torchvision_operators.py'); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.install_hook(); "
        "assert 'torch' not in sys.modules, 'start-up must cost nothing'; import timm; print(len(sys.meta_path) > 0)"
    )
    done = run(start + load, "-S")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", tk.__all__)
def test_public_names_resolve(name):
    assert getattr(tk, name) is not None
    assert name in dir(tk)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = tk.no_such_name


# ---- the doctor ---------------------------------------------------------------------------------------------------


def test_the_doctor_refuses_outside_a_virtual_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(doctor.sys, "prefix", sys.base_prefix)
    with pytest.raises(KnapsackError, match="is not in a virtual environment"):
        doctor.install_torchvision_hook()
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_writes_two_files_and_removes_them(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path))
    path = doctor.install_torchvision_hook()
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.stem + ".pth", path.stem + ".py"]
    start = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {packages()!r}]; exec({path.read_text()!r}); import timm"
    done = run(start, "-S")
    assert done.returncode == 0, done.stderr
    doctor.remove_torchvision_hook()
    assert list(tmp_path.iterdir()) == []
    doctor.remove_torchvision_hook()  # a second time does no harm


def test_the_doctor_says_when_it_can_not_write(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path / "missing")])
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path))
    with pytest.raises(KnapsackError, match="can't be written: No such file"):
        doctor.install_torchvision_hook()


def test_the_doctor_reports_versions_and_devices():
    found = doctor.diagnose()
    assert found.versions["torch"] and found.versions["timm"] != "not installed"
    assert found.devices[0].startswith("cpu")
    assert isinstance(found.plain_timm_imports, bool)
