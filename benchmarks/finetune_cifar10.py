"""ResNet-56 on CIFAR-10, pruned to half its MACs and recovered, then fine-tuned with CE, CE + KD and CE + KD + IKD.

usage: python benchmarks/finetune_cifar10.py [--losses ce kd ikd] [--epochs 5] [--seeds 0] [--work DIR] [--out FILE]
       [--after RUN]

All runs start from the same recovered network (--after: from where another run ended) and see the same images in the
same order for the same seed. Each run keeps its checkpoints in --work and goes on from there when the command is given
again, so it can be stopped at any time. The whole test set is evaluated after every epoch; the figure reported is that
of the last one, not of the best.
"""

import argparse
import copy
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from output import writer
from real_networks import CIFAR, resnet56
from safetensors.torch import load_file, save_file

import timm_knapsack as tk
from timm_knapsack.images.loaders import create_loader
from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.training.evaluation import evaluate

LOSSES = {  # λ_KD, λ_IKD
    "ce": (0.0, 0.0),
    "kd": (1.0, 0.0),
    "ikd": (1.0, 20.0),
}


def recovered_student(work: Path, images: int):
    """The starting point of every run, made once: scored, pruned to 50 % of the MACs, rebuilt in closed form."""
    network = resnet56()
    teacher = network.model
    groups = tk.find_channel_groups(teacher)
    keep_path, weights_path = work / "keep.json", work / "recovered.safetensors"
    if not weights_path.exists():
        scoring = network.train(batch_size=16, limit=2048)
        scores = tk.taylor_scores(teacher, groups, scoring, criterion="taylor_bn")
        result = tk.prune(teacher, scores=scores, budget=tk.Budget(macs=0.5), groups=groups, ignore=":streams")
        recover_layers(result.model, teacher, network.train(batch_size=64, limit=images))
        work.mkdir(parents=True, exist_ok=True)
        keep_path.write_text(json.dumps({name: [int(i) for i in kept] for name, kept in result.keep.items()}))
        save_file({k: v.contiguous() for k, v in result.model.state_dict().items()}, weights_path)
    keep = json.loads(keep_path.read_text())
    student = tk.slice_model(teacher, groups, keep)
    student.load_state_dict(load_file(weights_path))
    share = groups.macs([len(keep[g.name]) for g in groups]) / groups.macs()
    return teacher, student, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--images", type=int, default=4096, help="for recovery")
    parser.add_argument("--after", help="begin where another run ended: its folder in --work, as ikd-e5-s0-lr0.02")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/timm-knapsack/finetune_cifar10").expanduser())
    parser.add_argument("--out", type=Path, help="append the rows to this file too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    say = writer(options.out)
    teacher, first, share = recovered_student(options.work, options.images)
    if options.after:
        first.load_state_dict(load_file(options.work / options.after / "last" / "model.safetensors"))
    test = create_loader(CIFAR, teacher, split="test", batch_size=100)
    say(f"$ python benchmarks/finetune_cifar10.py {' '.join(sys.argv[1:])}")
    start = evaluate(first, test)["top1"]
    base = evaluate(teacher, test)["top1"]
    say(
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}; teacher {base:.2f} %, "
        f"{options.after or 'recovered'} {start:.2f} % at {share:.4f} of the MACs"
    )
    say("loss  epochs  seed  lr     top-1 after each epoch               lost  minutes (this session)")
    for seed in options.seeds:
        for loss in options.losses:
            kd, ikd = LOSSES[loss]
            run = f"{options.after + '+' if options.after else ''}{loss}-e{options.epochs}-s{seed}-lr{options.lr:g}"
            config = tk.FinetuneConfig(
                epochs=options.epochs,
                lr=options.lr,
                weight_decay=5e-4,
                seed=seed,
                output_dir=str(options.work / run),
                checkpoint_every=50,
                distillation=tk.DistillationConfig(kd_weight=kd, ikd_weight=ikd, label_smoothing=0.0),
                progress=False,
            )
            train = create_loader(
                CIFAR,
                teacher,
                split="train",
                batch_size=128,
                training=True,
                augmentation={"crop": "pad", "hflip": 0.5},
                seed=seed,
            )
            student = copy.deepcopy(first).to(memory_format=torch.channels_last)
            teacher = teacher.to(memory_format=torch.channels_last)
            began = time.monotonic()
            result = tk.finetune(student, teacher if kd or ikd else None, train, test, config, resume=True)
            minutes = (time.monotonic() - began) / 60
            if result.interrupted:
                return
            curve = " ".join(f"{row['top1']:.2f}" for row in result.evaluations)
            lost = base - result.last_top1
            say(f"{loss:<6}{options.epochs:<8}{seed:<6}{options.lr:<7g}{curve:<37}{lost:<6.2f}{minutes:.0f}")


if __name__ == "__main__":
    main()
