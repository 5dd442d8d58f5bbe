"""Int8 after pruning against int8 alone and pruning alone: top-1, ms and MB.

    python benchmarks/int8_and_pruning.py --out benchmarks/results/int8_and_pruning.txt

Lite0 and ResNet-50 with real weights; pruned by `prune` with its defaults and real images. Each of the four (original,
pruned) × (fp32, int8) is exported to ONNX, evaluated on the validation images in ONNX Runtime, and all four are timed
there in turns. Int8 is ONNX Runtime's static quantisation, calibrated on 256 training images. Lines are written as they
come; a second call leaves out networks that are there, and takes pruned networks and files from --cache. Expect 30
minutes for each network on two idle cores.
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
from timm_knapsack.costs.latency.layer_timing import Conditions
from timm_knapsack.costs.latency.network_timing import time_in_turns
from timm_knapsack.costs.latency.table import device_name
from timm_knapsack.runtimes.kinds import open_runtime
from timm_knapsack.runtimes.runtime import AsModule


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["lite0", "resnet50"])
    parser.add_argument("--budget", type=float, default=0.7, help="of the MACs")
    parser.add_argument("--images", type=int, default=1000, help="for values and recovery")
    parser.add_argument("--test-images", type=int, default=1000)
    parser.add_argument("--magnitude", action="store_true", help="no values, no recovery: to see that the script runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="at most this long to measure the four")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/timm-knapsack/int8")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = args.out.read_text() if args.out.exists() else ""
    write, start = writer(args.out), time.monotonic()
    if not done:
        cpu = device_name(torch.device("cpu"))
        write(f"# python benchmarks/int8_and_pruning.py {shlex.join(sys.argv[1:])}")
        write(f"# {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {cpu}, torch {torch.__version__}, ONNX Runtime")
        write(f"{'network':<12}{'what':<18}{'MACs':>7}{'top-1':>8}{'MB':>8}{'ms':>9}{'÷ original':>11}{'±':>7}")
    for name in args.networks:
        if f"\n{name:<12}" not in done:
            measure(name, args, write)
    print(f"{(time.monotonic() - start) / 60:.1f} min")


def measure(name: str, args, write) -> None:
    network = NETWORKS[name]()
    stored = args.cache / f"{name}-{args.budget:g}{'-magnitude' if args.magnitude else f'-{args.images}'}.pt"
    pruned = pruned_network(stored, network, args)
    runtime = open_runtime("onnxruntime", threads=args.threads)
    found = []
    for what, model, kept in (("original", network.model, name), ("pruned", pruned, stored.stem)):
        for int8 in (False, True):
            folder = args.cache / f"{kept}{'-int8' if int8 else ''}"
            file = folder / "model.onnx"
            if not file.exists():
                calibration = network.train(batch_size=32, limit=256) if int8 else None
                tk.export_model(model, "onnx", folder, int8=int8, calibration=calibration)
            run = runtime.start(file.read_bytes(), torch.empty(0))
            top1 = tk.evaluate(AsModule(run), network.test(batch_size=64, limit=args.test_images))["top1"]
            found.append((f"{what}{', int8' if int8 else ''}", tk.count_macs(model), top1, file.stat().st_size, run))
    conditions = Conditions.of(network.model, batch_size=args.batch_size, threads=args.threads, runtime="onnxruntime")
    times = time_in_turns(conditions, [run for *_, run in found], max_seconds=args.seconds)
    rows = zip(found, times.latencies, times.ratios, times.uncertainty, strict=True)
    for (what, macs, top1, size, _), latency, ratio, error in rows:
        write(f"{name:<12}{what:<18}{macs / found[0][1]:>7.3f}{top1:>8.2f}{size / 1e6:>8.2f}"
              f"{latency.median * 1e3:>9.2f}{ratio:>11.3f}{error:>7.1%}")  # fmt: skip


def pruned_network(path: Path, network, args):
    if not path.exists():
        loader = None if args.magnitude else network.train(batch_size=32, limit=args.images)
        values = {"criterion": "magnitude"} if args.magnitude else {}
        result = tk.prune(network.model, loader, budget=tk.Budget(macs=args.budget), **values)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(result.model, path)  # the benchmark's ResNet-50 has other strides than timm's
    return torch.load(path, weights_only=False)  # our own file


if __name__ == "__main__":
    main()
