"""Kill a fine-tuning run with SIGKILL, resume it, and compare every bit with a run that was never killed.

    python benchmarks/finetune_kill_resume.py

Half of the kills come from outside at a random moment, half strike at a random file operation of the checkpoint writer;
the resumed run is killed again with probability 1/2. Student, EMA, M_l, optimiser, history and evaluations must come
out equal. At the end a checkpoint without its momentum is resumed, which must come out different: the comparison can
fail. One CPU thread. The result goes to ``benchmarks/results/finetune_kill_resume.txt``.
"""

import argparse
import datetime
import hashlib
import importlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

import timm_knapsack  # noqa: F401  (before timm)

import timm  # isort: skip
from timm_knapsack.files.atomic import settle
from timm_knapsack.images.loaders import synthetic_loader
from timm_knapsack.training.checkpoints import read_checkpoint, write_checkpoint
from timm_knapsack.training.distillation import DistillationConfig
from timm_knapsack.training.finetuning import FinetuneConfig, finetune

WRITER = ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir")  # what a checkpoint does to the disk


def train(folder, resume=False):
    """A narrow ResNet-10 with dropout, mixup, EMA, accumulation and AdamW: randomness and state of every kind."""
    torch.manual_seed(0)
    teacher = timm.create_model("resnet10t", channels=(24, 32, 48, 64), num_classes=10)
    student = timm.create_model(
        "resnet10t", channels=(16, 24, 32, 48), num_classes=10, drop_rate=0.1, drop_path_rate=0.1
    )
    config = FinetuneConfig(
        epochs=4,
        optimizer="adamw",
        lr=2e-3,
        warmup_epochs=1,
        mixup=0.2,
        cutmix=1.0,
        ema_decay=0.9,
        clip_grad=1.0,
        grad_accumulation=2,
        checkpoint_every=2,
        log_interval=3,
        output_dir=str(folder),
        distillation=DistillationConfig(ikd_at="blocks", ikd_weight=1.0, ikd_init_batches=2),
    )
    loader = synthetic_loader((3, 32, 32), batch_size=8, batches=12, num_classes=10)
    evaluation = synthetic_loader((3, 32, 32), batch_size=8, batches=2, num_classes=10, seed=1)
    result = finetune(student, teacher, loader, evaluation, config, resume=resume)
    (Path(folder) / "fingerprint").write_text(fingerprint(folder, result))


def fingerprint(folder, result):
    """One hash over all that a run leaves: both models, the last checkpoint, history, evaluations."""
    checkpoint = read_checkpoint(Path(folder) / "last")
    state = {key: value for key, value in checkpoint.state.items() if key != "run"}
    digest = hashlib.sha256(json.dumps([state, result.history, result.evaluations], sort_keys=True).encode())
    moments = {f"{i}.{k}": v for i, s in checkpoint.optimizer["optimizer"]["state"].items() for k, v in s.items()}
    parts = [result.student.state_dict(), result.model.state_dict(), *checkpoint.tensors.values(), moments]
    for part in parts:
        for name, tensor in sorted(part.items()):
            digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def start(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def was_killed(pid):
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status:
        sys.exit("a training process failed; see above")
    return False


def count_writes(strike_at=None):
    """Count the writer's file operations; at number ``strike_at`` the process kills itself."""
    count = [0]

    def counted(operation):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == strike_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    for name in WRITER:
        setattr(os, name, counted(getattr(os, name)))
    return count


def reached(folder):
    """How far the checkpoint is, and what the kill left beside it, before anything is tidied up."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
    copy = folder.with_name(folder.name + "-look")
    if folder.exists():
        shutil.copytree(folder, copy)
    update = read_checkpoint(copy / "last").state["update"] if settle(copy / "last") else 0
    shutil.rmtree(copy, ignore_errors=True)
    return f"update {update:2}, folders: {' '.join(names) or 'none'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("accelerate", "timm.data", "timm.optim", "timm.scheduler", "timm.utils"):
        importlib.import_module(name)  # once, for all forks
    rng = random.Random(options.seed)
    today = datetime.datetime.now(datetime.timezone.utc)
    lines = [
        f"command: python {' '.join(sys.argv)}",
        f"date: {today:%Y-%m-%d %H:%M} UTC; {platform.machine()}; torch {torch.__version__}; timm {timm.__version__}",
    ]

    with tempfile.TemporaryDirectory() as place:
        place = Path(place)

        def whole_run():
            count = count_writes()
            train(place / "whole")
            (place / "writes").write_text(str(count[0]))

        began = time.monotonic()
        was_killed(start(whole_run))
        duration = time.monotonic() - began
        writes = int((place / "writes").read_text())
        expected = (place / "whole" / "fingerprint").read_text()
        updates = read_checkpoint(place / "whole" / "last").state["update"]
        lines.append(
            f"uninterrupted: {updates} updates, {writes} file operations of the writer, sha256 {expected[:16]}"
        )
        print("\n".join(lines))

        equal = kills = trial = 0
        while trial < options.kills:
            folder, story, resume = place / f"killed{trial}", [], False
            again = rng.random() < 1 / 2
            for share in (1.0, 0.3) if again else (1.0,):  # the second kill comes sooner: less is left to do
                if trial % 2:
                    at = rng.randrange(1, int(share * writes))
                    pid = start(lambda at=at, r=resume, f=folder: (count_writes(at), train(f, r)))
                    how = f"at file operation {at}"
                else:
                    at = rng.uniform(0.1, 0.95) * share * duration
                    pid = start(lambda r=resume, f=folder: train(f, r))
                    time.sleep(at)
                    os.kill(pid, signal.SIGKILL)
                    how = f"after {at:.1f} s"
                if not was_killed(pid):
                    break
                story.append(f"{how} ({reached(folder)})")
                resume = True
            if not story:  # it was done before the kill: try another moment
                shutil.rmtree(folder, ignore_errors=True)
                continue
            trial, kills = trial + 1, kills + len(story)
            was_killed(start(lambda f=folder: train(f, resume=True)))
            same = (folder / "fingerprint").read_text() == expected
            equal += same
            lines.append(f"{trial:2}. killed {'; again '.join(story)}: {'equal' if same else 'DIFFERENT'}")
            print(lines[-1], flush=True)

        victim = place / "control"
        was_killed(start(lambda: (count_writes(writes // 2), train(victim))))
        settle(victim / "last")
        checkpoint = read_checkpoint(victim / "last")
        for moment in checkpoint.optimizer["optimizer"]["state"].values():
            moment["exp_avg"].zero_()
        write_checkpoint(victim / "last", checkpoint.tensors, checkpoint.state, checkpoint.optimizer)
        was_killed(start(lambda: train(victim, resume=True)))
        noticed = (victim / "fingerprint").read_text() != expected
        lines.append(
            f"control, momentum dropped: {'different, as it must be' if noticed else 'EQUAL: the check is blind'}"
        )

    passed = equal == options.kills and noticed
    lines.append(
        f"{'PASS' if passed else 'FAIL'}: {equal} of {options.kills} runs equal bit for bit after {kills} SIGKILLs"
    )
    print("\n".join(lines[-2:]))
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "finetune_kill_resume.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return not passed


if __name__ == "__main__":
    sys.exit(main())
