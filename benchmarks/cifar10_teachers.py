"""Top-1 of the published CIFAR-10 ResNets on all 10 000 test images, and how fast the loaders are.

    python benchmarks/cifar10_teachers.py [--weights DIR] [--data DIR] [--threads 1]

The data is what tools/get_cifar10.py writes. Expected: ResNet-56 93.39 %, ResNet-20 91.73 %. Exits with 1 if not.
"""

import argparse
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import timm_knapsack  # before timm

import timm  # isort: skip
import torch
from safetensors.torch import load_file

import timm_knapsack.models.cifar_resnet  # noqa: F401  (registers the models)
from timm_knapsack.images.loaders import create_loader

EXPECTED = {56: 93.39, 20: 91.73}  # per cent


def top1(model: torch.nn.Module, loader) -> tuple[float, float]:
    """Per cent of the images that are classified correctly, and the seconds it took."""
    start, right, seen = time.perf_counter(), 0, 0
    with torch.inference_mode():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            seen += len(labels)
    return 100 * right / seen, time.perf_counter() - start


def seconds_per_epoch(loader, batches: int) -> float:
    """Time to go through a whole epoch, from that of some of its batches."""
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    start = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return (time.perf_counter() - start) / batches * len(loader)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=Path(__file__).resolve().parents[2] / "shared/data/weights")
    parser.add_argument("--data", type=Path, default=Path("~/.cache/timm-knapsack/cifar10").expanduser())
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"$ python {shlex.join(sys.argv)}")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}, timm {timm.__version__}")
    print(f"{args.threads} thread(s); the machine was shared, so times are upper bounds\n")

    failed = False
    for depth, expected in EXPECTED.items():
        model = timm.create_model(f"cifar_resnet{depth}").eval()
        model.load_state_dict(load_file(args.weights / f"resnet{depth}.cifar10.safetensors"), strict=True)
        loader = create_loader(args.data, model, split="test", batch_size=250)
        accuracy, seconds = top1(model, loader)
        failed |= round(accuracy, 2) != expected
        print(f"cifar_resnet{depth}: {accuracy:.2f} % top-1 (expected {expected} %), {seconds:.0f} s")

    print("\none epoch of the 50 000 training images, 128 in a batch, without a model:")
    for title, options in {
        "crop + flip, in memory": {},
        "crop + flip, decoded each time": {"in_memory": False},
        "crop + flip + RandAugment, in memory": {"augmentation": {"auto_augment": "rand-m9-mstd0.5-inc1"}},
    }.items():
        start = time.perf_counter()
        loader = create_loader(args.data, model, split="train", batch_size=128, training=True, **options)
        opened = time.perf_counter() - start
        print(f"{title:38} {seconds_per_epoch(loader, 60):5.1f} s, and {opened:.1f} s once to open")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
