"""Do latency budgets hold? Measured ÷ asked, on networks that are pruned and then measured again from scratch.

    python benchmarks/latency_budgets.py --out benchmarks/results/latency_budgets.txt
    python benchmarks/latency_budgets.py --runtimes torch onnxruntime --out benchmarks/results/runtimes_hold.txt

For each runtime, network and batch size: build (or load) its latency table, prune to each fraction of its own time, and
measure the original and all pruned networks in turns, in a run of their own that the pruning never saw. Scores are
random: the budget must hold for any. Lines are written as they come; a second call goes on where the first one stopped,
and says how many of all lines hold. Expect 5 to 8 minutes for each runtime, network and batch size on two idle cores:
about two hours for the second call's 20.
On a busy machine set OMP_WAIT_POLICY=PASSIVE: threads that spin at barriers wait for a core that others hold. On an
idle one leave it: sleeping threads made mobilenetv3_large_100 at batch 1 take 90 ms instead of 33.
"""

import argparse
import re
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from output import writer

import timm_knapsack as tk
from timm_knapsack.costs.latency.table import LatencyTable, compare_latency, device_name

MEASURED_TO_ASKED = re.compile(r"^[^#\n]*%\s+([\d.]+)\s+\d+", re.MULTILINE)  # the number behind the interval
MODELS = ("resnet18", "resnet50", "mobilenetv3_large_100", "efficientnet_b0", "convnext_tiny")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.7, 0.5])
    parser.add_argument("--runtimes", nargs="+", default=["torch"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timer", default="wall", help="thread: CPU time, with --threads 1, on a busy machine")
    parser.add_argument("--table-seconds", type=float, default=150)
    parser.add_argument("--check-seconds", type=float, default=30)
    parser.add_argument("--tables", type=Path, default=Path.home() / ".cache/timm-knapsack/latency")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    done = args.out.read_text() if args.out.exists() else ""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write = writer(args.out)

    if not done:
        write(f"# python benchmarks/latency_budgets.py {shlex.join(sys.argv[1:])}")
        cpu = device_name(torch.device("cpu"))
        write(f"# {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {cpu}, torch {torch.__version__}")
        write("# predicted, measured: fraction of the original's time; ±: 95 % interval of the median ratio")
        write(f"{'model':<24}{'runtime':<13}{'batch':>5}{'asked':>7}{'predicted':>10}{'measured':>9}{'±':>7}{'meas/asked':>11}"
              f"{'corrections':>12}{'MACs':>7}{'table s':>8}{'load s':>7}  stairs")  # fmt: skip
    start = time.monotonic()
    for runtime in args.runtimes:
        for batch_size in args.batch_sizes:
            for name in args.models:
                if f"{name:<24}{runtime:<13}{batch_size:>5}" not in done:
                    measure(name, runtime, batch_size, args, write)
    misses = [abs(float(match) - 1) for match in MEASURED_TO_ASKED.findall(args.out.read_text())]
    within, beyond = sum(miss <= 0.05 for miss in misses), sum(miss > 0.1 for miss in misses)
    print(f"{within} of {len(misses)} within 5 %, {beyond} beyond 10 %; {(time.monotonic() - start) / 60:.0f} min")


def measure(name: str, runtime: str, batch_size: int, args, write) -> None:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    groups = tk.find_channel_groups(model)
    path = args.tables / f"{name}-{runtime}-b{batch_size}-t{args.threads}-{args.timer}.json"
    options = {"batch_size": batch_size, "timer": args.timer, "runtime": runtime, "path": path, "progress": True}
    options["max_seconds"] = args.table_seconds
    table = LatencyTable.measure(model, groups, **options)
    start = time.monotonic()
    table = LatencyTable.measure(model, groups, **options)  # from the file
    table.cost(model, groups)
    loading = time.monotonic() - start
    table.check_seconds = args.check_seconds
    scores = {group.name: torch.rand(group.size, dtype=torch.float64) for group in groups}
    results = {}
    for fraction in args.budgets:
        try:
            budget = tk.Budget(latency=fraction, table=table)
            results[fraction] = tk.prune(model, scores=scores, budget=budget, groups=groups)
        except tk.BudgetError as error:
            write(f"{name:<24}{runtime:<13}{batch_size:>5}{fraction:>7.2f}  out of reach: {error}")
    networks = [model, *(result.model for result in results.values())]
    limits = {"precision": 0.01, "max_seconds": 1.5 * args.check_seconds}
    check = compare_latency(networks, batch_size=batch_size, timer=args.timer, runtime=runtime, **limits)
    checked = zip(results.items(), check.ratios[1:], check.uncertainty[1:], strict=True)
    for (asked, result), ratio, error in checked:
        line, macs = result.report.line("latency"), result.report.line("macs")
        write(f"{name:<24}{runtime:<13}{batch_size:>5}{asked:>7.2f}{line.counted / line.original:>10.3f}"
              f"{ratio:>9.3f}{error:>7.1%}{ratio / asked:>11.3f}{result.report.corrections:>12}"
              f"{macs.counted / macs.original:>7.3f}{table.seconds:>8.0f}{loading:>7.1f}  {table.stairs}")  # fmt: skip


if __name__ == "__main__":
    main()
