"""recover against its floor, in the same run.

The floor of the closed form (joint=0) is one teacher pass, one and a half student passes, and the Gram products; each
of the joint fit's steps adds a pass forward and back (counted as three) and one forward to find its length. Without
views: they are more images, and cost as such.

    python benchmarks/recovery_speed.py --nets resnet56 lite0 deit_tiny resnet50 --images 512

Each network is cut to half of its MACs by its weights' magnitude (no layer below a third of its width), which takes no
images. Floor and recovery are timed in turns, twice; the faster of each counts. CPU seconds of this process are beside
wall seconds, since machines are shared. Peak memory is that of the process over what it held before recovery.
Rows go to benchmarks/results/recovery_speed.txt as they come.
"""

import argparse
import copy
import os
import resource
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from output import writer
from real_networks import NETWORKS
from torch import nn

import timm_knapsack as tk
from timm_knapsack.maps.batches import image_batches
from timm_knapsack.maps.channels_last import side_by_side
from timm_knapsack.maps.patches import count_positions, flat_weight
from timm_knapsack.maps.walk import hooked
from timm_knapsack.recovery.closed_form import JOINT_STEPS
from timm_knapsack.recovery.plans import wanted_positions

RESULTS = Path(__file__).resolve().parent / "results" / "recovery_speed.txt"
BATCH = 50


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    return tuple(now - then for now, then in zip(clock(), start, strict=True))


@torch.no_grad()
def passes(model: nn.Module, images: list[torch.Tensor]) -> tuple[float, float]:
    start = clock()
    for batch in images:
        model(batch)
    return since(start)


@torch.no_grad()
def gram_products(model: nn.Module, images: list[torch.Tensor]) -> tuple[float, float]:
    """The products that every fitted layer needs: positions × inputs², and inputs × outputs for its targets."""
    shapes = []

    def seen(layer):
        def hook(y):
            positions = min(wanted_positions(layer), count_positions(layer, y) * sum(map(len, images)))
            shapes.append((positions, tuple(flat_weight(layer).shape)))

        return hook

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with hooked(*((layer, "output", seen(layer)) for layer in layers)):
        model(images[0][:1])
    total = 0.0, 0.0
    for positions, (groups, inputs, outputs) in shapes:
        rows = min(positions, 4096)
        x, y = torch.randn(groups, rows, inputs), torch.randn(groups, rows, outputs)
        start = clock()
        _ = x.transpose(1, 2) @ x, x.transpose(1, 2) @ y
        total = tuple(t + part * positions / rows for t, part in zip(total, since(start), strict=True))
    return total


def rows(name: str, count: int) -> list[str]:
    network = NETWORKS[name]()
    model = network.model
    images = side_by_side(image_batches(network.train(batch_size=BATCH, limit=count)), model)  # as recover does
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, None, criterion="magnitude")
    result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(macs=0.5), min_keep=0.34)
    floors, times = {0: [], JOINT_STEPS: []}, {0: [], JOINT_STEPS: []}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        teacher, student = passes(model, images), passes(result.model.eval(), images)
        grams = gram_products(result.model, images)
        for joint in floors:
            each = zip(teacher, student, grams, strict=True)
            floors[joint].append([t + (1.5 + 4 * joint) * s + g for t, s, g in each])
            slim = copy.deepcopy(result.model)
            start = clock()
            tk.recover(slim, model, images, kept=result.kept_channels, joint=joint, views=False)
            times[joint].append(since(start))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    lines = []
    for joint in floors:
        floor, taken = ([min(column) for column in zip(*found[joint], strict=True)] for found in (floors, times))
        lines.append(
            f"{name:<11}{sum(map(len, images)):>7}{joint:>6}{floor[0]:>9.1f}{taken[0]:>9.1f}{taken[0] / floor[0]:>7.2f}"
            f"{floor[1]:>11.1f}{taken[1]:>9.1f}{taken[1] / floor[1]:>7.2f}{peak:>9.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETWORKS, default=["resnet56", "lite0", "deit_tiny", "resnet50"])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    say = writer(RESULTS)
    header = "net         images joint floor s  taken s  ratio  floor CPU  taken  ratio  peak GiB"
    say(f"{header}   {options.threads} threads")
    for name in options.nets:
        load = os.getloadavg()[0]
        for line in rows(name, options.images):
            say(f"{line}  {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, load {load:.1f}")


if __name__ == "__main__":
    main()
