"""Does the time of a net depend on what malloc did before? Page faults and time of a pass, heap as it comes or kept.

    python benchmarks/page_faults.py [--model efficientnet_b0] [--rounds 40]

Each line is a comparison as `compare_latency` makes it: three new copies of the same network, in turns. With glibc the
number of faults per pass depends on where their tensors fall, and the time with it.
"""

import argparse
import resource
import sys
from contextlib import nullcontext
from datetime import datetime, timezone

import numpy as np
import torch

from timm_knapsack.costs.latency.layer_timing import Conditions, time_pass
from timm_knapsack.maps.steady_memory import memory_kept

import timm  # isort: skip  (timm_knapsack first: it makes this import work without torchvision's operators)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="efficientnet_b0")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"$ python benchmarks/page_faults.py {' '.join(sys.argv[1:])}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, {options.model}, batch 1")
    print("memory       comparison  page faults  ms (10 % to 90 %)")
    model = timm.create_model(options.model).eval()
    conditions = Conditions.of(model)
    images, clock = conditions.images(), conditions.clock()
    for how, memory in (("as it comes", nullcontext), ("kept", memory_kept)):
        for comparison in range(4):
            networks = [conditions.started(model) for _ in range(3)]
            faults, times = [], []
            with memory(), torch.inference_mode():
                for _ in range(options.rounds):
                    for network in networks:
                        time_pass(network, images, clock)
                        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                        times.append(time_pass(network, images, clock) * 1e3)
                        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            low, median, high = np.quantile(times, (0.1, 0.5, 0.9))
            print(
                f"{how:<12}{comparison:>11}{np.median(faults):>13.0f}  {median:.1f} ({low:.1f} to {high:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
