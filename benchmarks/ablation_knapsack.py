"""The paper's ablation in small: knapsack against a plain global Taylor threshold at half of the MACs, on real nets.

Both use the same Taylor scores ("abs") and the same channel groups. The threshold keeps every unit whose score is at
least t (and the best one of each group); t is found by bisection so that its counted MACs are the same. Top-1 is
measured as cut, and after the statistics of the batch norms are estimated again (no gradient, no weight changed).
"inner": the residual streams are left alone (ignore=":streams"), only the channels inside the blocks compete.

    python benchmarks/ablation_knapsack.py | tee benchmarks/results/ablation_knapsack.txt

The ImageNet network is slow on one core: --imagenet-images says how many validation images are used.
"""

import argparse
import copy
import os
import shlex
import sys
import time
from datetime import datetime, timezone

import torch
from real_networks import NETWORKS
from torch import nn

import timm_knapsack as tk

import timm  # isort: skip  (timm_knapsack first: it makes this import work without torchvision's operators)


def threshold_keep(groups, scores, budget, with_streams):
    """Units with a score of at least t, the smallest t whose MACs are within the budget."""
    free = [group for group in groups if with_streams or not group.is_stream]
    everything = torch.cat([scores[group.name] for group in free]).sort().values

    def keep_at(position):
        keep = {group.name: torch.arange(group.size) for group in groups}
        for group in free:
            chosen = (scores[group.name] >= everything[position]).nonzero().flatten()
            keep[group.name] = chosen if len(chosen) else scores[group.name].argmax()[None]
        return keep

    low, high = 0, len(everything) - 1  # too large at low, fits at high
    while high - low > 1:
        middle = (low + high) // 2
        fits = groups.macs([len(units) for units in keep_at(middle).values()]) <= budget
        low, high = (low, middle) if fits else (middle, high)
    return keep_at(high)


def with_new_statistics(model, loader):
    """A copy whose batch norms hold the mean statistics over the loader."""
    model = copy.deepcopy(model).eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over the batches
        norm.train()
    with torch.no_grad():
        for images, _ in loader:
            model(images)
    return model.eval()


def top1(model, loader):
    right = seen = 0
    with torch.inference_mode():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
    return 100 * right / seen


def compare(title, model, score_loader, norm_loader, test_loader, fraction):
    start = time.perf_counter()
    print(
        f"\n{title}: {len(score_loader.dataset)} images for the scores, {len(norm_loader.dataset)} for the statistics, "
        f"top-1 on {len(test_loader.dataset)} test images"
    )
    print(f"{'':<22}{'MACs':>12}{'share':>9}{'units':>8}{'kept importance':>17}{'as cut':>9}{'new BN stats':>14}")
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, score_loader)
    original, total = tk.count_macs(model), sum(float(values.sum()) for values in scores.values())
    choices = {}
    for with_streams in (True, False):
        ignore, suffix = ((), "") if with_streams else ((":streams",), ", inner")
        result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(macs=fraction), ignore=ignore)
        counted = tk.count_macs(result.model)
        choices[f"knapsack{suffix}"] = result.keep
        choices[f"threshold{suffix}"] = threshold_keep(groups, scores, counted, with_streams)
    print(f"{'unpruned':<22}{original:>12}{1:>9.2%}{sum(groups.sizes):>8}{1:>17.2%}{top1(model, test_loader):>8.2f}%")
    rows = {}
    for name, keep in choices.items():
        slim = tk.slice_model(model, groups, keep).eval()
        macs, units = tk.count_macs(slim), sum(len(kept) for kept in keep.values())
        value = sum(float(scores[group][kept].sum()) for group, kept in keep.items())
        cut, estimated = top1(slim, test_loader), top1(with_new_statistics(slim, norm_loader), test_loader)
        rows[name] = macs
        print(f"{name:<22}{macs:>12}{macs / original:>9.2%}{units:>8}{value / total:>17.2%}", end="")
        print(f"{cut:>8.2f}%{estimated:>13.2f}%", flush=True)
    print(f"({time.perf_counter() - start:.0f} s)")
    return all(
        rows[f"knapsack{suffix}"] <= fraction * original
        and abs(rows[f"threshold{suffix}"] / rows[f"knapsack{suffix}"] - 1) < 0.005
        for suffix in ("", ", inner")
    )


def cifar(args):
    network = NETWORKS["resnet56"]()
    return compare(
        f"ResNet-56, CIFAR-10, {args.fraction:.0%} of the MACs",
        network.model,
        network.train(batch_size=64, limit=args.score_images, seed=1),
        network.train(batch_size=128, limit=1024, seed=2),
        network.test(batch_size=250, limit=args.cifar_images),
        args.fraction,
    )


def imagenet(args):
    network = NETWORKS["resnet50"]()
    return compare(
        f"ResNet-50 v1, ImageNet, 224 px, {args.fraction:.0%} of the MACs",
        network.model,
        network.train(batch_size=16, limit=args.score_images // 4, seed=1),
        network.train(batch_size=64, limit=1000, shuffle=True, drop_last=True, seed=2),
        network.test(batch_size=50, limit=args.imagenet_images),
        args.fraction,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--score-images", type=int, default=1024, help="for CIFAR; a quarter of it for ImageNet")
    parser.add_argument("--cifar-images", type=int, default=2000)
    parser.add_argument("--imagenet-images", type=int, default=500)
    parser.add_argument("--only", choices=("cifar", "imagenet"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, timm {timm.__version__}")
    print(f"one thread; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    good = [run(args) for run in (cifar, imagenet) if args.only in (None, run.__name__)]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
