"""What README and docs say to type runs, in order, after a quickstart; links lead somewhere; the API is whole."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import timm
from forks import in_fork
from forks import timm_knapsack as in_fork_verb
from safetensors.torch import save_file

import timm_knapsack
from timm_knapsack.pipeline.quickstart import write_images

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)  # in a list it is indented
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(path: Path, language: str) -> list[str]:
    return [textwrap.dedent(code) for _, found, code in BLOCK.findall(path.read_text()) if found == language]


def run(code: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """What `make quickstart` leaves, with fewer images and a network that knows little."""
    folder = tmp_path_factory.mktemp("made") / "quickstart"
    for images in write_images(folder / "images").glob("*/*"):
        for image in sorted(images.iterdir())[16:]:
            image.unlink()
    save_file(timm.create_model("cifar_resnet8x2").state_dict(), folder / "base.safetensors")
    return folder


@pytest.fixture
def after_quickstart(left_behind, tmp_path):
    """A folder of a user's own after a quickstart."""
    shutil.copytree(left_behind, tmp_path / "quickstart")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def test_the_python_blocks_of_the_readme_run_in_order(after_quickstart):
    code = "\n".join(["import torch; torch.set_num_threads(1)", *blocks(ROOT / "README.md", "python")])
    done = run(code, after_quickstart)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recovered: top-1" in done.stdout
    assert (after_quickstart / "digits-quarter" / "model.safetensors").exists()


def test_the_shell_blocks_of_the_readme_run_in_order(after_quickstart):
    """CI itself begins with the set-up (make, pip)."""
    wrapped = [block.replace("\\\n", " ") for block in blocks(ROOT / "README.md", "sh")]
    lines = [line for block in wrapped for line in block.splitlines() if line]
    commands = [line.partition(" #")[0] for line in lines if not line.startswith(("make ", "pip "))]
    assert len(commands) == len(lines) - 2 > 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for command in commands:
        words = shlex.split(command)
        if words[0] == "timm-knapsack":
            done = in_fork_verb(words[1:], after_quickstart, env)
        else:
            done = subprocess.run(words, cwd=after_quickstart, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert (after_quickstart / "digits-tuned" / "model" / "report.html").exists()
    assert (after_quickstart / "digits-again" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("page", ["index", "how_to", "op_rules", "registries", "latency", "tutorial", "deploy"])
def test_the_python_blocks_of_other_pages_run(page, after_quickstart):
    code = blocks(ROOT / "docs" / f"{page}.md", "python")
    assert code
    done = in_fork(lambda: exec("\n".join(code), {"__name__": "__main__"}), after_quickstart)
    if done.returncode and "can't be pruned to" in done.stderr:  # times of a machine that others use, too: once more
        done = in_fork(lambda: exec("\n".join(code), {"__name__": "__main__"}), after_quickstart)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_broken_block_would_be_noticed(tmp_path):
    done = in_fork(lambda: exec("import timm_knapsack as tk\ntk.prun", {}), tmp_path)
    assert done.returncode == 1 and "no attribute 'prun'" in done.stderr
    done = in_fork_verb(["prun"], tmp_path)
    assert done.returncode == 2 and "No such command" in done.stderr


def test_links_lead_to_files():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_in_the_api():
    documented = re.findall(r"^::: timm_knapsack\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    public = {f"{home}.{name}" for name, home in timm_knapsack._HOME.items()}
    errors = {f"errors.{name}" for name in timm_knapsack.__all__ if name.endswith("Error")}
    assert sorted(documented) == sorted(public | errors)


def test_the_pages_build_without_a_dead_link(tmp_path):
    """And a link that leads nowhere would be noticed."""
    assert build(ROOT / "docs", tmp_path / "site").returncode == 0
    page = (tmp_path / "site" / "api.html").read_text()
    assert "image_loader" in page and "Prune a model to a budget" in page, "from the docstrings"
    assert not re.search(r'<(script|link)[^>]*(src|href)="https?:', page), "nothing is fetched from elsewhere"
    assert "halonet" in (tmp_path / "site" / "search" / "search_index.json").read_text(), "coverage can be searched"
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[nowhere](nowhere.md)\n")
    done = build(tmp_path / "docs", tmp_path / "broken")
    assert done.returncode != 0 and "nowhere.md" in done.stderr + done.stdout


def build(docs: Path, site: Path) -> subprocess.CompletedProcess:
    config = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {docs}")
    file = site.with_suffix(".yml")
    file.write_text(config.replace("paths: [.]", f"paths: [{ROOT}]"))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(file), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)
