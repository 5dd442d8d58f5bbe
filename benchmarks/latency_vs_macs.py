"""At equal measured time, which budget keeps more importance? At equal importance, which network is faster?

    python benchmarks/latency_vs_macs.py --out benchmarks/results/latency_vs_macs.txt

Networks with real weights, Taylor scores on real images. Four ways to prune, several budgets each, all networks and the
original measured in turns in one run:

    latency      Budget(latency=…) with a measured table; as predicted, no correction
    macs         Budget(macs=…)
    macs/8       Budget(macs=…), round_to=8: the usual advice for hardware
    linear time  the paper's: a channel costs its layer's time ÷ its channels, one knapsack, no re-costing

The last lines of each network compare the latency nets with the other ways by interpolation between their points
(importance over the logarithm of time; times that fall where importance rises are noise and are averaged). Lines are
written as they come, network by network; a second call leaves out those that are there. Expect 10 to 15 minutes for
each network on two idle cores.
"""

import argparse
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from output import writer
from real_networks import NETWORKS
from scipy.optimize import isotonic_regression

import timm_knapsack as tk
from timm_knapsack.costs.cost import Cost
from timm_knapsack.costs.latency.plan import find_timed_layers
from timm_knapsack.costs.latency.table import LatencyTable, compare_latency, device_name
from timm_knapsack.pruning.width_search import ladder, search_widths

SETTINGS = {"resnet50": (1, 128, 16), "lite0": (1, 128, 16), "resnet56": (32, 256, 64)}  # batch; scored images, batch
BUDGETS = {
    "latency": (0.8, 0.65, 0.5),
    "macs": (0.75, 0.55, 0.4, 0.28, 0.18),
    "macs/8": (0.75, 0.55, 0.4, 0.28, 0.18),
    "linear time": (0.9, 0.75, 0.6, 0.45),
}


class LinearTime(Cost):
    """The paper's: what one channel of a layer takes, whatever the other widths are."""

    name, unit = "latency", "s"

    def __init__(self, weights):
        self._weights = np.array(weights)

    def at(self, kept):
        return float(self._weights @ np.asarray(kept, dtype=float))

    def marginal(self, kept):
        return self._weights


def linear_time(groups, cost, layers) -> LinearTime:
    weights = np.zeros(len(groups))
    for layer, seconds in zip(layers, cost.layers_at(groups.sizes), strict=True):
        made = layer.widths[0]
        for group, channels in made.units:
            weights[group] += seconds * channels / made.at(groups.sizes)
    return LinearTime(weights)


def linear_keep(groups, scores, time, fraction):
    ladders = [ladder(scores.ladder(group), 1, group.size, 1) for group in groups]
    solution = search_widths(ladders, [time], {"latency": fraction * time.at(groups.sizes)})
    rungs = zip(groups, ladders, solution.counts, strict=True)
    return {group.name: torch.from_numpy(rung.units(count)) for group, rung, count in rungs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runtime", default="torch")
    parser.add_argument("--timer", default="wall", help="thread: CPU time, with --threads 1, on a busy machine")
    parser.add_argument("--table-seconds", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=120, help="at most this long to measure all networks in turns")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/timm-knapsack/latency")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.cache.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write = writer(args.out)

    done = args.out.read_text() if args.out.exists() else ""
    cpu = device_name(torch.device("cpu"))
    write(f"# python benchmarks/latency_vs_macs.py {shlex.join(sys.argv[1:])}")
    write(f"# {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {cpu}, torch {torch.__version__}, {args.runtime}")
    for name in args.networks:
        if f"\n{name}, {args.runtime}, batch" not in done:
            compare(name, args, write)


def compare(name, args, write):
    torch.manual_seed(0)
    network, (batch_size, images, score_batch) = NETWORKS[name](), SETTINGS[name]
    model, loader = network.model, network.train(batch_size=score_batch, limit=images)
    groups = tk.find_channel_groups(model)
    saved = args.cache / f"{name}-scores.safetensors"
    if not saved.exists():
        tk.taylor_scores(model, groups, loader).save(saved)
    scores = tk.Scores.load(saved, groups)
    total = float(sum(values.sum() for values in scores.values()))
    options = {"batch_size": batch_size, "timer": args.timer, "runtime": args.runtime}
    path = args.cache / f"{name}-{args.runtime}-b{batch_size}-t{args.threads}-{args.timer}.json"
    limits = {"max_seconds": args.table_seconds, "progress": True}
    table = LatencyTable.measure(model, groups, path=path, **options, **limits)
    table.elsewhere = True  # predictions only: all networks are measured together below
    cost = table.cost(model, groups)
    time = linear_time(groups, cost, find_timed_layers(model, groups, table.conditions))
    runs = []
    for way, fractions in BUDGETS.items():
        for fraction in fractions:
            if way == "linear time":
                keep = linear_keep(groups, scores, time, fraction)
            else:
                latency = way == "latency"
                budget = tk.Budget(latency=fraction, table=table) if latency else tk.Budget(macs=fraction)
                step = 8 if way == "macs/8" else 1
                keep = tk.prune(model, scores=scores, budget=budget, groups=groups, round_to=step).keep
            macs = groups.macs([len(keep[group.name]) for group in groups]) / groups.macs()
            importance = float(sum(scores[group][units].sum() for group, units in keep.items())) / total
            runs.append((way, fraction, importance, macs, tk.slice_model(model, groups, keep)))
    networks = [model, *(run[-1] for run in runs)]
    check = compare_latency(networks, **options, max_seconds=args.seconds)
    write(f"\n{name}, {args.runtime}, batch {batch_size}, {len(check.latencies[0].samples)} rounds, original "
          f"{check.latencies[0].median * 1e3:.1f} ms, stairs {table.stairs}")  # fmt: skip
    write(f"{'way':<14}{'asked':>6}{'MACs':>8}{'time':>8}{'±':>7}{'importance':>12}{'lost':>8}")
    points: dict[str, list[tuple[float, float]]] = {}
    for run, ratio, error in zip(runs, check.ratios[1:], check.uncertainty[1:], strict=True):
        way, fraction, importance, macs, _ = run
        write(f"{way:<14}{fraction:>6.2f}{macs:>8.3f}{ratio:>8.3f}{error:>7.1%}{importance:>12.4f}"
              f"{1 - importance:>8.4f}")  # fmt: skip
        points.setdefault(way, []).append((importance, ratio))
    for importance_here, time_here in points.pop("latency"):
        for way, curve in points.items():
            importances, times = (np.array(axis) for axis in zip(*sorted(curve), strict=True))
            times = np.log(isotonic_regression(times).x)
            nothing = {"left": np.nan, "right": np.nan}  # no point to either side: nothing to compare
            at_time = np.interp(np.log(time_here), times, importances, **nothing)
            at_importance = np.exp(np.interp(importance_here, importances, times, **nothing))
            write(f"latency net at {time_here:.3f} keeps {importance_here:.4f}; {way} at that time {at_time:.4f}, "
                  f"at that importance {at_importance:.3f} ({at_importance / time_here:.2f}× the time)")  # fmt: skip


if __name__ == "__main__":
    main()
