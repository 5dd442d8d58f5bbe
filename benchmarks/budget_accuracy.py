"""Does a MACs budget come out as asked? Prunes timm models to 0.7, 0.5 and 0.3 of their MACs and counts what is left.

Values are made up, so that no data is needed and no two channels are alike: value curves as `prune` takes them by
default, of magnitudes times lognormal noise, with a scale of each group's own at three widths; or, with --values
scores, the magnitudes themselves, as the paper's method takes them. "counted" is read off the physical slim network by
torch's flop counter, not predicted. "one unit" is the smallest amount of MACs that one more unit of any group would add
to the result. Exits with 1 if a result is above its budget, or misses it by more than
0.5 % and by more than one unit.

    python benchmarks/budget_accuracy.py | tee benchmarks/results/budget_accuracy.txt
"""

import argparse
import os
import shlex
import sys
import time
from datetime import datetime, timezone

import numpy as np
import torch

import timm_knapsack as tk
from timm_knapsack.costs.counted import macs_cost
from timm_knapsack.values.curves import GroupCurve, ValueCurves
from timm_knapsack.values.measured_curves import WIDTHS

import timm  # isort: skip  (timm_knapsack first: it makes this import work without torchvision's operators)

MODELS = (
    "resnet18",
    "resnet50",
    "resnet101",
    "ecaresnet50d",
    "efficientnet_b0",
    "mobilenetv3_large_100",
    "regnety_004",
    "resnext50_32x4d",
    "densenet121",
    "convnext_tiny",
    "vit_small_patch16_224",
    "swin_tiny_patch4_window7_224",
)
FRACTIONS = (0.7, 0.5, 0.3)
NEAR = 0.005


def noisy_magnitudes(model, groups, seed=0):
    """Magnitudes times lognormal noise, each group with a level of its own."""
    generator = torch.Generator().manual_seed(seed)
    scores = tk.taylor_scores(model, groups, criterion="magnitude")
    for name, values in scores.items():
        noise = torch.randn(len(values), generator=generator, dtype=torch.float64)
        level = torch.randn(1, generator=generator, dtype=torch.float64)
        scores[name] = values / values.mean() * (0.7 * noise + 0.5 * level).exp()
    return scores


def noisy_curves(model, groups, seed=0):
    """Curves whose errors are sums of noisy magnitudes and whose losses are unlike powers of them."""
    generator = np.random.default_rng(seed)
    curves = {}
    for name, values in noisy_magnitudes(model, groups, seed).items():
        energy = values.square().numpy()
        order = energy.argsort()
        error = np.append(0.0, energy[order].cumsum())[::-1]
        counts = np.unique(np.clip(np.round(len(order) * np.array(WIDTHS)), 1, max(len(order) - 1, 1)).astype(int))
        loss = error[counts] ** generator.uniform(0.7, 1.6) * generator.lognormal(-3, 1.5)
        loss *= generator.lognormal(0, 0.4, len(counts))  # measured ones are noisy, and may even rise with the width
        curves[name] = GroupCurve(order, error, counts, loss)
    return ValueCurves(curves)


VALUES = {"curves": noisy_curves, "scores": noisy_magnitudes}


def one_unit(groups, result):
    """The least that one more unit of any group would add to the result."""
    counts = [len(result.keep[group.name]) for group in groups]
    slopes = macs_cost(groups).marginal(counts)
    return min((s for s, n, group in zip(slopes, counts, groups, strict=True) if n < group.size), default=0.0)


def verdict(asked, counted, unit):
    """Words for how a result meets its budget; the second is whether it does."""
    if counted > asked:
        return "ABOVE", False
    if counted >= asked * (1 - NEAR):
        return "yes", True
    return ("one unit", True) if asked - counted < unit else ("NO", False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--values", choices=VALUES, default="curves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, timm {timm.__version__}")
    print(f"one thread; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, so times are upper bounds\n")
    print("MACs of one image at the model's own input size; seconds are for prune() on traced groups and given values")
    header = f"{'model':<30}{'share':>6}{'asked':>15}{'counted':>15}{'counted/asked':>15}{'within 0.5 %':>14}{'s':>8}"
    print(header)
    failed = 0
    for name in args.models:
        torch.manual_seed(0)
        model = timm.create_model(name).eval()
        start = time.perf_counter()
        groups = tk.find_channel_groups(model)
        traced = time.perf_counter() - start
        scores = VALUES[args.values](model, groups)
        original = tk.count_macs(model)
        for fraction in FRACTIONS:
            start = time.perf_counter()
            try:
                result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(macs=fraction))
            except tk.BudgetError as error:
                failed += 1
                print(f"{name:<30}{fraction:>6}  {error}")
                continue
            seconds = time.perf_counter() - start
            asked, counted = fraction * original, tk.count_macs(result.model)
            words, good = verdict(asked, counted, one_unit(groups, result))
            failed += not good
            print(
                f"{name:<30}{fraction:>6}{asked:>15.0f}{counted:>15}{counted / asked:>15.5f}{words:>14}{seconds:>8.2f}",
                flush=True,
            )
        print(f"{'':<30}(tracing and verifying {len(groups)} groups took {traced:.1f} s)", flush=True)
    print(f"\n{failed} of {len(args.models) * len(FRACTIONS)} results miss their budget")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
