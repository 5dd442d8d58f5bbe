"""Top-1 of pruned real networks: raw, after BN re-estimation, after closed-form recovery; no gradient step anywhere.

usage: python benchmarks/recovery.py [--nets resnet56 lite0 resnet50] [--macs 0.7 0.5] [--images 1024] [--test N]
       [--criterion taylor_bn] [--score-images 2048] [--score-batch 16] [--min-keep 0.3]

resnet56: CIFAR-10 (../shared/tools/get_cifar10.py), weights in ../shared/data/weights; scored on training images.
lite0, resnet50: ImageNet weights in ../shared/data/weights; 1000 calibration and 1000 validation images beside them.
Residual streams are left alone (--streams prunes them too), as in the paper, and linear bottlenecks without a shortcut.
Taylor scores add up: nothing in them says that the last channels of a layer are worth more. --min-keep does.
"""

import argparse
import copy
import os
import sys
import time
from datetime import datetime, timezone

import torch
from real_networks import NETWORKS

import timm_knapsack as tk
from timm_knapsack.recovery.batchnorm import reestimate_batchnorm
from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.training.evaluation import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETWORKS, default=["resnet56", "lite0", "resnet50"])
    parser.add_argument("--macs", nargs="+", type=float, default=[0.7, 0.5])
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--criterion", default="taylor_bn")
    parser.add_argument("--score-batch", type=int, default=16)
    parser.add_argument("--score-images", type=int, default=2048)
    parser.add_argument("--test", type=int, help="test images; all by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--min-keep", type=float, default=1, help="of each group: a fraction, or a count from 1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"$ python benchmarks/recovery.py {' '.join(sys.argv[1:])}")
    load = os.getloadavg()[0]
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, load {load:.1f} on 2 cores")
    print("net        asked  counted  test images  teacher    raw  BN only  recovered  lost  recovery s", flush=True)
    for name in options.nets:
        network = NETWORKS[name]()
        teacher, test = network.model, network.test(batch_size=100, limit=options.test)
        scoring = network.train(batch_size=options.score_batch, limit=options.score_images)
        calibration = network.train(batch_size=64, limit=options.images)
        base = evaluate(teacher, test)
        groups = tk.find_channel_groups(teacher)
        scores = tk.taylor_scores(teacher, groups, scoring, criterion=options.criterion)
        for macs in options.macs:
            ignore = network.bottlenecks if options.streams else (":streams", *network.bottlenecks)
            choice = {"ignore": ignore, "min_keep": options.min_keep}
            result = tk.prune(teacher, scores=scores, budget=tk.Budget(macs=macs), groups=groups, **choice)
            line = result.report.line("macs")
            raw = evaluate(result.model, test)["top1"]
            normed = evaluate(reestimate_batchnorm(copy.deepcopy(result.model), calibration), test)["top1"]
            student = copy.deepcopy(result.model)
            start = time.perf_counter()
            fits = recover_layers(student, teacher, calibration)
            seconds = time.perf_counter() - start
            recovered = evaluate(student, test)["top1"]
            print(
                f"{name:<10}{macs:>6}{line.counted / line.original:>9.4f}{base['samples']:>13}{base['top1']:>9.2f}"
                f"{raw:>7.2f}{normed:>9.2f}{recovered:>11.2f}{base['top1'] - recovered:>6.2f}{seconds:>12.0f}",
                flush=True,
            )
            skipped = [f"{fit.name}: {fit.skipped}" for fit in fits if fit.skipped]
            if skipped:
                print(f"           left as they were: {'; '.join(skipped)}", flush=True)


if __name__ == "__main__":
    main()
