"""What every test needs before anything is imported: one thread, no network, the benchmarks' folder on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# A virtual machine may announce AMX and end the process at its first use: what is tested does not need it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))
# Tests that start a process of their own find this checkout and the shared helpers (nets, oracle) as they do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

import timm_knapsack  # noqa: E402, F401  (before timm: it declares torchvision's missing operators)

settings.register_profile("same", derandomize=True)  # a red run can be run again and is red again
settings.load_profile("same")


torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts with one thread and the same seed, whatever ran before it in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_collection_modifyitems(config, items):
    """Mark as slow what slow_tests.txt names; a line of it that names no test any more is an error."""
    lines = (TESTS / "slow_tests.txt").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    for item in items:
        if any(pattern in item.nodeid for pattern in patterns):
            item.add_marker(pytest.mark.slow)
    if {Path(item.path) for item in items} >= set(TESTS.rglob("test_*.py")):  # not where a part was asked for
        stale = [p for p in patterns if not any(p in item.nodeid for item in items)]
        if stale:
            raise pytest.UsageError(f"tests/slow_tests.txt: no test is named {', '.join(stale)}")
