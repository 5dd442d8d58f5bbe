"""bfloat16 where it is faster, and never where it kills the process."""

import sys
from contextlib import nullcontext

import pytest
import timm
import torch

from timm_knapsack.errors import TrainingError
from timm_knapsack.maps import precision
from timm_knapsack.training.evaluation import start_accelerator

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    monkeypatch.setattr(precision, "_claims_bfloat16", lambda: True)
    precision.cpu_gain.cache_clear()
    yield
    precision.cpu_gain.cache_clear()


@pytest.mark.parametrize(
    ("trial", "gain"),
    [
        ("print(2.0)", 2.0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 0.0),  # a tile instruction that the host refuses
        ("raise RuntimeError", 1.0),  # this and what follows say nothing about the CPU
        ("print('no number')", 1.0),
        ("import time; time.sleep(9)", 1.0),  # a busy machine
    ],
)
def test_a_trial_that_dies_leaves_passes_in_float32(monkeypatch, trial, gain):
    monkeypatch.setattr(precision, "_TRIAL", trial)
    monkeypatch.setattr(precision, "_TRIAL_SECONDS", 2)
    assert precision.cpu_gain() == gain
    context = precision.fast_passes(CPU)
    assert isinstance(context, nullcontext) == (gain < 2.0)
    assert precision.bfloat16_kills() == (gain == 0.0)


def test_slower_bfloat16_is_not_taken(monkeypatch):
    monkeypatch.setattr(precision, "_TRIAL", "print(1.1)")
    assert isinstance(precision.fast_passes(CPU), nullcontext)


def test_without_an_interpreter_to_try_it_in(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    assert precision.cpu_gain() == 1.0


def test_the_trial_itself_runs_here():
    """It prints a number, or the machine can't compute bfloat16 and 0 says so."""
    assert precision.cpu_gain() >= 0.0
    with precision.fast_passes(CPU):
        assert torch.nn.Linear(256, 256)(torch.zeros(8, 256)).isfinite().all()


def test_training_in_bfloat16_is_refused_where_it_would_end_the_process(monkeypatch):
    monkeypatch.setattr(precision, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert precision.bfloat16_kills()
    with pytest.raises(TrainingError, match="ONEDNN_MAX_CPU_ISA"):
        start_accelerator("bf16")
    start_accelerator("no")


def test_a_slow_bfloat16_does_not_kill(monkeypatch):
    monkeypatch.setattr(precision, "_TRIAL", "print(0.7)")
    assert not precision.bfloat16_kills()
    assert start_accelerator("bf16").mixed_precision == "bf16"


def test_a_class_token_that_is_handed_to_a_module_is_counted():
    """Torch's counter wants a gradient function of it, and so recovery and curves of CaiT crashed."""
    net = timm.create_model("cait_xxs24_224", img_size=32).eval()
    net.head.bias.requires_grad_(False)
    assert not precision.passes_gain(net, torch.zeros(1, 3, 32, 32))
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["head.bias"]


@pytest.mark.parametrize(("slow_in", "gains"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_step_is_tried_in_both(monkeypatch, slow_in, gains):
    """A CPU that multiplies bfloat16 faster may still be slower at the gradients of some convs."""
    clock = [0.0]
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda device: True)
    monkeypatch.setattr(precision.time, "process_time", lambda: clock[0])

    def step():
        clock[0] += 3.0 if (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == slow_in else 1.0

    assert precision.step_gains(step, CPU) == gains
