"""Importing is lean, works where torchvision's compiled operators are missing, and every public name is there."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
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


HEAVY = {"torch", "timm", "torchvision", "numpy", "scipy", "matplotlib", "datasets", "accelerate", "sklearn", "pandas"}
HEAVY |= {"typer", "rich"}


def test_import_pulls_in_nothing_heavy():
    done = run("import sys, timm_knapsack; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "timm_knapsack" in loaded
    assert not loaded & HEAVY


# What is imported only where it is needed: (statements, packages that are not there afterwards), one after the other.
WAITING = [
    ("tk.FinetuneConfig; tk.DistillationConfig", ("accelerate", "datasets", "rich", "matplotlib")),
    ("import timm_knapsack.runtimes.kinds", ("onnx", "onnxruntime", "openvino", "nncf")),
    ("import timm_knapsack.reports.page", ("matplotlib", "sklearn", "datasets")),
    (
        "import numpy; from timm_knapsack.images.loaders import create_loader; "
        "list(create_loader((numpy.zeros((2, 8, 8, 3), 'uint8'), [0, 1]), {'input_size': (3, 8, 8)}))",
        ("datasets", "pyarrow"),
    ),
    ("import timm_knapsack.cli.app", ("matplotlib", "sklearn", "datasets")),
]


def test_heavy_packages_wait_for_their_first_use():
    """All in one new process: it takes seconds to start one with torch."""
    code = "import sys, timm_knapsack as tk\n"
    for statements, packages in WAITING:
        code += f"{statements}\nprint([name for name in {packages} if name in sys.modules])\n"
    done = run(code + "print([name for name in ('torch', 'onnx') if name in sys.modules])")
    assert done.stdout.splitlines() == ["[]"] * len(WAITING) + ["['torch']"], done.stderr  # what is there is seen


def test_help_is_quick_and_pulls_in_no_torch():
    """5.5 s of CPU once, when importing the package imported timm."""
    code = "import sys, time; sys.argv = ['timm-knapsack', {}]\nfrom timm_knapsack.cli.app import main\n"
    code += "try: main()\nexcept SystemExit: print('CPU', time.process_time(), *sys.modules)"
    for words in ("'--help'", "'prune', '--help'", "'run', '--help'"):
        done = run(code.replace("{}", words))
        assert "Usage:" in done.stdout, done.stdout + done.stderr
        cpu, *modules = done.stdout.rpartition("CPU ")[2].split()
        assert float(cpu) < 2
        assert not {name.partition(".")[0] for name in modules} & (HEAVY - {"typer", "rich"})


# What has to be the same whichever is imported first: {what: statements before the check below}.
ORDERS = {
    "timm first": "import timm; import timm_knapsack",
    "ours first": "import timm_knapsack; import timm",
    "a submodule of timm": "import timm_knapsack; from timm.models import create_model; import timm",
    "timm's factory": "import timm_knapsack; import timm.models._factory; import timm",
    "torchvision first": "import timm_knapsack; import torchvision; import timm",
    "only asked for": "import timm_knapsack; from importlib.util import find_spec; find_spec('timm'); import timm",
    "our models first": "import timm_knapsack.models.pruned_models; import timm",
    "one of our functions first": "import timm_knapsack as tk; tk.register_pruned_model; import timm",
    "reloaded before": "import timm_knapsack, importlib as i; i.reload(timm_knapsack); import timm",
    "reloaded after": "import timm_knapsack, timm, importlib as i; i.reload(timm_knapsack); i.reload(timm)",
    "in threads": "import timm_knapsack; from multiprocessing.pool import ThreadPool; p = ThreadPool(3)\n"
    "p.map(__import__, ['timm'] * 3)\nimport timm",
    "the Hub's room first": "import timm_knapsack.hub.saving; import timm",
    "after a failed import": "import sys, timm_knapsack; keep = sys.modules.pop('torch'); sys.modules['torch'] = None\n"
    "try: import timm\nexcept ImportError: assert 'timm' not in sys.modules\nelse: raise SystemExit('no failure')\n"
    "sys.modules['torch'] = keep; import timm",
    # Another package's finder that asks all finders, ours among them, as wrapt's import hooks do.
    "a finder before ours": "import timm_knapsack\nOTHER; import timm",
    "a finder behind ours": "OTHER; import timm_knapsack; import timm",
}
OTHER = """
import sys, importlib.util
class Other:
    busy = False
    def find_spec(self, name, path=None, target=None):
        if name != "timm" or self.busy: return None
        self.busy = True
        try: return importlib.util.find_spec(name)
        finally: self.busy = False
