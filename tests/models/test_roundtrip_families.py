"""prune → save → create_model in a new process → equal outputs: some families here, all in benchmarks/."""

import sys
from pathlib import Path

import torch

import timm_knapsack  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import roundtrip_families

QUICK = "starnet_s050 ese_vovnet19b_slim_dw convnext_zepto_rms resnet10t gmlp_ti16_224 cs3darknet_focus_s".split()


def test_some_families():
    rows = roundtrip_families.run(QUICK)
    assert {name: verdict for name, _, verdict, *_ in rows} == dict.fromkeys(QUICK, "equal")
    assert all(float(left.rstrip("%")) < 75 for _, left, *_ in rows)


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
