"""Half of whose time? A network pruned to half of its time in one runtime, measured in the others, too.

    python benchmarks/runtime_budgets.py --out benchmarks/results/runtime_budgets.txt

For each runtime a latency table, and a network pruned to the budget of that time: values are value curves on real
images, refitted by `recover`, accuracies on the validation images. Then all of them and the original in turns in every
runtime. The last lines say for each runtime who is faster. A second call leaves out what is done: tables and pruned
networks are kept in --cache, measured lines in --out. Expect 40 minutes on two idle cores, half of it for the values.
"""

import argparse
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from output import writer
from real_networks import NETWORKS

import timm_knapsack as tk
from timm_knapsack.costs.latency.table import LatencyTable, compare_latency, device_name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--runtimes", nargs="+", default=["torch", "onnxruntime"])
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=512, help="for values and recovery")
    parser.add_argument("--test-images", type=int, default=1000)
    parser.add_argument("--magnitude", action="store_true", help="no images: to see that the script runs")
    parser.add_argument("--table-seconds", type=float, default=180)
    parser.add_argument("--check-seconds", type=float, default=40, help="at most this long for each correction")
    parser.add_argument("--seconds", type=float, default=60, help="at most this long to measure in each runtime")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/timm-knapsack/runtime_budgets")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.cache.mkdir(parents=True, exist_ok=True)
    done = args.out.read_text() if args.out.exists() else ""
    write, start = writer(args.out), time.monotonic()
    if not done:
        cpu = device_name(torch.device("cpu"))
        write(f"# python benchmarks/runtime_budgets.py {shlex.join(sys.argv[1:])}")
        write(f"# {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {cpu}, torch {torch.__version__}")
        write(f"{'network':<12}{'measured in':<13}{'pruned for':<13}{'ms':>9}{'÷ original':>11}{'±':>7}{'MACs':>7}"
              f"{'top-1':>8}")  # fmt: skip
    network = NETWORKS[args.network]()
    pruned = {runtime: pruned_for(runtime, network, args) for runtime in args.runtimes}
    for runtime in args.runtimes:
        if f"{args.network:<12}{runtime:<13}" in done:
            continue
        models = [network.model, *(model for model, _ in pruned.values())]
        options = {"runtime": runtime, "batch_size": args.batch_size, "max_seconds": args.seconds}
        found = compare_latency(models, **options)
        rows = zip(["original", *pruned], models, found.latencies, found.ratios, found.uncertainty, strict=True)
        for name, model, latency, ratio, error in rows:
            share = tk.count_macs(model) / tk.count_macs(network.model)
            top1 = f"{pruned[name][1]:>8.2f}" if name in pruned and pruned[name][1] is not None else f"{'–':>8}"
            write(f"{args.network:<12}{runtime:<13}{name:<13}{latency.median * 1e3:>9.2f}{ratio:>11.3f}{error:>7.1%}"
                  f"{share:>7.3f}{top1}")  # fmt: skip
        own, others = found.ratios[1 + args.runtimes.index(runtime)], found.ratios[1:]
        best = args.runtimes[min(range(len(others)), key=others.__getitem__)]
        write(f"# in {runtime}: the one pruned for it takes {own:.3f} of the original; fastest is the one for {best}")
    print(f"{(time.monotonic() - start) / 60:.1f} min")


def pruned_for(runtime: str, network, args):
    """The network pruned to the budget of a runtime's time, and its top-1; from the cache where it is there."""
    name = f"{args.network}-{runtime}-b{args.batch_size}-t{args.threads}"
    folder = args.cache / f"{name}-{args.budget:g}{'-magnitude' if args.magnitude else f'-{args.images}'}"
    if not (folder / "kept.pt").exists():
        model = network.model
        groups = tk.find_channel_groups(model)
        options = {"batch_size": args.batch_size, "runtime": runtime, "max_seconds": args.table_seconds}
        table = LatencyTable.measure(model, groups, path=args.cache / f"{name}.json", progress=True, **options)
        table.check_seconds = args.check_seconds
        budget = tk.Budget(latency=args.budget, table=table)
        loader = None if args.magnitude else network.train(batch_size=32, limit=args.images)
        values = {"criterion": "magnitude"} if args.magnitude else {"scores": values_of(network, groups, loader, args)}
        result = tk.prune(model, loader, budget=budget, groups=groups, **values)
        folder.mkdir(parents=True, exist_ok=True)
        top1 = None
        if not args.magnitude:
            top1 = tk.evaluate(result.model, network.test(batch_size=64, limit=args.test_images))["top1"]
        # The benchmark's ResNet-50 has other strides than timm's, so that save_pretrained would refuse it.
        torch.save({"model": result.model, "top1": top1}, folder / "kept.pt")
    kept = torch.load(folder / "kept.pt", weights_only=False)  # our own file
    return kept["model"], kept["top1"]


def values_of(network, groups, loader, args):
    path = args.cache / f"{args.network}-{args.images}.safetensors"
    if not path.exists():
        tk.value_curves(network.model, groups, loader).save(path)
    return tk.ValueCurves.load(path, groups)


if __name__ == "__main__":
    main()
