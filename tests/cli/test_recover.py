"""`recover` on a command line: better than the cut, and the same on two processes as on one."""

import os
import subprocess
import sys

import pytest
import timm
import torch
from forks import timm_knapsack
from safetensors.torch import load_file, save_file

import timm_knapsack as tk
from timm_knapsack.pipeline.digits import load_digits
from timm_knapsack.reports.run_record import RunRecord


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A small network, half of it, cut at random, and twenty images."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("recover")
    (folder / "images").mkdir()
    for number, image in enumerate(load_digits()[0][0][:20]):
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
    torch.manual_seed(0)
    base = {"name": "cifar_resnet20", "pretrained": False, "args": {"channels": (4, 6, 8)}}
    model = timm.create_model(base["name"], **base["args"])
    save_file(model.state_dict(), folder / "base.safetensors")
    scores = tk.taylor_scores(model, tk.find_channel_groups(model), criterion="random")
    result = tk.prune(model, scores=scores, budget=tk.Budget(macs=0.5), base_args=base["args"])
    tk.save_pretrained(result, folder / "half")
    base |= {"weights": str(folder / "base.safetensors")}
    RunRecord.of_pruning(result, base).save(folder / "half")
    return folder


@pytest.fixture(scope="module")
def one(work):
    """What one process writes and says."""
    words = ["recover", "half", "--data", "images", "--out", "one", "--batch-size", "5", "--device", "cpu", "--json"]
    done = timm_knapsack(words, work)
    assert done.returncode == 0, done.stderr[-3000:]
    return work / "one"


def recover(work, out: str, *launcher: str) -> str:
    command = [sys.executable, "-m", *launcher, "timm_knapsack", "recover", "half", "--data", "images", "--out", out]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command += ["--batch-size", "5", "--device", "cpu", "--json"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def test_two_processes_write_what_one_writes(work, one):
    lines = recover(work, "two", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
    assert lines.count("recover: 20 images") == 1, "the first process alone speaks"
    cut, one, two = (load_file(folder / "model.safetensors") for folder in (work / "half", one, work / "two"))
    assert one.keys() == two.keys()
    for name, expected in one.items():
        assert torch.allclose(two[name].double(), expected.double(), rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert any(not torch.allclose(cut[name], one[name], rtol=1e-2) for name in one)


def test_the_record_says_what_was_lost(one):
    record = RunRecord.load(one)
    assert record.pruning["loss"]["recovered"] and record.pruning["loss"]["images"] == 20
    assert "recovered with 20 images" in (one / "README.md").read_text()
