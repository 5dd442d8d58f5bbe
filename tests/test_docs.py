"""The README's Python runs, in order, in an empty folder; links lead somewhere; the API page is current."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

from timm_knapsack.pipeline.quickstart import write_images

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)  # in a list it is indented
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(path: Path, language: str) -> list[str]:
    return [textwrap.dedent(code) for _, found, code in BLOCK.findall(path.read_text()) if found == language]


def run(code: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600)


def test_the_python_blocks_of_the_readme_run_in_order(tmp_path):
    code = "\n".join(["import torch; torch.set_num_threads(1)", *blocks(ROOT / "README.md", "python")])
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recovered: top-1" in done.stdout
    assert (tmp_path / "resnet-half" / "model.safetensors").exists()


def test_the_shell_blocks_of_the_readme_run_in_order(tmp_path):
    """In a folder as `make quickstart` leaves it, with fewer images. CI itself begins with the set-up (make, pip)."""
    for folder in write_images(tmp_path / "quickstart" / "images").glob("*/*"):
        for image in sorted(folder.iterdir())[16:]:
            image.unlink()
    save_file(timm.create_model("cifar_resnet20").state_dict(), tmp_path / "quickstart" / "base.safetensors")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines() if line]
    commands = [line.partition(" #")[0] for line in lines if not line.startswith(("make ", "pip "))]
    assert len(commands) == len(lines) - 3 > 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for command in commands:
        done = subprocess.run(shlex.split(command), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "digits-tuned" / "model" / "report.html").exists()
    assert (tmp_path / "digits-again" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("page", ["op_rules", "registries", "latency", "tutorial", "deploy"])
def test_the_python_blocks_of_other_pages_run(page, tmp_path):
    code = blocks(ROOT / "docs" / f"{page}.md", "python")
    assert code
    done = run("\n".join(code), tmp_path)
    if done.returncode and "can't be pruned to" in done.stderr:  # times of a machine that others use, too: once more
        (again := tmp_path / "again").mkdir()
        done = run("\n".join(code), again)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_broken_block_would_be_noticed(tmp_path):
    assert run("import timm_knapsack as tk\ntk.prun", tmp_path).returncode != 0


def test_links_lead_to_files():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_api_page_is_current():
    done = subprocess.run([sys.executable, ROOT / "docs" / "make_api.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
