"""Every default step on networks written by hand to be got wrong: prune, refine, finetune, evaluate.

    python benchmarks/plain_calls_by_hand.py [NAME …]

The networks are those of nasty_nets.py. `tests/channels/test_nasty_networks.py` compares slim and masked networks that
are cut to random widths; here the whole default runs, on 48 random images: value curves, trials, knapsack, cut,
recovery, then a little of `refine` and one epoch of `finetune`. A line is "right", "frozen" (nothing can go), "refused"
(our own error: read it) or "FAILED" (any other exception). Minutes on one core.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timm_knapsack as tk
from benchmarks.nasty_nets import NASTY, Nasty
from timm_knapsack.errors import KnapsackError


def every_step(model: torch.nn.Module) -> str:
    """What became of the model; our own errors are raised."""
    torch.manual_seed(0)
    loader = [(torch.randn(16, 3, 6, 6), torch.arange(16) % 4) for _ in range(3)]
    groups = tk.find_channel_groups(model, loader[0][0][:2])
    least = groups.macs([1] * len(groups)) / groups.macs() if len(groups) else 1.0
    if least > 0.95:
        return "frozen"
    result = tk.prune(model, loader, budget=tk.Budget(macs=max(0.6, 1.05 * least)))
    tk.refine(result.model, model, loader, kept=result.kept_channels, epochs=2)
    config = tk.FinetuneConfig(epochs=1, progress=False)
    tuned = tk.finetune(result.model, model, loader, loader, config, kept=result.kept_channels, say=lambda line: None)
    found = tk.evaluate(tuned.model, loader)
    outputs = tuned.model(loader[0][0])
    return "right" if found["samples"] == 48 and bool(outputs.isfinite().all()) else "FAILED: outputs are not finite"


def main() -> None:
    torch.set_num_threads(1)
    count = {}
    for name in sys.argv[1:] or NASTY:
        start = time.monotonic()
        try:
            outcome = every_step(Nasty(name).eval())
        except KnapsackError as error:
            outcome = f"refused: {error}"
        except Exception as error:  # whatever it is, it is what this looks for
            outcome = f"FAILED: {type(error).__name__}: {error}"
        kind = outcome.partition(":")[0]
        count[kind] = count.get(kind, 0) + 1
        print(f"{name:<50}{time.monotonic() - start:6.1f} s  {outcome[:300]}", flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in count.items()))


if __name__ == "__main__":
    main()
