"""What value curves cost: their time against one forward and backward pass over the same images, in one run.

    python benchmarks/curve_cost.py | tee benchmarks/results/curve_cost.txt

Wall time, and CPU time of the process, which other work on the machine disturbs less. The images are in memory; the
passes are run before and after the curves, and the faster of the two counts. Issue 21 asks for a ratio of at most 10 on
ResNet-50, and at most 60 s on ResNet-56 on two cores.
"""

import argparse
import os
import sys
import time
from datetime import datetime, timezone

import torch
from real_networks import NETWORKS
from torch.nn import functional as F

import timm_knapsack as tk

BATCH = 32


def forward_and_backward(model, batches) -> None:
    for images, labels in batches:
        F.cross_entropy(model(images), labels).backward()
    model.zero_grad()


def timed(work, *args) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work(*args)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETWORKS, default=["resnet50", "resnet56"])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    print(f"$ python benchmarks/curve_cost.py {' '.join(sys.argv[1:])}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, load {load:.1f}", end="")
    print(f" on {os.cpu_count()} cores, {options.threads} threads")
    print("net        images  groups  pass s  curves s  ratio   in CPU time: pass s  curves s  ratio", flush=True)
    for name in options.nets:
        network = NETWORKS[name]()
        model = network.model
        batches = list(network.train(batch_size=BATCH, limit=options.images))
        groups = tk.find_channel_groups(model)
        forward_and_backward(model, batches[:1])  # the first pass of a process is slow
        passes = [timed(forward_and_backward, model, batches)]
        wall, cpu = timed(lambda m=model, g=groups, b=batches: tk.value_curves(m, g, b, progress=False))
        passes.append(timed(forward_and_backward, model, batches))
        one, one_cpu = (min(times) for times in zip(*passes, strict=True))
        print(
            f"{name:<11}{sum(map(len, (y for _, y in batches))):>6}{len(groups):>8}{one:>8.1f}{wall:>10.1f}"
            f"{wall / one:>7.1f}{one_cpu:>22.1f}{cpu:>10.1f}{cpu / one_cpu:>7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
