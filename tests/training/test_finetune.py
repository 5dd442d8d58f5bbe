"""The training loop against a loop written by hand, one process against two, and every way a run can end."""

import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forks import in_two_processes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import timm_knapsack  # noqa: F401  (before timm)
from timm_knapsack.errors import CheckpointError, DataError, KnapsackError, TrainingError
from timm_knapsack.training.distillation import DistillationConfig, DistillationModule
from timm_knapsack.training.finetuning import FinetuneConfig, evaluate, finetune

loop = sys.modules["timm_knapsack.training.finetuning"]  # the module: timm_knapsack.training.finetuning is the function

CLASSES = 4
PLAIN = DistillationConfig(kd_weight=0, ikd_weight=0, label_smoothing=0.0)
FULL = DistillationConfig(ikd_weight=1.0, ikd_at="convs", ikd_weight_decay=0.01, label_smoothing=0.1)


def network(width, seed=0, norm=False, dropout=0.0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(width, width, 3, stride=2), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(width, CLASSES))


def data(samples=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % CLASSES
    return torch.randn(samples, 3, 8, 8, generator=generator) + labels[:, None, None, None], labels


def batches(samples=16, size=4, seed=0):
    images, labels = data(samples, seed)
    return list(zip(images.split(size), labels.split(size), strict=True))


def same(first, second):
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_equals_a_loop_written_by_hand():
    """SGD, weight decay of matrices only, cosine per update, clipping, KD + IKD: nothing of the loop is reused."""
    student, teacher = network(3, 1), network(6, 2)
    config = FinetuneConfig(
        epochs=3, optimizer="sgd", lr=0.05, weight_decay=0.02, min_lr=0.001, warmup_epochs=0, clip_grad=1.5,
        distillation=FULL, log_interval=1,
    )  # fmt: skip
    result = finetune(student, teacher, batches(), None, config)

    module = DistillationModule(network(3, 1), network(6, 2), FULL, example=torch.zeros(1, 3, 8, 8))
    module.init_from_data(batches())
    decayed = [p for n, p in module.student.named_parameters() if p.ndim > 1]
    plain = [p for n, p in module.student.named_parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
    groups.append({"params": list(module.projections.values()), "weight_decay": 0.01})
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for update, (images, labels) in enumerate(batches() * 3):
        for group in optimizer.param_groups:
            group["lr"] = 0.001 + 0.5 * (0.05 - 0.001) * (1 + math.cos(math.pi * update / 12))
        optimizer.zero_grad()
        loss = module(images, labels).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.5)
        optimizer.step()
        losses.append(loss.item())
    assert [row["total"] for row in result.history] == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(student.parameters(), module.student.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert losses[-1] < losses[0] and result.student is student is result.model


def test_accumulation_equals_a_larger_batch():
    large, small = network(3, 1), network(3, 1)
    config = FinetuneConfig(epochs=2, lr=0.05, distillation=FULL, log_interval=1)
    first = finetune(large, network(6), batches(24, 8), None, config)
    second = finetune(small, network(6), batches(24, 4), None, replace(config, grad_accumulation=2))
    assert first.updates == second.updates == 6
    for a, b in zip(first.history, second.history, strict=True):
        assert a["total"] == pytest.approx(b["total"], rel=1e-4)
    for a, b in zip(large.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_incomplete_last_window_is_a_mean_too():
    """5 batches in windows of 2: the last window holds one batch and must weigh like a batch, not like half of one."""
    uneven, reference = network(3, 1), network(3, 1)
    config = FinetuneConfig(epochs=1, lr=0.1, scheduler="constant", distillation=PLAIN)
    finetune(uneven, None, batches(20, 4), None, replace(config, grad_accumulation=2))
    images, labels = data(20)
    chunks = [(images[:8], labels[:8]), (images[8:16], labels[8:16]), (images[16:], labels[16:])]
    finetune(reference, None, chunks, None, config)
    for a, b in zip(uneven.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_ema_is_the_moving_average_and_is_what_gets_evaluated(tmp_path):
    student = network(3, 1, norm=True)
    config = FinetuneConfig(epochs=1, distillation=PLAIN, ema_decay=0.5, output_dir=tmp_path, checkpoint_every=1)
    seen = []
    write = loop.write_checkpoint

    def spy(path, tensors, state, optimizer=None):
        if path.name == "last":
            seen.append({name: tensor.clone() for name, tensor in tensors["model"].items()})
        return write(path, tensors, state, optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_checkpoint", spy)
        result = finetune(student, None, batches(), batches(8, 4, seed=5), config)
    expected = dict(seen[0])  # the first update copies
    for weights in seen[1:4]:
        expected = {
            name: 0.5 * expected[name] + 0.5 * value if value.is_floating_point() else value
            for name, value in weights.items()
        }
    for name, value in result.model.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    assert result.model is not student and not same(result.model, student)
    assert result.last_top1 == evaluate(result.model, batches(8, 4, seed=5))["top1"]


def test_evaluate_counts_by_hand():
    model = network(3, 1, norm=True, dropout=0.5).train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    images, labels = data(10)
    result = evaluate(model, DataLoader(TensorDataset(images, labels), batch_size=4))
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        logits = model.eval()(images)
    assert result["samples"] == 10
    assert result["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert result["top5"] == 100.0  # four classes
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def test_mixing_leaves_the_callers_images_alone_and_takes_odd_batches():
    given = [*batches(8, 4), (torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2]))]
    copies = [images.clone() for images, _ in given]
    config = FinetuneConfig(epochs=1, lr=0.01, mixup=0.4, cutmix=1.0, distillation=FULL)
    result = finetune(network(3), network(6), given, None, config)
    assert result.updates == 3
    assert all(torch.equal(images, copy) for (images, _), copy in zip(given, copies, strict=True))


def test_frozen_statistics_stay():
    for freeze in (False, True):
        student = network(3, norm=True)
        before = student[1].running_mean.clone()
        finetune(student, None, batches(), None, FinetuneConfig(epochs=1, distillation=PLAIN, freeze_bn_stats=freeze))
        assert torch.equal(student[1].running_mean, before) is freeze
        assert not student.training


def test_bf16_runs_and_a_second_run_may_have_another_precision():
    for precision in ("bf16", "no", "fp16", None):
        config = FinetuneConfig(epochs=1, lr=0.01, distillation=FULL, mixed_precision=precision)
        result = finetune(network(3, 1), network(6), batches(), batches(), config)
        assert math.isfinite(result.history[-1]["total"])


def test_seed_decides_everything_and_the_global_state_nothing():
    def run(seed, noise):
        torch.manual_seed(noise)
        student = network(3, 1, dropout=0.3)
        torch.manual_seed(noise)
        loader = DataLoader(TensorDataset(*data()), batch_size=4, shuffle=True)
        finetune(student, None, loader, None, FinetuneConfig(epochs=2, lr=0.1, distillation=PLAIN, seed=seed))
        return student

    assert same(run(0, 1), run(0, 2))
    assert not same(run(0, 1), run(1, 1))  # and the comparison can fail


def test_nan_stops_with_step_terms_and_last_good_checkpoint(tmp_path):
    given = batches(24, 4)
    given[4] = (given[4][0] * float("nan"), given[4][1])
    student = network(3)
    config = FinetuneConfig(epochs=1, distillation=PLAIN, output_dir=str(tmp_path), checkpoint_every=2)
    with pytest.raises(TrainingError, match=r"update 5 \(epoch 0, batch 4\): total = nan, ce = nan.*last good.*last"):
        finetune(student, None, given, None, config)
    assert all(p.isfinite().all() for p in student.parameters())
    assert json.loads((tmp_path / "last" / "state.json").read_text())["update"] == 4


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    class Explode(torch.autograd.Function):  # a finite loss whose gradient is not
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(3)

        def forward(self, x):
            return Explode.apply(self.net(x))

    config = FinetuneConfig(epochs=1, distillation=PLAIN, output_dir=str(tmp_path), checkpoint_every=1)
    with pytest.raises(TrainingError, match="not finite after update 1, so no checkpoint is written"):
        finetune(Net(), None, batches(), None, config)
    assert not (tmp_path / "last").exists()


def test_sigterm_writes_a_checkpoint_and_returns(tmp_path):
    class Terminating(list):
        passes = 0

        def __iter__(self):
            self.passes += 1  # the first looks at the shapes, the second fits M_l, the third trains
            for index, batch in enumerate(list.__iter__(self)):
                if (self.passes, index) == (3, 2):
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    config = FinetuneConfig(epochs=2, lr=0.05, distillation=FULL, output_dir=str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    student = network(3, 1)
    result = finetune(student, network(6), Terminating(batches(24)), None, config)
    assert result.interrupted and result.updates == 3 and result.last_path == tmp_path / "last"
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = finetune(network(3, 9), network(6), batches(24), None, config, resume=True)
    assert not resumed.interrupted and resumed.updates == 12
    whole = network(3, 1)
    finetune(whole, network(6), batches(24), None, replace(config, output_dir=None))
    assert same(resumed.student, whole)


def test_best_and_last_checkpoints(tmp_path):
    from safetensors.torch import load_file

    config = FinetuneConfig(epochs=3, lr=0.05, distillation=FULL, output_dir=str(tmp_path))
    result = finetune(network(3, 1), network(6), batches(), batches(8, seed=3), config)
    best = max(row["top1"] for row in result.evaluations)
    assert result.best_top1 == best and [row["epoch"] for row in result.evaluations] == [0, 1, 2, 3]
    fresh = network(3)
    fresh.load_state_dict(load_file(result.best_path / "model.safetensors"))
    assert evaluate(fresh, batches(8, seed=3))["top1"] == best
    fresh.load_state_dict(load_file(result.last_path / "model.safetensors"))
    assert same(fresh, result.student)
    assert not list(tmp_path.rglob("*.pkl")) and sorted(p.name for p in tmp_path.iterdir()) == ["best", "last"]


def test_a_folder_in_use_is_refused_unless_overwritten(tmp_path):
    config = FinetuneConfig(epochs=1, distillation=PLAIN, output_dir=str(tmp_path))
    finetune(network(3), None, batches(), None, config)
    with pytest.raises(CheckpointError, match=r"resume=True.*overwrite=True"):
        finetune(network(3), None, batches(), None, config)
    finetune(network(3), None, batches(), None, replace(config, overwrite=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.2}, "config.lr is 0.1 in the checkpoint and 0.2 now"),
        ({"distillation": replace(FULL, temperature=2.0)}, "config.distillation.temperature is 1.0"),
        ({"seed": 1}, "config.seed"),
        ("student", r"student.0.weight is \[3, 3, 3, 3\] in the checkpoint and \[4, 3, 3, 3\] now"),
        ("teacher", "teacher_crc32"),
        ("data", "batches_per_epoch is 4 in the checkpoint and 2 now"),
    ],
)
def test_resume_with_something_else_names_the_difference(tmp_path, change, words):
    config = FinetuneConfig(epochs=1, lr=0.1, distillation=FULL, output_dir=str(tmp_path))
    finetune(network(3), network(6), batches(), None, config)
    student = network(4 if change == "student" else 3)
    teacher = network(6, seed=7 if change == "teacher" else 0)
    given = batches(8) if change == "data" else batches()
    changed = replace(config, **change) if isinstance(change, dict) else config
    with pytest.raises(CheckpointError, match=words):
        finetune(student, teacher, given, None, changed, resume=True)
    harmless = replace(config, log_interval=7, progress=False)
    assert finetune(network(3), network(6), batches(), None, harmless, resume=True).updates == 4


def test_resume_without_a_folder_or_a_checkpoint(tmp_path):
    config = FinetuneConfig(epochs=1, distillation=PLAIN)
    with pytest.raises(CheckpointError, match="output_dir"):
        finetune(network(3), None, batches(), None, config, resume=True)
    result = finetune(network(3), None, batches(), None, replace(config, output_dir=str(tmp_path)), resume=True)
    assert result.updates == 4  # nothing there yet: from the beginning


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs must be a whole number at least 1"),
        ({"epochs": True}, "epochs"),
        ({"lr": -0.1}, "lr must be a number at least 0, got -0.1"),
        ({"lr": float("nan")}, "lr"),
        ({"scheduler": "plateau"}, "scheduler must be one of 'cosine'"),
        ({"mixed_precision": "fp8"}, "mixed_precision"),
        ({"ema_decay": 1.5}, "ema_decay must be a number from 0 to 1"),
        ({"grad_accumulation": 2.0}, "whole"),
        ({"warmup_epochs": 60}, "warmup_epochs is 60"),
        ({"optimizer_args": {"lr": 1}}, "can't set 'lr'"),
        ({"distillation": {"kd_weight": 1}}, "DistillationConfig"),
        ({"trackers": "wandb", "output_dir": "x"}, "list of names"),
        ({"trackers": ("wandb",)}, "output_dir"),
        ({"output_dir": ""}, "output_dir"),
        ({"freeze_bn_stats": "yes"}, "freeze_bn_stats"),
    ],
)
def test_config_errors(options, words):
    with pytest.raises(TrainingError, match=words):
        FinetuneConfig(**options)


def test_run_errors():
    config = FinetuneConfig(epochs=1, distillation=PLAIN)
    student = network(3)
    cases = [
        (TrainingError, "labels must be", dict(train_loader=[(torch.zeros(2, 3, 8, 8), torch.tensor([0, 9]))])),
        (DataError, "no labels, and nothing is distilled", dict(train_loader=[torch.zeros(2, 3, 8, 8)])),
        (KnapsackError, "a batch is a str", dict(train_loader=["two images"])),
        (TrainingError, "is empty", dict(train_loader=[])),
        (TrainingError, "no length", dict(train_loader=iter(batches()))),
        (TrainingError, "need a teacher", dict(config=replace(config, distillation=FULL))),
        (TrainingError, "can't build the optimizer 'sdg'", dict(config=replace(config, optimizer="sdg"))),
        (TrainingError, "steps_per_epoch is 9", dict(config=replace(config, steps_per_epoch=9))),
        (DataError, "is empty", dict(eval_loader=[])),
    ]
    for error, words, change in cases:
        arguments = dict(train_loader=batches(), eval_loader=None, config=config) | change
        with pytest.raises(error, match=words):
            finetune(student, None, **arguments)


def test_a_stream_needs_and_takes_steps_per_epoch():
    class Stream:  # no length
        def __iter__(self):
            return iter(batches())

    config = FinetuneConfig(epochs=2, distillation=PLAIN, steps_per_epoch=3)
    assert finetune(network(3), None, Stream(), None, config).updates == 6
    with pytest.raises(TrainingError, match="ended after 4 batches"):
        finetune(network(3), None, Stream(), None, replace(config, steps_per_epoch=5))


def test_own_accelerator_and_tracker(tmp_path):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Memory(GeneralTracker):
        name, requires_logging_directory = "memory", False

        def __init__(self):
            super().__init__()
            self.rows, self.config = [], None

        @property
        def tracker(self):
            return self.rows

        def store_init_configuration(self, values):
            self.config = values

        def log(self, values, step=None, **kwargs):
            self.rows.append((step, values))

    memory = Memory()
    config = FinetuneConfig(epochs=2, lr=0.01, distillation=FULL, log_interval=2)
    accelerator = Accelerator(log_with=memory)
    result = finetune(network(3), network(6), batches(), batches(), config, accelerator=accelerator)
    assert memory.config["distillation.ikd_at"] == "convs" and memory.config["lr"] == 0.01
    train = [(step, row["train/total"]) for step, row in memory.rows if "train/total" in row]
    assert train == [(row["update"], row["total"]) for row in result.history] and len(train) == 4
    assert [row["eval/top1"] for _, row in memory.rows if "eval/top1" in row] == [e["top1"] for e in result.evaluations]
    with pytest.raises(TrainingError, match="gradient_accumulation_steps=2"):
        accelerator.gradient_accumulation_steps = 2
        finetune(network(3), None, batches(), None, config, accelerator=accelerator)


def test_quiet_without_a_terminal(capfd):
    finetune(network(3), None, batches(), batches(), FinetuneConfig(epochs=1, distillation=PLAIN))
    assert capfd.readouterr() == ("", "")


# ---- one process = two processes, over gloo ----


def run_of_every_process(global_batch, folder):
    """KD + IKD with EMA on data that shuffles; an evaluation of 10 samples; SIGTERM, and a resume."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    size = global_batch // accelerator.num_processes
    config = FinetuneConfig(
        epochs=2, lr=0.05, distillation=FULL, freeze_bn_stats=True, ema_decay=0.9, log_interval=1, grad_accumulation=2
    )

    def run(config, dataset=None, **options):
        loader = DataLoader(dataset or TensorDataset(*data(32)), batch_size=size, shuffle=True, drop_last=True)
        eval_loader = DataLoader(TensorDataset(*data(10, seed=3)), batch_size=4)
        student, teacher = network(3, 1, norm=True), network(6, norm=True)
        return finetune(student, teacher, loader, eval_loader, config, accelerator=accelerator, **options)

    def weights(result):
        both = (*result.model.state_dict().values(), *result.student.state_dict().values())
        return torch.cat([value.double().flatten() for value in both])

    def identical(vector):
        everyone = accelerator.gather(vector[None])
        return bool((everyone == everyone[:1]).all())

    result = run(config)
    listed = evaluate(result.student, batches(10, 4, seed=3), accelerator)

    class Terminates(TensorDataset):  # the last process alone is told to stop, in the last window of the first epoch
        fetched = 0

        def __getitem__(self, index):
            self.fetched += 1
            if self.fetched == 80 // accelerator.num_processes + 1 and accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getitem__(index)

    resumable = replace(config, freeze_bn_stats=False, output_dir=folder, checkpoint_every=1)
    whole = run(replace(resumable, output_dir=None))
    stopped = run(resumable, Terminates(*data(32)))
    resumed = run(resumable, resume=True)
    return {
        "processes": accelerator.num_processes,
        "losses": [row["total"] for row in result.history],
        "evaluation": result.evaluations[-1],
        "listed": listed,
        "identical": identical(weights(result)) and identical(weights(whole)),
        "control": identical(weights(result) + accelerator.process_index),
        "stopped": [stopped.interrupted, stopped.updates, stopped.epochs, len(stopped.evaluations)],
        "resumed": torch.equal(weights(whole), weights(resumed)) and whole.history == resumed.history,
    }


def worker(folder):
    torch.set_num_threads(1)
    outcome = run_of_every_process(8, f"{folder}/run")
    if int(os.environ["RANK"]) == 0:
        Path(folder, "outcome.json").write_text(json.dumps(outcome))


def launch_two(folder):
    """``debug_launcher`` does start two, ``accelerate launch --cpu`` does not."""
    in_two_processes(worker, folder)
    return json.loads((folder / "outcome.json").read_text())


def test_one_process_equals_two(tmp_path):
    one, two = run_of_every_process(8, str(tmp_path / "one")), launch_two(tmp_path)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["identical"] and not two["control"]
    assert len(one["losses"]) == 4 and one["losses"] == pytest.approx(two["losses"], abs=1e-4)
    assert one["losses"][0] != pytest.approx(one["losses"][1], abs=1e-4)  # and the comparison can fail
    for kind in ("evaluation", "listed"):
        assert one[kind]["samples"] == two[kind]["samples"] == 10
        assert one[kind] == pytest.approx(two[kind], abs=1e-4)
    for outcome in (one, two):
        assert outcome["stopped"] == [True, 2, 0, 1]  # all updates of the epoch, but only the start's evaluation
        assert outcome["resumed"]
