"""The plain call on one model of each timm family: does `tk.prune(model, images, budget=…)` end well everywhere?

    python benchmarks/plain_calls.py [--models NAME …] [--images 16] [--timeout 900]

`make sweep` cuts every family by random scores; here the whole default runs, on random live weights and random images
of the model's own size: heads turned, value curves, trials, knapsack, cut, recovery, and what was lost measured. A
row is right if nothing was raised, the MACs are at or below the budget, all weights and outputs are finite, the saved
network loads and gives the same outputs, and the recovered network is no further from the original than the one just
cut. Each model runs in a process of its own; rows go to benchmarks/plain_calls.csv as they come, and those that are
there are left out of the next run, unless they are named.
"""

import tempfile
import time
from pathlib import Path

from families import parser_of, tried

ROWS = Path(__file__).resolve().parent / "plain_calls.csv"
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
    if not all(bool(value.isfinite().all()) for value in result.model.state_dict().values()):
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


def main() -> None:
    rows = tried(plain_call, parser_of(__doc__, images=16, timeout=900).parse_args(), ROWS, FIELDS)
    print(f"{sum(row['outcome'] == 'right' for row in rows)} of {len(rows)} right")


if __name__ == "__main__":
    main()
