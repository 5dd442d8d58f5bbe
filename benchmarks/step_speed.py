"""What makes a training step of a pruned ResNet-56 faster on this CPU: memory layout and bf16, interleaved.

    python benchmarks/step_speed.py --batch-size 32 --rounds 5 --threads 1

One CE + KD + inner KD step, forward and backward, of the original and a student with inner widths at about half of the
MACs. All ways run in turn in one process, so that a busy machine slows all; a ratio is the median over the rounds of
the time against the plain step of the same round.
"""

import argparse
import copy
import itertools
import statistics
import time
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path

import timm_knapsack as tk  # isort: skip  (before timm)
import timm
import torch
from output import writer

from timm_knapsack.training.distillation import DistillationConfig, DistillationModule

RESULTS = Path(__file__).resolve().parent / "results" / "step_speed.txt"
WAYS = {  # memory format, bf16
    "plain": (torch.contiguous_format, False),
    "channels_last": (torch.channels_last, False),
    "bf16": (torch.contiguous_format, True),
    "channels_last, bf16": (torch.channels_last, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    teacher = timm.create_model("cifar_resnet56").eval()
    groups = tk.find_channel_groups(teacher)
    keep = {group.name: range(group.size if group.is_stream else max(1, group.size // 2)) for group in groups}
    images, targets = torch.randn(options.batch_size, 3, 32, 32), torch.randint(0, 10, (options.batch_size,))
    steps = {}
    for name, way in WAYS.items():
        steps[name] = step(teacher, tk.slice_model(teacher, groups, keep), images, targets, *way)
    for one in steps.values():
        one()
    taken = {name: [] for name in steps}
    for _, (name, one) in itertools.product(range(options.rounds), steps.items()):
        began = time.perf_counter()
        one()
        taken[name].append(time.perf_counter() - began)
    say = writer(RESULTS)
    command = f"--batch-size {options.batch_size} --rounds {options.rounds} --threads {options.threads}"
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}"
    say(f"$ python benchmarks/step_speed.py {command}   # {now}")
    for name, seconds in taken.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, taken["plain"], strict=True))
        say(f"{name:<22}{statistics.median(seconds):7.2f} s{ratio:7.2f} × plain")


def step(teacher, student, images, targets, layout, bf16):
    """A step of this kind, to be called again and again."""
    teacher, student = copy.deepcopy(teacher).to(memory_format=layout), student.to(memory_format=layout)
    images = images.contiguous(memory_format=layout)
    module = DistillationModule(student, teacher, DistillationConfig(), example=images[:1])
    module.init_from_data([images[:2]])
    module.train()

    def run() -> None:
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            losses = module(images, targets)
        losses.total.backward()

    return run


if __name__ == "__main__":
    main()
