"""Predicted against measured loss of random widths: does the sum of value curves rank networks as the truth does?

    python benchmarks/predicted_loss.py --net resnet56 | tee benchmarks/results/predicted_loss_resnet56.txt
    python benchmarks/predicted_loss.py --net lite0 | tee benchmarks/results/predicted_loss_lite0.txt

Random width vectors, their MACs spread from --least to --most of the original's. Each is cut out of the network (the
units that the curves keep at that width), recovered on the calibration images in closed form (joint=0, without views,
as in the trials of `prune`), and its KL divergence from the original's outputs measured on other images: test images,
without their labels. The curves predict what the groups lose together (`ValueCurves.joint_loss`), as `prune` does
before its trials. Beside it stands that of the paper's scores: the sum of the Taylor scores ("abs") of the units that
are gone. Spearman's rank correlation with the measured KL says how good either is.
The plot of the networks that were measured goes to docs/images/predicted_loss.png (each network's points are kept
beside the results, so that the networks can be measured one after the other).
"""

import argparse
import json
import math
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from real_networks import NETWORKS
from scipy.stats import spearmanr

import timm_knapsack as tk
from timm_knapsack.maps.distance import output_distance
from timm_knapsack.slim.cutting import kept_outputs

ROOT = Path(__file__).resolve().parent.parent
BATCH = 50


def random_counts(groups, share: float, generator: np.random.Generator) -> list[int]:
    """Widths of all groups, at random, whose MACs are the given share of the original's.

    Each group's share is drawn around a common level on a logistic scale; the level is found by bisection. Streams are
    drawn from narrower around their full width in half of the vectors, and left whole in the others, as a choice does.
    """
    offsets = generator.normal(size=len(groups)) * generator.choice([0.6, 1.6])
    whole_streams = generator.random() < 0.5

    def counts(level):
        result = []
        for group, offset in zip(groups, offsets, strict=True):
            kept = 1 / (1 + math.exp(-(level + offset)))
            if group.is_stream:
                kept = 1.0 if whole_streams else max(kept, 0.5) ** 0.3
            result.append(min(max(2, round(group.size * kept)), group.size))
        return result

    low, high = -8.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if groups.macs(counts(middle)) <= share * groups.macs() else (low, middle)
    return counts(low)


def measure(options) -> list[dict]:
    network = NETWORKS[options.net]()
    model = network.model
    calibration = list(network.train(batch_size=BATCH, limit=options.images))
    held_out = [images for images, _ in network.test(batch_size=100, limit=options.test)]
    with torch.inference_mode():
        wanted = [model(images) for images in held_out]
    groups = tk.find_channel_groups(model)
    curves = tk.value_curves(model, groups, calibration)
    scores = tk.taylor_scores(model, groups, calibration)
    generator = np.random.default_rng(0)
    print("vector   MACs  predicted  measured KL  Taylor sum gone  same class  seconds", flush=True)
    points = []
    for number in range(options.vectors):
        start = time.perf_counter()
        share = options.most + (options.least - options.most) * number / max(options.vectors - 1, 1)
        counts = random_counts(groups, share, generator)
        keep = {
            group.name: torch.from_numpy(curves.ladder(group).units(count)).long()
            for group, count in zip(groups, counts, strict=True)
        }
        slim = tk.slice_model(model, groups, keep).eval()
        tk.recover(slim, model, calibration, kept=kept_outputs(groups, keep), joint=0, views=False)
        with torch.inference_mode():
            made = [slim(images) for images in held_out]
        pairs = list(zip(wanted, made, strict=True))
        loss = torch.cat([output_distance(before, after, True) for before, after in pairs]).mean()
        same = torch.cat([before.argmax(1) == after.argmax(1) for before, after in pairs]).float().mean()
        gone = sum(float(scores[name].sum() - scores[name][units].sum()) for name, units in keep.items())
        kept = zip(groups, counts, strict=True)
        point = {
            "macs": groups.macs(counts) / groups.macs(),
            "predicted": curves.joint_loss(curves[group.name].losses()[count] for group, count in kept),
            "measured": float(loss),
            "taylor": gone,
            "same": float(same),
        }
        points.append(point)
        print(
            f"{number + 1:>6}{point['macs']:>7.3f}{point['predicted']:>11.4g}{point['measured']:>13.4g}"
            f"{gone:>17.4g}{point['same']:>12.1%}{time.perf_counter() - start:>9.0f}",
            flush=True,
        )
    return points


def correlations(points: list[dict]) -> tuple[float, float]:
    """Spearman's of the curves' prediction and of the Taylor sum with the measured loss."""
    measured = [point["measured"] for point in points]
    return tuple(float(spearmanr([p[key] for p in points], measured).statistic) for key in ("predicted", "taylor"))


def plot(found: dict[str, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, rows = pyplot.subplots(len(found), 2, figsize=(9, 4 * len(found)), squeeze=False, layout="constrained")
    for axes, (name, points) in zip(rows, found.items(), strict=True):
        measured = [point["measured"] for point in points]
        titles = ("loss predicted by value curves", "Taylor scores of what is gone, summed")
        keys = ("predicted", "taylor")
        for axis, title, key, rank in zip(axes, titles, keys, correlations(points), strict=True):
            axis.loglog([point[key] for point in points], measured, "o", alpha=0.8)
            axis.set(title=f"{name}: rank correlation {rank:.3f}", xlabel=title, ylabel="measured KL")
            if key == "predicted":
                ends = [min(measured), max(measured)]
                axis.loglog(ends, ends, "--", color="grey", linewidth=1)
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                side.set_major_formatter("{x:g}")
                side.set_minor_formatter(NullFormatter())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=NETWORKS, default="resnet56")
    parser.add_argument("--vectors", type=int, default=20)
    parser.add_argument("--images", type=int, default=1024, help="calibration images")
    parser.add_argument("--test", type=int, default=1000, help="images that the loss is measured on")
    parser.add_argument("--least", type=float, default=0.3, help="of the MACs")
    parser.add_argument("--most", type=float, default=0.85, help="of the MACs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "predicted_loss.png")
    parser.add_argument("--points", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the points")
    parser.add_argument("--plot-only", action="store_true", help="of the points that are there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    print(f"$ python benchmarks/predicted_loss.py {' '.join(sys.argv[1:])}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, load {load:.1f}")
    if options.plot_only:
        plot_all(options)
        return
    points = measure(options)
    curves, taylor = correlations(points)
    print(f"rank correlation with the measured KL: value curves {curves:.3f}, Taylor sum {taylor:.3f}")
    (options.points / f"predicted_loss_{options.net}.json").write_text(json.dumps(points, indent=1) + "\n")
    plot_all(options)


def plot_all(options) -> None:
    files = sorted(options.points.glob("predicted_loss_*.json"))
    plot({file.stem.removeprefix("predicted_loss_"): json.loads(file.read_text()) for file in files}, options.plot)
    print(f"plot: {options.plot}")


if __name__ == "__main__":
    main()
