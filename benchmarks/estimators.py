"""Which statistic of interleaved passes says best how much faster a pruned network is? The one that scatters least.

    python benchmarks/estimators.py --out benchmarks/results/estimators.txt

The original and a network of half its MACs run in turns, two passes each, for `--seconds`. The record is cut into
stretches of `--stretch` seconds; each statistic gives the ratio of the two times from each stretch alone. Printed: mean
and standard deviation over the stretches. `compare_latency` uses the last one, whose ratio is printed for each stretch
too, with the original's time: it shows how far the machine itself moves.
"""

import argparse
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from output import writer

import timm_knapsack as tk
from timm_knapsack.costs.latency.layer_timing import Conditions, time_pass
from timm_knapsack.costs.latency.network_timing import quiet_ratios

# record: round × network (original, pruned) × pass (first, second)
STATISTICS = {
    "median of ratios, second passes": lambda r: np.median(r[:, 1, 1] / r[:, 0, 1]),
    "ratio of medians, second passes": lambda r: np.median(r[:, 1, 1]) / np.median(r[:, 0, 1]),
    "ratio of minima, second passes": lambda r: r[:, 1, 1].min() / r[:, 0, 1].min(),
    "quieter half, second passes": lambda r: np.median(quiet_ratios(list(r[:, :, 1:]))[1]),
    "quieter half, faster passes": lambda r: np.median(quiet_ratios(list(r))[1]),
}


def record(name: str, batch_size: int, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """When each round ended, and round × network × pass: seconds."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    groups = tk.find_channel_groups(model)
    scores = {group.name: torch.rand(group.size, dtype=torch.float64) for group in groups}
    slim = tk.prune(model, scores=scores, budget=tk.Budget(macs=0.5), groups=groups, round_to=8).model
    conditions = Conditions.of(model, batch_size=batch_size)
    clock, images = conditions.clock(), conditions.images()
    networks = [conditions.started(net) for net in (model, slim)]
    order, ends, rounds = np.random.default_rng(0), [], []
    with conditions.active():
        for network in networks:
            time_pass(network, images, clock)
        start = time.monotonic()
        while not ends or ends[-1] < seconds:
            times = np.zeros((2, 2))
            for i in order.permutation(2):
                times[i] = [time_pass(networks[i], images, clock) for _ in range(2)]
            rounds.append(times)
            ends.append(time.monotonic() - start)
    return np.array(ends), np.array(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18:8", "convnext_tiny:1", "mobilenetv3_large_100:1"])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--stretch", type=float, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    say = writer(options.out)
    say(f"$ python benchmarks/estimators.py {shlex.join(sys.argv[1:])}")
    say(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, {options.threads} threads")
    for entry in options.networks:
        name, batch_size = entry.split(":")
        ends, rounds = record(name, int(batch_size), options.seconds)
        stretches = [rounds[ends // options.stretch == k] for k in range(int(options.seconds // options.stretch))]
        say(f"{name}, batch {batch_size}: {len(stretches)} stretches of {options.stretch:g} s, {len(rounds)} rounds")
        for label, statistic in STATISTICS.items():
            ratios = [statistic(stretch) for stretch in stretches]
            say(f"  {label:<34} {np.mean(ratios):.3f} ± {np.std(ratios, ddof=1) / np.mean(ratios):.1%}")
        say("  ratio " + " ".join(f"{ratio:.3f}" for ratio in ratios))
        say("  ms    " + " ".join(f"{1e3 * np.median(stretch[:, 0]):5.1f}" for stretch in stretches))


if __name__ == "__main__":
    main()
