"""What every test needs before anything is imported: one thread, no network, the benchmarks' folder on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))
# Tests that start a process of their own find this checkout and the shared helpers (nets, oracle) as they do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

import timm_knapsack  # noqa: E402, F401  (before timm: it declares torchvision's missing operators)

torch.set_num_threads(1)
settings.register_profile("same", derandomize=True)  # a red run can be run again and is red again
settings.load_profile("same")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test starts from the same seed, whatever ran before it in this process."""
    torch.manual_seed(0)
