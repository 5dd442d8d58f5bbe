"""Do blocks pay? Widths alone against widths and whole blocks, at the same measured time, top-1 after recovery.

    python benchmarks/depth.py --models resnet56 --images 512
    python benchmarks/depth.py --models resnet56 resnet50 deit_tiny --images 1024

For each network: a latency table of it (kept in a file), then `prune` to half of its own time without and with
``blocks=True``, with the same images, each timed in turns with the original, in a run of its own that the pruning
never saw. Rows are appended as they come; a second call leaves out those that are there. ``--timer thread`` counts CPU
time of one thread, which holds on a busy machine.
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

RESULTS = Path(__file__).parent / "results" / "depth.txt"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet56", "resnet50", "deit_tiny"])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--images", type=int, default=1024, help="to value and recover with")
    parser.add_argument("--test-images", type=int, default=None)
    parser.add_argument("--timer", default="thread")
    parser.add_argument("--table-seconds", type=float, default=120)
    parser.add_argument("--check-seconds", type=float, default=10)
    parser.add_argument("--tables", type=Path, default=Path.home() / ".cache/timm-knapsack/latency")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write = writer(args.out)
    write(f"# python benchmarks/depth.py {shlex.join(sys.argv[1:])}")
    cpu = device_name(torch.device("cpu"))
    write(f"# {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {cpu}, torch {torch.__version__}")
    write("# time: fraction of the original's, measured at the end (± its 95 % interval); loss: KL on the images given")
    for name in args.models:
        compare(name, args, write)


def compare(name: str, args, write) -> None:
    net = NETWORKS[name]()
    key = f"{name:<10} batch {args.batch_size} time {args.budget:.2f} images {args.images:<5}"
    todo = {"widths": False, "blocks": True}
    todo = {what: blocks for what, blocks in todo.items() if f"{key} {what}" not in args.out.read_text()}
    if not todo:
        return
    batches = list(net.train(limit=args.images, batch_size=64))
    model = tk.turn_heads(net.model, batches)  # as tk.prune does it
    groups = tk.find_channel_groups(model)
    path = args.tables / f"{name}-real-torch-b{args.batch_size}-t1-{args.timer}.json"
    options = {"batch_size": args.batch_size, "timer": args.timer, "path": path, "max_seconds": args.table_seconds}
    table = LatencyTable.measure(model, groups, **options)
    table.check_seconds = args.check_seconds
    curves = tk.value_curves(model, groups, batches)
    test = {"batch_size": 250, "limit": args.test_images}
    original = tk.evaluate(net.model, net.test(**test))["top1"]
    for what, blocks in todo.items():
        start = time.monotonic()
        budget = tk.Budget(latency=args.budget, table=table)
        result = tk.prune(model, batches, scores=curves, groups=groups, budget=budget, blocks=blocks)
        seconds = time.monotonic() - start
        timing = {"batch_size": args.batch_size, "timer": args.timer, "precision": 0.01}
        check = compare_latency([net.model, result.model], **timing, max_seconds=3 * args.check_seconds)
        macs, report = result.report.line("macs"), result.report
        trials = {int(count): round(loss, 4) for count, loss in report.block_trials.items()}
        write(
            f"{key} {what:<7} top-1 {tk.evaluate(result.model, net.test(**test))['top1']:.2f} of {original:.2f}, time "
            f"{check.ratios[1]:.3f} ± {check.uncertainty[1]:.1%}, MACs {macs.counted / macs.original:.3f}, loss "
            f"{report.loss.measured:.4g}, removed {len(report.blocks)} of {len(report.block_losses)}: "
            f"{' '.join(report.blocks) or '-'}; trials {trials}; {seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
