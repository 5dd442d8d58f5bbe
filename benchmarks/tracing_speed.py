"""How long finding the coupled channels takes, beside Torch-Pruning's dependency graph of the same model.

Torch-Pruning is no dependency of ours; give it a folder of its own:

    pip install --no-deps --target /some/folder torch-pruning==1.6.1
    PYTHONPATH=/some/folder python benchmarks/tracing_speed.py | tee benchmarks/results/tracing_speed.txt

CPU time on one thread; the four ways take turns, the first turn warms up, medians of the others. "trace" is
find_channel_groups(verify="none"), "+ shapes" also removes channels from every group on the meta device, "+ values",
the default, then compares outputs in float64; build_dependency runs the model forward and backward, and does not
verify. Groups are not the same thing in both.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from datetime import datetime, timezone

import torch

import timm_knapsack as tk

import timm  # isort: skip  (timm_knapsack first: it makes this import work without torchvision's operators)

MODELS = ("resnet50", "convnext_tiny", "vit_small_patch16_224")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    try:
        import torch_pruning
    except ImportError:
        parser.error("torch_pruning is not there; see the top of this file")
    torch.set_num_threads(1)
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, timm {timm.__version__}")
    print(f"Torch-Pruning {torch_pruning.__version__}; one thread, CPU seconds; load {os.getloadavg()[0]:.1f}\n")
    print(f"{'model':<26}{'trace':>8}{'+ shapes':>10}{'+ values':>10}{'Torch-Pruning':>15}{'theirs/trace':>14}")
    slower = 0
    for name in args.models:
        model = timm.create_model(name).eval()
        example = torch.randn(1, *model.pretrained_cfg["input_size"])
        ways = {
            "trace": lambda model=model: tk.find_channel_groups(model, verify="none"),
            "shapes": lambda model=model: tk.find_channel_groups(model, verify="shapes"),
            "values": lambda model=model: tk.find_channel_groups(model, verify="values"),
            "theirs": lambda model=model, x=example: torch_pruning.DependencyGraph().build_dependency(model, x),
        }
        seconds = {way: [] for way in ways}
        for turn in range(args.rounds + 1):
            for way, run in ways.items():
                start = time.process_time()
                run()
                if turn:
                    seconds[way].append(time.process_time() - start)
        trace, shapes, values, theirs = (statistics.median(times) for times in seconds.values())
        slower += trace > theirs
        print(f"{name:<26}{trace:>8.3f}{shapes:>10.3f}{values:>10.3f}", end="")
        print(f"{theirs:>15.3f}{theirs / trace:>14.2f}", flush=True)
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
