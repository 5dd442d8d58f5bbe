"""Forward, and forward and backward passes in bfloat16 against float32: seconds, and how far class scores move.

    python benchmarks/pass_precision.py                    # the ImageNet networks and ResNet-56; a minute

One core, a batch of 50 images, CPU time, the best of two runs of each, interleaved.
"""

import argparse
import time
from pathlib import Path

import torch
from output import writer
from real_networks import NETWORKS

from timm_knapsack.maps.distance import output_distance
from timm_knapsack.maps.precision import fast_passes

RESULTS = Path(__file__).resolve().parent / "results" / "pass_precision.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["resnet50", "lite0", "deit_tiny", "resnet56"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    say = writer(options.out)
    for name in options.nets:
        network = NETWORKS[name]()
        model = network.model.eval()
        images = next(iter(network.train(batch_size=50, limit=50)))[0].contiguous(memory_format=torch.channels_last)
        for gradients in (False, True):
            seconds, outputs = {False: [], True: []}, {}
            for _ in range(2):
                for fast in (False, True):
                    start = time.process_time()
                    with torch.set_grad_enabled(gradients), fast_passes(images.device, fast):
                        outputs[fast] = model(images)
                    if gradients:
                        outputs[fast].float().square().mean().backward()
                    seconds[fast].append(time.process_time() - start)
            whole, half = min(seconds[False]), min(seconds[True])
            moved = float(output_distance(outputs[False].detach(), outputs[True].detach(), logits=True).mean())
            say(
                f"{name:<10} {'forward and backward' if gradients else 'forward':<21} float32 {whole:.2f} s, bfloat16 "
                f"{half:.2f} s: {whole / half:.2f} x; KL {moved:.1e}"
            )


if __name__ == "__main__":
    main()
