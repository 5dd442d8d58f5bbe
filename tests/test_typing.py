"""The front door as a type checker and an editor's completion see it: the same names, with their signatures."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import timm_knapsack as tk

PACKAGE = Path(tk.__file__).parent
# Types of other packages are not followed: they would take mypy minutes, and are not ours to check.
CONFIG = """
[mypy]
follow_imports = silent
ignore_missing_imports = True
[mypy-torch.*,timm.*,numpy.*,scipy.*,safetensors.*,accelerate.*,huggingface_hub.*,datasets.*,PIL.*,matplotlib.*]
follow_imports = skip
"""
SCRIPT = """\
import timm
import timm_knapsack as tk

model = timm.create_model("resnet18")
groups = tk.find_channel_groups(model)
scores = tk.taylor_scores(model, groups, None, criterion="magnitude")
result = tk.prune(model, scores=scores, budget=tk.Budget(macs=0.5), round_to=8)
counted: float = result.report.line("macs").counted
print(tk.count_macs(result.model), counted)
tk.save_pretrained(result, "resnet18-half").exists()
"""
WRONG = {
    "a name that is not there": ("tk.prune(", "tk.prun(", 'has no attribute "prun"'),
    "a value of the wrong type": ("round_to=8", 'round_to="eight"', 'incompatible type "str"; expected "int"'),
    "a result used as what it is not": (".exists()", ".exist()", 'has no attribute "exist"'),
    "a missing argument": (", budget=tk.Budget(macs=0.5)", "", 'Missing named argument "budget"'),
}


def mypy(code: str, folder: Path) -> tuple[int, str]:
    (folder / "script.py").write_text(code)
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("typed")


def test_a_script_passes_mypy_and_each_mistake_in_it_does_not(folder):
    code, output = mypy(SCRIPT, folder)
    assert code == 0, output
    for what, (right, wrong, message) in WRONG.items():
        assert SCRIPT.count(right) == 1
        code, output = mypy(SCRIPT.replace(right, wrong), folder)
        assert code == 1 and message in output, f"{what}: {output}"


def test_type_checkers_and_python_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name))
    seen = {alias.asname: node.module for node in block.body for alias in node.names if alias.asname == alias.name}
    assert seen == tk._HOME


def test_the_marker_for_type_checkers_is_packaged():
    assert (PACKAGE / "py.typed").is_file()
