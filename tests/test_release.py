"""The wheel alone, without the checkout: console script, timm entrypoints, data files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that the wheel was installed into; its dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("release")
    build = [sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, folder.glob("*"))]
    checked = subprocess.run(check, capture_output=True)
    assert checked.returncode == 0, checked.stdout[-2000:]
    [wheel] = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "lib"), str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def run(installed: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed / "lib"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_first_page_works_with_the_wheel_alone(installed):
    code = (
        "import timm_knapsack as tk, timm, torch\n"
        "print(tk.__file__)\n"
        "print(timm.list_models('*knapsack*'))\n"
        "print(timm.create_model('resnet50_knapsack_2g', features_only=True).feature_info.channels())\n"
        "model = timm.create_model('cifar_resnet20', channels=(4, 6, 8)).eval()\n"
        "images = tk.image_loader(torch.randint(255, (16, 32, 32, 3), dtype=torch.uint8), model)\n"
        "result = tk.prune(model, images, budget=tk.Budget(macs='60%'), base_args={'channels': (4, 6, 8)})\n"
        "tk.save_pretrained(result, 'small')\n"
        "print(type(timm.create_model('local-dir:small', pretrained=True)).__name__)\n"
    )
    said = run(installed, sys.executable, "-c", code).splitlines()
    assert said[0].startswith(str(installed / "lib")), "not the checkout"
    assert "resnet50_knapsack_2g" in said[1] and said[-1] == "CifarResNet"


def test_the_console_script_works(installed):
    from timm_knapsack import __version__

    script = str(installed / "lib" / "bin" / "timm-knapsack")
    assert run(installed, sys.executable, script, "--version") == f"timm-knapsack {__version__}\n"
    assert "conv1" in run(installed, sys.executable, script, "groups", "cifar_resnet20")
