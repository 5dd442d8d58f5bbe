"""ResNet-56 on CIFAR-10: choice, loss and seed told apart, ten epochs each, top-1 of the last epoch on all test images.

    python benchmarks/finetune_cifar10.py                                  # everything: days on 2 cores, resumable
    python benchmarks/finetune_cifar10.py --choices curves --losses ikd --budgets 0.5 --seeds 0 1
    python benchmarks/finetune_cifar10.py --validate --losses ikd --lr 0.01 0.03 --epochs 2     # to choose a setting

Networks are chosen by value curves (the plain call), by the paper's Taylor scores (then recovered) and by Torch-Pruning
(then with new BatchNorm statistics); each is tuned with the default loss, CE, CE + KD and CE + KD + IKD. What is not
named follows from the run, as for any user. All runs of a seed see the same images in the same order. Each run keeps
its checkpoints in --work and goes on from there when the command is given again; a run whose row is in the file is left
out. The reported figure is that of the last epoch, not of the best. --validate trains on 45 000 training images and
evaluates on the other 5000: settings are chosen there, never on the test images. The teacher knows those by heart, so
they are looked at in views, too, of which it gets about as many right as of test images. --picture draws the learning
curves of all rows.

The rows of 2026-11-16, in results/finetune_cifar10.txt, began from Taylor scores with streams left alone by hand.
"""

import argparse
import copy
import dataclasses
import json
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from finetune_starts import CHOICES, starting_point
from real_networks import CIFAR

import timm_knapsack as tk
from timm_knapsack.images.augmentation import Augmentation
from timm_knapsack.images.loaders import create_loader
from timm_knapsack.maps.views import random_views
from timm_knapsack.training.evaluation import evaluate

# weight of the labels, λ_KD, λ_IKD
LOSSES = {"default": (None, 1.0, 20.0), "ce": (1.0, 0.0, 0.0), "kd": (1.0, 1.0, 0.0), "ikd": (1.0, 1.0, 20.0)}
NAMES = {"default": "KD + inner KD", "ce": "CE", "kd": "CE + KD", "ikd": "CE + KD + inner KD"}
RESULTS = Path(__file__).resolve().parent / "results" / "finetune_cifar10.jsonl"
VIEWS = {field.name for field in dataclasses.fields(Augmentation)}
TERMS = {field.name for field in dataclasses.fields(tk.DistillationConfig)}
SPLITS = {False: ("train", "test"), True: ("train[:45000]", "train[45000:]")}  # --validate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet56", choices=["resnet56", "resnet20"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.462], help="shares of the MACs")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", nargs="+", type=float, default=[None], help="rates; by default the run's own")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--images", type=int, default=1024, help="to choose and recover with")
    parser.add_argument("--train-images", type=int, help="fewer training images; all by default")
    parser.add_argument("--precision", choices=["no", "bf16"], help="what follows from the run by default")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of configs, augmentation")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/timm-knapsack/finetune_cifar10").expanduser())
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows are appended to this file")
    parser.add_argument("--picture", type=Path, help="draw the learning curves of the file's rows, and do nothing else")
    options = parser.parse_args()
    if options.picture:
        draw(options.out, options.picture)
        return
    torch.set_num_threads(options.threads)
    for seed in options.seeds:
        for share in options.budgets:
            for choice in options.choices:
                for loss in options.losses:
                    for lr in options.lr:
                        run(options, {"share": share, "choice": choice, "loss": loss, "seed": seed, "lr": lr})


def run(options: argparse.Namespace, row: dict) -> None:
    names = ("net", "epochs", "batch_size", "images", "train_images", "precision", "validate")
    row = {**row, **{name: getattr(options, name) for name in names}, "set": sorted(options.set)}
    if any(row.items() <= known.items() for known in rows(options.out)):
        return
    teacher, start = starting_point(row["net"], row["choice"], row["share"], row["images"])
    given = {name: json.loads(value) for name, value in (each.split("=") for each in row["set"])}
    augmentation = {name: given.pop(name) for name in VIEWS & given.keys()}
    train_split, eval_split = SPLITS[row["validate"]]
    test = create_loader(CIFAR, teacher, split=eval_split, batch_size=100)
    train = create_loader(
        CIFAR, teacher, split=train_split, batch_size=row["batch_size"], training=True, seed=row["seed"],
        limit=row["train_images"], augmentation=augmentation or None,
    )  # fmt: skip
    ce, kd, ikd = LOSSES[row["loss"]]
    name = "-".join(str(value) for value in row.values()).replace("[", "").replace("]", "")
    terms = {"ce_weight": ce, "kd_weight": kd, "ikd_weight": ikd} | {n: v for n, v in given.items() if n in TERMS}
    config = tk.FinetuneConfig(
        epochs=row["epochs"], lr=row["lr"], seed=row["seed"], output_dir=str(options.work / name),
        distillation=tk.DistillationConfig(**terms), mixed_precision=row["precision"], checkpoint_every=50,
        progress=False, **{name: value for name, value in given.items() if name not in TERMS},
    )  # fmt: skip
    student, teacher = (copy.deepcopy(net).to(memory_format=torch.channels_last) for net in (start, teacher))
    began = time.monotonic()
    result = tk.finetune(student, teacher if kd or ikd else None, train, test, config, resume=True, say=print)
    if result.interrupted:
        raise SystemExit("stopped; the same command goes on")
    original = evaluate(teacher, test)["top1"]
    if row["validate"]:
        views = [(random_views(x, seed=number, share=1.0, strength=0.6), y) for number, (x, y) in enumerate(test)]
        networks = {"original": teacher, "start": start, "tuned": result.model}
        row["views"] = {name: evaluate(network, views) for name, network in networks.items()}
    row |= {
        "when": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}",
        "minutes": round((time.monotonic() - began) / 60, 1),  # of this session
        "macs": round(tk.count_macs(student) / tk.count_macs(teacher), 4),
        "original": original,
        "curve": [round(one["top1"], 2) for one in result.evaluations],  # the first is the start
        "losses": [round(one["loss"], 4) for one in result.evaluations],
        "lost": round(original - result.last_top1, 2),
        "choices": result.config.choices(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw(path: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    known = [row for row in rows(path) if not row["validate"]]
    shares = sorted({row["share"] for row in known}, reverse=True)
    figure, panels = plt.subplots(1, len(shares), figsize=(6 * len(shares), 4), squeeze=False, sharey=True)
    for panel, share in zip(panels[0], shares, strict=True):
        for row in known:
            if row["share"] == share:
                label = f"{row['choice']}, {NAMES[row['loss']]}, seed {row['seed']}"
                panel.plot(range(len(row["curve"])), row["curve"], marker=".", label=label)
        panel.axhline(known[0]["original"], color="black", linewidth=0.8, label="original")
        panel.set(title=f"{share:.1%} of the MACs", xlabel="epoch (0: as it was recovered)", ylabel="top-1, %")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
