"""Every timm family through trace, prune, oracle and round trip: writes benchmarks/coverage.csv and docs/coverage.md.

usage: python benchmarks/coverage.py [--models NAME …] [--list FILE] [--families] [--jobs 2] [--timeout 900] [--out CSV]
       python benchmarks/coverage.py --models NAME … --update       (replaces these rows of the table)

By default one model of each timm model file: the list in ../shared/data/timm_families.txt where it is there, else the
smallest model of every module of the installed timm (--families forces this). Each model runs in a process of its own.
Checks, per model:
- groups found and verified; MACs from the trace = torch's FlopCounterMode / 2, before and after pruning
- pruned to 50 % of the MACs with random scores (or as low as it goes, up to 60 %)
- oracle, in float64: slim = masked to 1e-4 relative, over the groups that no norm runs across
- forward and backward in training mode; ChannelConfig → JSON → resize_model gives the same shapes
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIELDS = [
    "model",
    "module",
    "groups",
    "removable",
    "verified",
    "macs_left",
    "oracle",
    "exact_groups",
    "status",
    "trace_s",
    "total_s",
    "frozen_layers",
    "frozen_why",
    "error",
]
FLOOR = 0.6  # a family counts as covered when at most this share of its MACs is left


def check(name: str) -> dict:
    """All checks for one model, in this process."""
    import timm
    import torch

    import timm_knapsack as tk
    from timm_knapsack.slim.example_inputs import example_input

    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.perf_counter()
    model = timm.create_model(name).eval()
    row = {"model": name, "module": type(model).__module__.rsplit(".", 1)[-1]}
    randomise(model)
    began = time.perf_counter()
    groups = tk.find_channel_groups(model)
    row["trace_s"] = round(time.perf_counter() - began, 2)
    full = groups.macs()
    least = groups.macs([1] * len(groups))
    row.update(groups=len(groups), removable=round(1 - least / full, 4), frozen_layers=len(groups.frozen))
    row["verified"] = groups.verified + (f" ({groups.verified_note})" if groups.verified_note else "")
    row["frozen_why"] = "; ".join(sorted({r for r in groups.frozen.values() if r != "the model's output"})[:3])[:400]
    shape = example_input(model)
    failures = []
    if counted(model, shape) != full:
        failures.append(f"{full} MACs traced, torch counts {counted(model, shape)}")
    scores = tk.taylor_scores(model, groups, criterion="random")
    target = max(0.5, least / full * 1.02)
    result = tk.prune(model, scores=scores, budget=tk.Budget(macs=target), groups=groups)
    sizes = [len(result.keep[g.name]) for g in groups]
    row["macs_left"] = round(result.report.line("macs").counted / full, 4)
    at_sizes, by_torch = groups.macs(sizes), counted(result.model, shape)
    if result.report.line("macs").counted != at_sizes or by_torch != at_sizes:
        failures.append(f"{at_sizes} MACs predicted for the slim model, torch counts {by_torch}")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    row["oracle"], row["exact_groups"], wrong = oracle(model, groups, x)
    failures += wrong
    failures += trains(result.model, x)
    failures += rebuilds(name, groups, result.keep, result.model)
    row["total_s"] = round(time.perf_counter() - start, 1)
    row["error"] = "; ".join(failures)
    row["status"] = "wrong" if failures else "pass" if row["macs_left"] <= FLOOR else "frozen"
    return row


def counted(net, shape) -> float:
    """MACs of one forward pass by torch's counter."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from timm_knapsack.slim.copying import copy_with, on_meta

    try:
        shadow = on_meta(net).requires_grad_(False)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            shadow(torch.empty(shape, device="meta"))
    except RuntimeError:  # asks for values: real tensors; torch does not count fused attention of the CPU
        shadow = copy_with(net, lambda _, t: torch.zeros_like(t, device="cpu") if t.is_meta else t).eval()
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            shadow(torch.zeros(shape))
    return counter.get_total_flops() / 2


def oracle(model, groups, x) -> tuple[float | None, int, list[str]]:
    """Slim against masked, in float64: (largest relative difference, groups that can show it, what is wrong)."""
    import torch

    import timm_knapsack as tk
    from timm_knapsack.slim.cutting import mask_model

    draw = random.Random(0)
    exact = {
        g.name: sorted(draw.sample(range(g.size), max(1, int(g.size * draw.uniform(0.3, 0.8)))))
        for g in groups
        if not g.crosses_norm
    }
    if not exact:  # a norm runs across every group, and masked means something else than removed
        return None, 0, []
    double = model.double()
    with torch.no_grad():
        masked = first(mask_model(double, groups, exact)(x.double()))
        slim = first(tk.slice_model(double, groups, exact)(x.double()))
        moved = (masked - first(double(x.double()))).abs().max().item()
    model.float()
    difference = float(f"{((slim - masked).abs().max() / masked.abs().max()).item():.2e}")
    failures = []
    if not difference <= 1e-4:
        failures.append(f"slim differs from masked by {difference}")
    if not moved > 0:
        failures.append("masking changes nothing, so the oracle shows nothing")
    return difference, len(exact), failures


