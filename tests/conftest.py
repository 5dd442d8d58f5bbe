"""What every test needs before anything is imported: one thread, no network, the benchmarks' folder on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch
from hypothesis import settings

import timm_knapsack  # noqa: F401  (before timm: it declares torchvision's missing operators)

torch.set_num_threads(1)
settings.register_profile("same", derandomize=True)  # a red run can be run again and is red again
settings.load_profile("same")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same seed, whatever ran before it in this process."""
    torch.manual_seed(0)
