"""The plain call on one model of each timm family: does `tk.prune(model, images, budget=…)` end well everywhere?

    python benchmarks/plain_calls.py [--models NAME …] [--images 16] [--timeout 900]

`make sweep` cuts every family by random scores; here the whole default runs, on random live weights and random images
of the model's own size: heads turned, value curves, trials, knapsack, cut, recovery, and what was lost measured. A row is
right if nothing was raised, the MACs are at or below the budget, all weights and outputs are finite, the saved network
loads and gives the same outputs, and the recovered network is no further from the original than the one just cut. Each
model runs in a process of its own; rows go to benchmarks/plain_calls.csv as they come, and those that are there are left
out of the next run, unless they are named.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "plain_calls.csv"
FAMILIES = ROOT / "benchmarks" / "coverage.csv"
FIELDS = ["model", "outcome", "asked", "counted", "cut_loss", "loss", "reload_error", "cpu_seconds", "groups", "images"]
BATCH = 8


def plain_call(name: str, images: int) -> dict:
    """The row of one model, in this process."""
    import timm_knapsack as tk  # isort: skip  (before timm)
    import timm
    import torch
    from coverage import randomise

    from timm_knapsack.pipeline.measured_loss import measure_loss
    from timm_knapsack.slim.example_inputs import example_input

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    randomise(model)
    groups = tk.find_channel_groups(model)
    asked = max(0.5, 1.05 * groups.macs([1] * len(groups)) / groups.macs())
    random = torch.Generator().manual_seed(1)
    loader = list(torch.randn(images, *example_input(model)[1:], generator=random).split(BATCH))
    start = time.process_time()
    result = tk.prune(model, loader, budget=tk.Budget(macs=asked))
    seconds = time.process_time() - start
    line = result.report.line("macs")
    counted = line.counted / line.original
    with torch.no_grad():
        ours = result.model.eval()(loader[0][:2])
        with tempfile.TemporaryDirectory() as folder:
            tk.save_pretrained(result, f"{folder}/slim")
            again = timm.create_model(f"local-dir:{folder}/slim", pretrained=True).eval()(loader[0][:2])
    whole = tk.turn_heads(model, loader)
    cut = tk.slice_model(whole, tk.find_channel_groups(whole), result.keep)
    lost = measure_loss(cut, whole, loader, recovered=False).measured
    faults = []
    if counted > asked * (1 + 1e-9):
        faults.append("over the budget")
    if not all(bool(value.isfinite().all()) for value in result.model.state_dict().values() if value.is_floating_point()):
        faults.append("weights that are not finite")
    if not bool(ours.isfinite().all()):
        faults.append("outputs that are not finite")
    if not torch.equal(ours, again):
        faults.append("loads as another network")
    if not result.report.loss.measured <= lost:
        faults.append("recovery made it worse")
    row = {"model": name, "outcome": "; ".join(faults) or "right", "asked": round(asked, 4), "groups": len(groups)}
    row |= {"counted": round(counted, 4), "cut_loss": f"{lost:.4g}", "loss": f"{result.report.loss.measured:.4g}"}
    row |= {"reload_error": float((ours - again).abs().max()), "cpu_seconds": round(seconds, 1), "images": images}
    return row


def in_own_process(name: str, options) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--images", str(options.images)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"model": name, "outcome": f"did not end in {options.timeout:.0f} s", "images": options.images}
    except (IndexError, ValueError):
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"model": name, "outcome": f"raised: {errors[-1][:300]}", "images": options.images}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a process of its own: prints the row
    options = parser.parse_args()
    if options.one:
        print(json.dumps(plain_call(options.one, options.images)))
        return
    with open(FAMILIES, newline="") as file:
        names = options.models or [row["model"] for row in csv.DictReader(file)]
    rows = {}
    if ROWS.exists():
        with open(ROWS, newline="") as file:
            rows = {row["model"]: row for row in csv.DictReader(file)}
    for name in names:
        if name in rows and not options.models:
            continue
        rows[name] = in_own_process(name, options)
        print(json.dumps(rows[name]), flush=True)
        with open(ROWS, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows.values())
    right = sum(row["outcome"] == "right" for row in rows.values())
    print(f"{right} of {len(rows)} right")


if __name__ == "__main__":
    main()