def trains(slim, x) -> list[str]:
    """What is wrong with a forward and backward pass in training mode."""
    import torch

    slim = slim.train()
    y = first(slim(torch.cat([x, x.flip(-1)]) if x.shape[-1] <= 300 else x))
    y.float().square().mean().backward()
    if not torch.isfinite(y).all() or all(p.grad is None for p in slim.parameters()):
        return ["forward and backward of the slim model is not finite"]
    return []


def rebuilds(name: str, groups, keep, slim) -> list[str]:
    """What is wrong with the architecture that the ChannelConfig rebuilds from JSON, on the meta device."""
    import timm
    import torch

    import timm_knapsack as tk
    from timm_knapsack.slim.cutting import channel_config_of

    config = tk.ChannelConfig.from_json(channel_config_of(groups, keep, name).to_json())
    with torch.device("meta"):
        rebuilt = tk.resize_model(timm.create_model(name), config)
    if {k: v.shape for k, v in rebuilt.state_dict().items()} != {k: v.shape for k, v in slim.state_dict().items()}:
        return ["the ChannelConfig does not rebuild the slim model's shapes"]
    return []


def first(output):
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output


def randomise(model) -> None:
    """Weights for which every channel matters, as after training; zero-initialised branches would hide mistakes."""
    import torch

    from timm_knapsack.channels.live_weights import live_values

    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        drawn = isinstance(tensor, torch.nn.Parameter) or name.endswith(("running_mean", "running_var"))
        if drawn and tensor.is_floating_point():
            tensor.data.copy_(live_values(name, tensor.shape, generator))


def smallest_of_each_family() -> list[str]:
    import timm
    import torch

    import timm_knapsack  # noqa: F401

    names = []
    for module in timm.list_modules():
        sizes = []
        for name in timm.list_models(module=module):
            if "knapsack" in name or "cifar" in name:
                continue
            with torch.device("meta"):
                sizes.append((sum(p.numel() for p in timm.create_model(name).parameters()), name))
        if sizes:
            names.append(min(sizes)[1])
    return names


def run(name: str, timeout: float) -> dict:
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if lines:
            return json.loads(lines[-1])
        error = (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        error = f"more than {timeout} s"
    return {"model": name, "status": "crash", "error": error[:300]}


def table(rows: list[dict], command: str) -> str:
    covered = sum(row["status"] == "pass" for row in rows)
    crashed = sum(row["status"] in ("crash", "wrong") for row in rows)
    lines = [
        "# What can be pruned",
        "",
        f"One model of each timm model file: {covered} of {len(rows)} prune to at most {FLOOR:.0%} of their MACs and",
        f"pass every check; {crashed} crash or come out wrong. Made by `{command}` on {date.today()}; the checks are",
        "described at the top of benchmarks/coverage.py. *removable*: share of the MACs gone when each group keeps",
        "a single unit. *oracle*: largest relative difference between the slim model and the masked one, in float64;",
        "none where a norm runs across every group (masked is not the same as removed there).",
        "",
        "| model | groups | removable | MACs left | oracle | result | trace, s | frozen: why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["model"],
            row.get("groups", ""),
            row.get("removable", ""),
            row.get("macs_left", ""),
            row.get("oracle", ""),
            row["status"] + (f": {row['error']}" if row.get("error") else ""),
            row.get("trace_s", ""),
            (row.get("frozen_why") or "").replace("|", "/")[:160],
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--list", default=str(ROOT.parent / "shared/data/timm_families.txt"))
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--update", action="store_true", help="replace the rows of --models, keep the others")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--out", default=str(ROOT / "benchmarks/coverage.csv"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(check(options.one)))
        return
    if options.models:
        names = options.models
    elif Path(options.list).exists() and not options.families:
        names = [line.split("\t")[0] for line in open(options.list) if line.strip() and not line.startswith("#")]
    else:
        names = smallest_of_each_family()
    rows: dict[str, dict] = {}
    if options.update:
        with open(options.out, newline="") as file:
            rows = {row["model"]: row for row in csv.DictReader(file)}
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, row in enumerate(pool.map(lambda name: run(name, options.timeout), names), 1):
            rows[row["model"]] = row
            print(
                f"{number:>4}/{len(names)} {row['model']:<40} {row['status']:<7} left {row.get('macs_left', '')} "
                f"oracle {row.get('oracle', '')} {row.get('total_s', '')} s {row.get('error', '')}",
                flush=True,
            )
            with open(options.out, "w", newline="") as file:  # results as they come: a long run may be stopped
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows.values())
    done = list(rows.values())
    if options.out == parser.get_default("out") and (options.update or not options.models):
        (ROOT / "docs/coverage.md").write_text(table(done, "make sweep"))
        from fitted_layers import write_page

        write_page()  # what recovery fits, below
    bad = [row["model"] for row in done if row["status"] in ("crash", "wrong")]
    print(f"{sum(row['status'] == 'pass' for row in done)} of {len(done)} pass; wrong or crashed: {bad or 'none'}")


if __name__ == "__main__":
    main()
