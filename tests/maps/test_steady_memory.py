"""While times are measured, a pass must not wait for pages that the one before has handed back."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from contextlib import nullcontext
import timm_knapsack, timm  # as where times are measured; in a process with torch alone one block of three is not kept
import torch
from timm_knapsack.maps.steady_memory import memory_kept

def pass_():
    for size in (5, 40, 80):  # MB: under and over what glibc ever keeps by itself
        torch.empty(size << 18).fill_(1.0)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with memory_kept() if sys.argv[1] == "kept" else nullcontext():
    with memory_kept() if sys.argv[1] == "kept" else nullcontext():
        pass_()
    before = faults()
    for _ in range(10):
        pass_()
    inside = faults() - before
before = faults()
pass_()
print(inside, faults() - before)
"""


def page_faults(how: str) -> list[int]:
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return [int(word) for word in run.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of other systems is not glibc's")
def test_a_pass_finds_its_memory_mapped():
    inside, after = page_faults("kept")
    plain, _ = page_faults("plain")
    assert plain > 300, "the checker can fail: without it, every pass maps its pages anew (with huge pages, 60 of them)"
    assert inside < plain / 20
    assert after > plain / 20, "all of it was handed back"