sys.meta_path.insert(0, Other())
"""
CHECK = """
import inspect, sys
assert timm.create_model("resnet50_knapsack_2g").num_features == 2048
assert timm.create_model("cifar_resnet20").num_features == 64
assert type(timm.__spec__.loader).__name__ == "SourceFileLoader" and timm.__loader__ is timm.__spec__.loader
assert set(vars(timm.__loader__)) == {"name", "path"}, vars(timm.__loader__)
assert "create_model" in inspect.getsource(timm)
ours = [f for f in sys.meta_path if type(f).__module__.startswith("timm_knapsack")]
assert not ours, ours
print("fine")
"""


# Each order in a process of its own, forked from one that has what timm needs and takes long to import.
FORKS = """
import os, sys, traceback, torch, torch._dynamo, numpy, PIL.Image, huggingface_hub, safetensors.torch
for order, code in CASES.items():
    if not os.fork():
        try: exec(code, {"__name__": "__main__"}); code = 0
        except BaseException: traceback.print_exc(); code = 1
        sys.stdout.flush(); sys.stderr.flush(); os._exit(code)
    print(order, "ok" if os.wait()[1] == 0 else "FAILED", flush=True)
"""


def test_models_are_registered_in_any_order_of_imports():
    cases = {order: code.replace("OTHER; ", OTHER) + CHECK for order, code in ORDERS.items()}
    cases["without ours"] = "import timm" + CHECK
    done = run(f"CASES = {cases!r}\n{FORKS}")
    results = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.endswith(("ok", "FAILED")))
    assert results == {**dict.fromkeys(ORDERS, "ok"), "without ours": "FAILED"}, done.stderr
    assert "Unknown model (resnet50_knapsack_2g)" in done.stderr  # the check can fail


def test_what_registering_imports_does_not_import_timm_first():
    """A module that is half imported when timm is would be seen half finished by those that register."""
    done = run("import sys, timm_knapsack, timm; print(*(n for n in sys.modules if n.startswith('timm_knapsack.')))")
    names = [name for name in done.stdout.split() if not name.startswith("timm_knapsack.models")]
    assert "timm_knapsack.slim.cutting" in names
    for name in names:
        tree = ast.parse(Path(find_spec(name).origin).read_text())
        for node in tree.body:
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            assert not any(str(n).partition(".")[0] == "timm" and not getattr(node, "level", 0) for n in imported), name


def test_without_timm_the_error_is_pythons_own():
    block = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; "
    done = run(f"{block}sys.path.insert(0, {str(ROOT)!r}); import timm_knapsack; import timm", "-S")
    assert done.stderr.strip().endswith("ModuleNotFoundError: No module named 'timm'")
    assert "timm_knapsack/" not in done.stderr, "a line of its own; Python 3.13 shows the line above, which names it"


def test_spawned_processes_know_the_models(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import timm_knapsack, multiprocessing\n"
        "def width(name):\n    import timm\n    return timm.create_model(name).num_features\n"
        "if __name__ == '__main__':\n"
        "    import timm\n    model = timm.create_model('cifar_resnet20')\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(width, ('cifar_resnet20',)), pool.apply(repr, (model,)) == repr(model))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["64", "True"], done.stderr


def test_import_works_without_the_doctors_hook():
    """A fresh interpreter that reads no .pth file, as in an environment that the doctor has not repaired."""
    start = f"import sys; sys.path[:0] = [{packages()!r}, {str(ROOT)!r}]; "
    alone = run(start + "import timm", "-S")
    ours = run(start + "import timm_knapsack, timm; print(timm.create_model('resnet18').num_features)", "-S")
    assert ours.returncode == 0 and ours.stdout.strip() == "512", ours.stderr
    if _torchvision_operators.operators_are_missing():
        assert "torchvision::nms does not exist" in alone.stderr, "the fault that we work around is there"


def test_the_hook_repairs_a_plain_import_of_timm():
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


def test_the_doctor_writes_two_files_that_let_timm_be_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path))
    path = doctor.install_torchvision_hook()
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.stem + ".pth", path.stem + ".py"]
    start = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {packages()!r}]; exec({path.read_text()!r}); import timm"
    done = run(start, "-S")
    assert done.returncode == 0, done.stderr


def test_the_doctor_says_when_it_can_not_write(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path / "missing")])
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path))
    with pytest.raises(KnapsackError, match="can't be written: No such file"):
        doctor.install_torchvision_hook()


@pytest.mark.parametrize("code", [0, 1])
def test_the_doctor_reports_versions_devices_and_whether_timm_imports(monkeypatch, code):
    def finished(command, **options):
        assert command == [sys.executable, "-c", "import timm"]
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr("timm_knapsack.maps.precision.bfloat16_kills", lambda: False)  # it would try it in a process
    monkeypatch.setattr(doctor.subprocess, "run", finished)
    found = doctor.diagnose()
    assert found.versions["torch"] and found.versions["timm"] != "not installed"
    assert found.devices[0].startswith("cpu")
    assert found.plain_timm_imports is (code == 0)
