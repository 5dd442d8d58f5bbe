"""The defaults of fine-tuning on several sizes of data: where a run starts, and where it ends.

    python benchmarks/finetune_defaults.py --cases digits450 cifar5000 --epochs 1 --threads 1
    python benchmarks/finetune_defaults.py --rates           # rates around the one that is chosen, on cifar5000

Networks are cut to half of their MACs by the plain call. All accuracies are on training images that were held back
(450 digits, 2000 images of CIFAR-10), never on test images: the defaults were chosen with them. The digits' network is
the one that `timm-knapsack quickstart` trains (--digits-weights quickstart/base.safetensors). Rows are appended to
results/finetune_defaults.jsonl; those that are there are left out.
"""

import argparse
import copy
import json
from datetime import datetime, timezone
from pathlib import Path

import torch
from finetune_cifar10 import rows
from real_networks import CIFAR, NETWORKS

import timm_knapsack as tk
from timm_knapsack.images.loaders import create_loader

import timm  # isort: skip
from safetensors.torch import load_file

RESULTS = Path(__file__).resolve().parent / "results" / "finetune_defaults.jsonl"
# weight of the labels, λ_KD, λ_IKD
DEFAULT, INNER, LOGITS, LABELS = (None, 1.0, 20.0), (1.0, 1.0, 20.0), (1.0, 1.0, 0.0), (1.0, 0.0, 0.0)
RATES = [
    *((INNER, rate, False) for rate in (0.004, 0.0125, 0.04)),
    (INNER, 0.003, True),
    *((LOGITS, rate, False) for rate in (0.0012, 0.0035, 0.0125)),
    *((LABELS, rate, False) for rate in (0.0035, 0.0125)),
]


def digits(count: int, weights: Path):
    from timm_knapsack.pipeline.digits import load_digits
    from timm_knapsack.pipeline.quickstart import MODEL

    model = timm.create_model(MODEL, num_classes=10)
    model.load_state_dict(load_file(weights))
    (images, labels), _ = load_digits()
    held = create_loader((images[897:], labels[897:]), model, batch_size=150)
    source = (images[:count], labels[:count])
    return model.eval(), lambda **options: create_loader(source, model, **options), held


def cifar(count: int):
    model = NETWORKS["resnet20"]().model
    held = create_loader(CIFAR, model, split="train[48000:]", batch_size=100)
    split = f"train[:{min(count, 48000)}]"
    return model, lambda **options: create_loader(CIFAR, model, split=split, **options), held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ("digits450", "cifar5000", "cifar48000")
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--epochs", nargs="+", type=int, default=[1])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[128])
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--digits-weights", type=Path, default=Path("quickstart/base.safetensors"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for case in ["cifar5000"] if options.rates else options.cases:
        runs = [(*one, 1, 128) for one in RATES] if options.rates else []
        runs = runs or [(DEFAULT, None, None, e, b) for e in options.epochs for b in options.batch_sizes]
        todo = [row for row in (described(case, *one) for one in runs) if not known(row, options.out)]
        if todo:
            model, loader, held = digits(450, options.digits_weights) if case == "digits450" else cifar(int(case[5:]))
            start = tk.prune(model, loader(batch_size=64, limit=512), budget=tk.Budget(macs=0.5)).model
            for row in todo:
                run(row, model, start, loader, held, options.out)


def described(case: str, weights: tuple, rate, frozen, epochs: int, batch: int) -> dict:
    loss = dict(zip(("ce_weight", "kd_weight", "ikd_weight"), weights, strict=True))
    return {"case": case, **loss, "lr": rate, "frozen": frozen, "epochs": epochs, "batch_size": batch}


def known(row: dict, path: Path) -> bool:
    return any(row.items() <= other.items() for other in rows(path))


def run(row: dict, model, start, loader, held, path: Path) -> None:
    terms = tk.DistillationConfig(**{name: row[name] for name in ("ce_weight", "kd_weight", "ikd_weight")})
    config = tk.FinetuneConfig(
        epochs=row["epochs"], lr=row["lr"], freeze_bn_stats=row["frozen"], progress=False, distillation=terms
    )
    teacher = model if row["kd_weight"] or row["ikd_weight"] else None
    result = tk.finetune(
        copy.deepcopy(start), teacher, loader(batch_size=row["batch_size"], training=True), held, config, say=print
    )
    curve = [round(one["top1"], 2) for one in result.evaluations]
    row |= {"curve": curve, "below_its_start": curve[-1] < curve[0], "choices": result.config.choices()}
    row["when"] = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
