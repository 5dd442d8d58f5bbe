"""Images per second and peak memory of taylor_scores beside a plain forward + backward loop over the same batches.

Speed: both in one process, turn by turn, the median of the turns' ratios. Memory: the peak resident size of a fresh
process for each (VmHWM of Linux; ru_maxrss would begin with the parent's), less that of a process that only builds
model, groups and data.

    python benchmarks/scoring_speed.py | tee benchmarks/results/scoring_speed.txt

Exits with 1 if taylor_scores runs at less than 0.9 × the images/s, or takes more than 1.2 × the memory.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch.nn import functional as F

import timm_knapsack as tk

import timm  # isort: skip  (timm_knapsack first: it makes this import work without torchvision's operators)

CASES = (("resnet18", 32, 64), ("resnet50", 16, 64))  # model, batch size, pixels
ROUNDS, BATCHES = 5, 2
LEAST_SPEED, MOST_MEMORY = 0.9, 1.2


def setting(name, batch_size, pixels):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = timm.create_model(name).eval()
    groups = tk.find_channel_groups(model)
    batches = [
        (torch.randn(batch_size, 3, pixels, pixels), torch.randint(0, 1000, (batch_size,))) for _ in range(BATCHES)
    ]
    return model, groups, batches


def plain(model, groups, batches):
    for images, labels in batches:
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
    model.zero_grad()


def scoring(model, groups, batches):
    tk.taylor_scores(model, groups, batches, progress=False)


def nothing(model, groups, batches):
    with torch.no_grad():
        model(batches[0][0][:1])


WAYS = {"plain": plain, "taylor_scores": scoring, "nothing": nothing}


def speeds(name, batch_size, pixels):
    """Images per second of each way, and the median ratio of neighbouring turns."""
    model, groups, batches = setting(name, batch_size, pixels)
    seconds = {"plain": [], "taylor_scores": []}
    for turn in range(ROUNDS + 1):
        for way in ("plain", "taylor_scores") if turn % 2 else ("taylor_scores", "plain"):
            start = time.process_time()
            WAYS[way](model, groups, batches)
            if turn:  # the first warms up
                seconds[way].append(time.process_time() - start)
    images = BATCHES * batch_size
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    return *(images / statistics.median(times) for times in seconds.values()), ratio


def peak_mb(way, case):
    """Peak resident size in MB of a fresh process."""
    command = [sys.executable, __file__, "--measure", way, *map(str, case)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs=4, metavar=("WAY", "MODEL", "BATCH", "PIXELS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        way, name, batch_size, pixels = args.measure
        WAYS[way](*setting(name, int(batch_size), int(pixels)))
        status = Path("/proc/self/status").read_text()
        print(int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1024)
        return 0
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, timm {timm.__version__}")
    print(f"one thread, CPU time; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(f"{'model':<10}{'batch':>6}{'px':>5}{'plain im/s':>12}{'scores im/s':>13}{'ratio':>8}", end="")
    print(f"{'plain MB':>11}{'scores MB':>11}{'ratio':>8}   (MB: peak above an idle process)")
    failed = False
    for case in CASES:
        plain_speed, score_speed, speed = speeds(*case)
        idle, plain_peak, score_peak = (peak_mb(way, case) for way in ("nothing", "plain", "taylor_scores"))
        memory = (score_peak - idle) / (plain_peak - idle)
        failed |= speed < LEAST_SPEED or memory > MOST_MEMORY
        name, batch_size, pixels = case
        print(f"{name:<10}{batch_size:>6}{pixels:>5}{plain_speed:>12.1f}{score_speed:>13.1f}{speed:>8.3f}", end="")
        print(f"{plain_peak - idle:>11.0f}{score_peak - idle:>11.0f}{memory:>8.3f}", flush=True)
    print(f"\nasked: speed at least {LEAST_SPEED}, memory at most {MOST_MEMORY}: {'MISSED' if failed else 'met'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
