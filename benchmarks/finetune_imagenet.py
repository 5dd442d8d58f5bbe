"""Fine-tuning on a thousand ImageNet images without labels: strong augmentation, early stop on 200 that are held back.

    python benchmarks/finetune_imagenet.py                                  # three networks: many hours on 2 cores
    python benchmarks/finetune_imagenet.py --nets lite0 --epochs 1 --threads 1

Each network starts from the plain call, tk.prune(model, loader, budget=tk.Budget(macs=f)), with all 1000 calibration
images; 800 of them are then tuned on with KD and inner KD alone, and the weights that are closest to the original on
the 200 others are tested on the 1000 test images. The start is one of the candidates (it was fitted on the 200 as well,
so tuning must be clearly better to be taken). Runs are resumable, rows are appended, a row that is there is left out.
"""

import argparse
import copy
import json
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from finetune_cifar10 import rows
from finetune_starts import starting_point
from real_networks import NETWORKS
from safetensors.torch import load_file

import timm_knapsack as tk
from timm_knapsack.images.loaders import create_loader
from timm_knapsack.training.evaluation import evaluate

BUDGETS = {"resnet50": 0.5, "lite0": 0.5, "deit_tiny": 0.54}
STRONG = {"scale": (0.35, 1.0), "auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.1}
RESULTS = Path(__file__).resolve().parent / "results" / "finetune_imagenet.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, help="what follows from the run by default")
    parser.add_argument("--kd", type=float, default=1.0)
    parser.add_argument("--ikd", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/timm-knapsack/finetune_imagenet").expanduser())
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows are appended to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for net in options.nets:
        run(net, options)


def run(net: str, options: argparse.Namespace) -> None:
    names = ("epochs", "patience", "batch_size", "lr", "kd", "ikd", "seed")
    row = {"net": net, "share": BUDGETS[net], **{name: getattr(options, name) for name in names}}
    if any(row.items() <= known.items() for known in rows(options.out)):
        return
    network = NETWORKS[net]()
    teacher, start = starting_point(net, "curves", BUDGETS[net], 1000)
    common = {"labels": "ignore", "batch_size": options.batch_size, "seed": options.seed}
    train = create_loader(
        network.train_images, teacher, split="train[:800]", training=True, augmentation=STRONG, **common
    )
    held = create_loader(network.train_images, teacher, split="train[800:]", **common)
    test = network.test(batch_size=50)
    folder = options.work / "-".join(str(value) for value in row.values())
    config = tk.FinetuneConfig(
        epochs=options.epochs, lr=options.lr, patience=options.patience, seed=options.seed, output_dir=str(folder),
        checkpoint_every=5, distillation=tk.DistillationConfig(kd_weight=options.kd, ikd_weight=options.ikd),
        progress=False,
    )  # fmt: skip
    student, began = copy.deepcopy(start), time.monotonic()
    result = tk.finetune(student, teacher, train, held, config, resume=True, say=print)
    if result.interrupted:
        raise SystemExit("stopped; the same command goes on")
    student.load_state_dict(load_file(result.best_path / "model.safetensors"))
    row |= {
        "when": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}",
        "minutes": round((time.monotonic() - began) / 60, 1),  # of this session
        "original": evaluate(teacher, test)["top1"],
        "start": evaluate(start, test)["top1"],
        "tuned": evaluate(student, test)["top1"],
        "best_epoch": result.best["epoch"],
        "held_kl": [round(one["kl"], 4) for one in result.evaluations],
        "choices": result.config.choices(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
