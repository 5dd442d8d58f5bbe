"""Top-1 of pruned real networks: raw, after BN re-estimation, after closed-form recovery; no gradient step anywhere.

usage: python benchmarks/recovery.py [--nets resnet56 lite0 resnet50] [--macs 0.7 0.5] [--images 1024] [--test N]
       [--criterion taylor_bn] [--score-images 2048] [--score-batch 16]

resnet56: CIFAR-10 (../shared/tools/get_cifar10.py), weights in ../shared/data/weights; scored on training images.
lite0, resnet50: ImageNet weights in ../shared/data/weights; 1000 calibration and 1000 validation images beside them.
Residual streams are left alone (--streams prunes them too), as in the paper.
"""

import argparse
import copy
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import timm_knapsack as tk  # isort: skip  (before timm)
import timm
import torch
from safetensors.torch import load_file

from timm_knapsack.evaluation import evaluate
from timm_knapsack.image_data import create_loader
from timm_knapsack.recovery import recover_layers, reestimate_batchnorm

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
CIFAR = Path(os.environ.get("CIFAR10", "~/.cache/timm-knapsack/cifar10")).expanduser()


def resnet56():
    net = timm.create_model("cifar_resnet56")
    net.load_state_dict(load_file(SHARED / "weights/resnet56.cifar10.safetensors"))
    return net.eval(), str(CIFAR), "train", str(CIFAR), "test", {}


def lite0():
    net = timm.create_model("tf_efficientnet_lite0")
    net.load_state_dict(load_file(SHARED / "weights/tf_efficientnet_lite0.in1k.safetensors"))
    return net.eval(), str(SHARED / "imagenet_calibration"), "train", str(SHARED / "imagenet_val"), "test", {}


def resnet50():
    """The v1 network: strides sit in the first conv of a stage; preprocessing as in facts.md."""
    net = timm.create_model("resnet50")
    for layer in (net.layer2, net.layer3, net.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    weights = load_file(SHARED / "weights/resnet50_v1.in1k.fp16.safetensors")
    net.load_state_dict(
        {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    )
    net.pretrained_cfg = {
        **net.pretrained_cfg,
        "mean": (123.68 / 255, 116.779 / 255, 103.939 / 255),
        "std": (0.229, 0.224, 0.225),
        "input_size": (3, 224, 224),
        "crop_pct": 0.875,
    }
    return net.eval(), str(SHARED / "imagenet_calibration"), "train", str(SHARED / "imagenet_val"), "test", {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["resnet56", "lite0", "resnet50"])
    parser.add_argument("--macs", nargs="+", type=float, default=[0.7, 0.5])
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--criterion", default="taylor_bn")
    parser.add_argument("--score-batch", type=int, default=16)
    parser.add_argument("--score-images", type=int, default=2048)
    parser.add_argument("--test", type=int, help="test images; all by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"$ python benchmarks/recovery.py {' '.join(sys.argv[1:])}")
    load = os.getloadavg()[0]
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, load {load:.1f} on 2 cores")
    print("net        asked  counted  test images  teacher    raw  BN only  recovered  lost  recovery s", flush=True)
    for name in options.nets:
        teacher, source, split, test_source, test_split, _ = globals()[name]()
        scoring = create_loader(
            source, teacher, split=split, batch_size=options.score_batch, limit=options.score_images
        )
        calibration = create_loader(source, teacher, split=split, batch_size=64, limit=options.images)
        test = create_loader(test_source, teacher, split=test_split, batch_size=100, limit=options.test)
        base = evaluate(teacher, test)
        groups = tk.find_channel_groups(teacher)
        scores = tk.taylor_scores(teacher, groups, scoring, criterion=options.criterion)
        for macs in options.macs:
            ignore = () if options.streams else (":streams",)
            result = tk.prune(teacher, scores=scores, budget=tk.Budget(macs=macs), groups=groups, ignore=ignore)
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
