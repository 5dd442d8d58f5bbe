"""prune → save → create_model in a new process → equal outputs: some families here, all in benchmarks/."""

import subprocess
import sys
from pathlib import Path

import torch

import timm_knapsack  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import roundtrip_families

QUICK = "starnet_s050 test_byobnet test_convnext test_resnet test_efficientnet test_vit".split()


def test_some_families(tmp_path):
    left = {name: roundtrip_families.save_one(name, tmp_path / name) for name in QUICK}
    load = ["--stage", "load", "--root", str(tmp_path), "--models", *QUICK]
    done = subprocess.run([sys.executable, roundtrip_families.__file__, *load], stdout=subprocess.PIPE, text=True)
    verdicts = dict(line.split("\t")[:2] for line in done.stdout.splitlines() if "\t" in line)
    assert verdicts == dict.fromkeys(QUICK, "equal")
    assert all(float(share.rstrip("%")) < 75 for share in left.values())


def test_the_comparison_can_fail(tmp_path):
    roundtrip_families.save_one("cifar_resnet20", tmp_path / "net")
    assert roundtrip_families.load_one(tmp_path / "net") == "equal"
    path = tmp_path / "net" / "expected.pt"
    expected = torch.load(path, weights_only=True)
    torch.save({**expected, "output": expected["output"] + 1e-3}, path)
    assert roundtrip_families.load_one(tmp_path / "net").startswith("outputs differ by 1.0")
    expected["state"]["linear.bias"] += 1e-6
    torch.save(expected, path)
    assert roundtrip_families.load_one(tmp_path / "net") == "state dict differs"


def test_enough_families():
    assert len(roundtrip_families.FAMILIES) == len(set(roundtrip_families.FAMILIES)) >= 40
