"""Importance kept at equal counted MACs: the re-costed search against one-shot linearisations.

(a) "one-shot": each unit weighs what it saves at full widths, as in the paper; the knapsack is solved exactly, once.
(b) "greedy": the same weights, solved by the published greedy.
As (a) and (b) know nothing of the products in the true cost, they are given the capacity, found by bisection, at which
their counted MACs come as near to the budget as they can. Each group keeps at least one unit in all three. Scores are
magnitudes times lognormal noise, as in budget_accuracy.py. MACs are those of the groups' terms, which the tests and
budget_accuracy.py show to be those that torch counts on the slim network.

    python benchmarks/objective.py | tee benchmarks/results/objective.txt
"""

import argparse
import os
import shlex
import sys
from datetime import datetime, timezone

import numpy as np
import torch
from budget_accuracy import noisy_magnitudes

import timm_knapsack as tk
from timm_knapsack.costs.counted import macs_cost
from timm_knapsack.pruning.width_search import ladder, search_widths

import timm  # isort: skip  (timm_knapsack first: it makes this import work without torchvision's operators)

MODELS = ("resnet50", "efficientnet_b0", "densenet121", "convnext_tiny", "vit_small_patch16_224")
FRACTIONS = (0.7, 0.5, 0.3)


def one_shot(groups, cost, scores, budget, method):
    """(value, MACs) of a single linearisation at full widths, its capacity tuned so that the true MACs fit."""
    best_first = [np.sort(scores[group.name].numpy())[::-1] for group in groups]
    values = np.concatenate([best[1:] for best in best_first])
    owner = np.repeat(np.arange(len(groups)), [group.size - 1 for group in groups])
    weights = np.rint(cost.marginal(groups.sizes)).astype(np.int64)[owner]
    low, high, found = 0, int(weights.sum()), None
    for _ in range(40):
        capacity = (low + high) // 2
        keep = tk.solve_knapsack(values, weights, capacity, method=method).keep
        counts = 1 + np.bincount(owner[keep], minlength=len(groups))
        if cost.at(counts) <= budget:
            low, found = capacity, counts
        else:
            high = capacity
        if high - low <= 1 or (found is not None and cost.at(found) > 0.9999 * budget):
            break
    value = sum(float(best[:n].sum()) for best, n in zip(best_first, found, strict=True))
    return value, cost.at(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, timm {timm.__version__}")
    print(f"one thread; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("importance kept, in per cent of all; in brackets MACs as a share of the budget")
    print(f"{'model':<24}{'budget':>7}{'re-costed':>19}{'(a) one-shot':>19}{'(b) greedy':>19}{'ours - (a)':>12}")
    worse = 0
    for name in args.models:
        torch.manual_seed(0)
        model = timm.create_model(name).eval()
        groups = tk.find_channel_groups(model)
        scores, cost = noisy_magnitudes(model, groups), macs_cost(groups)
        total = sum(float(values.sum()) for values in scores.values())
        ladders = [ladder(tk.Scores(scores).ladder(group), 1, group.size, 1) for group in groups]
        for fraction in FRACTIONS:
            budget = fraction * cost.at(groups.sizes)
            ours = search_widths(ladders, [cost], {"macs": budget})
            results = [(ours.value, cost.at(ours.counts))]
            results += [one_shot(groups, cost, scores, budget, method) for method in ("exact", "greedy")]
            worse += results[0][0] < max(value for value, _ in results[1:])
            shown = "".join(f"{100 * value / total:>9.3f} ({macs / budget:.4f})" for value, macs in results)
            print(f"{name:<24}{fraction:>7}{shown}{100 * (results[0][0] - results[1][0]) / total:>+12.3f}", flush=True)
    print(f"\nkept less than (a) or (b) in {worse} of {len(args.models) * len(FRACTIONS)} cases")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
