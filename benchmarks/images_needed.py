"""How many images do `recover` and `refine` need, and do they ever make a network worse? A curve, plotted.

    python benchmarks/images_needed.py --nets resnet20 lite0

Each network is cut once to half of its MACs, by value curves of all calibration images (the power of the losses is left
at its default). Then the same cut network is recovered, and refined after that, with the first 16, 64, 256 and all of
the images. "lower" counts the steps (cut → recovered → refined) after which top-1 on the test images is lower by more
than two standard errors of the difference. Rows go to benchmarks/results/images_needed.txt as they come, the picture to
docs/images/images_needed.png.
"""

import argparse
import copy
import os
import time
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

import torch
from output import writer
from real_networks import NETWORKS

import timm_knapsack as tk
from timm_knapsack.maps.batches import image_batches
from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.recovery.refinement import refine_steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "images_needed.txt"
COUNTS = (16, 64, 256, 1024)
BATCH = 32
STAGES = ("cut", "recovered", "refined")
COLUMNS = "net         share images tested original     cut  recovered  refined  lower"


@torch.no_grad()
def right(model, test) -> torch.Tensor:
    """Whether each test image is named rightly."""
    model.eval()
    return torch.cat([model(images).argmax(1) == labels for images, labels in test])


def is_lower(before: torch.Tensor, after: torch.Tensor) -> bool:
    """By more than two standard errors: of images that changed, as many fall as rise, but for chance."""
    fallen, risen = int((before & ~after).sum()), int((after & ~before).sum())
    return fallen - risen > 2 * (fallen + risen) ** 0.5


def measure(name: str, share: float, say) -> None:
    network = NETWORKS[name]()
    model = network.model
    images = image_batches(network.train(batch_size=BATCH, limit=max(COUNTS)))
    test = list(network.test(batch_size=100))
    groups = tk.find_channel_groups(model)
    curves = tk.value_curves(model, groups, images, progress=False)
    cut = tk.sweep(model, curves, [tk.Budget(macs=share)], groups=groups)[0]
    known = right(model, test)
    start_of_row = f"{name:<11}{share:>6}"
    for count in COUNTS:
        start = time.process_time()
        few = list(torch.cat(images)[:count].split(BATCH))
        made = {"cut": right(cut.model, test)}
        slim = copy.deepcopy(cut.model)
        recover_layers(slim, model, few, kept=cut.kept_channels)
        made["recovered"] = right(slim, test)
        refine_steps(slim, model, few, kept=cut.kept_channels)
        made["refined"] = right(slim, test)
        top1 = [100 * float(each.float().mean()) for each in made.values()]
        lower = sum(is_lower(made[a], made[b]) for a, b in pairwise(STAGES))
        say(
            f"{start_of_row}{sum(map(len, few)):>7}{len(known):>7}{100 * float(known.float().mean()):>9.2f}"
            f"{top1[0]:>8.2f}{top1[1]:>11.2f}{top1[2]:>9.2f}{lower:>7}  {time.process_time() - start:.0f} CPU-s, "
            f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, load {os.getloadavg()[0]:.1f}"
        )


def plot(rows: list[list[str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = dict.fromkeys((row[0], row[1]) for row in rows)
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.5 * len(names), 3.6), squeeze=False, layout="constrained")
    for axis, key in zip(axes[0], names, strict=True):
        own = {int(row[2]): row for row in rows if (row[0], row[1]) == key}
        counts = sorted(own)
        axis.axhline(float(own[counts[0]][4]), color="grey", linestyle="--", linewidth=1, label="original")
        for stage, column in zip(STAGES, (5, 6, 7), strict=True):
            axis.semilogx(counts, [float(own[n][column]) for n in counts], "o-", base=2, label=stage)
        axis.set(title=f"{key[0]} at {float(key[1]):.0%} of its MACs", xlabel="images", ylabel="top-1, %")
        axis.set_ylim(0, 100)
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.legend()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETWORKS, default=["resnet20", "resnet56", "lite0"])
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "images_needed.png")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    new = not RESULTS.exists()
    say = writer(RESULTS)
    if new:
        say(COLUMNS)
    for name in options.nets:
        measure(name, options.share, say)
    plot([line.split() for line in RESULTS.read_text().splitlines() if line.split()[0] in NETWORKS], options.plot)


if __name__ == "__main__":
    main()
