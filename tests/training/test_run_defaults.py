"""What a run chooses where its config is silent: it follows from the run, is recorded, and does not cost the start."""

import copy
import json
import logging
from dataclasses import replace

import pytest
import torch
from test_finetune import CLASSES, FULL, PLAIN, batches, data, network, same
from torch import nn

from timm_knapsack.errors import CheckpointError
from timm_knapsack.training.config import FinetuneConfig
from timm_knapsack.training.distillation import DistillationConfig, DistillationModule
from timm_knapsack.training.evaluation import evaluate
from timm_knapsack.training.finetuning import finetune
from timm_knapsack.training.run_defaults import RunFacts, choose_kind, choose_rates, measure_sharpness

OPEN = DistillationConfig(ikd_weight=1.0, ikd_at="convs")
FACTS = RunFacts(updates=40, updates_per_epoch=40, share=64, batchnorm=True, distance=0.1, sharpness=100.0)


def chosen(config=None, **facts):
    known = replace(FACTS, **facts)
    known = replace(known, updates_per_epoch=known.updates)
    return choose_rates(choose_kind(config or FinetuneConfig(epochs=1), known), known)


def test_each_choice_follows_from_its_fact():
    base = chosen()
    assert base.lr == 0.005 and base.optimizer == "sgd" and not base.freeze_bn_stats and base.ema_decay == 0
    assert chosen(sharpness=1000.0).lr == 0.0005
    assert chosen(distance=0.0002).lr < base.lr == chosen(distance=3.0).lr
    assert chosen(updates=640).lr == pytest.approx(4 * base.lr)
    assert chosen(updates=10**9).lr == pytest.approx(8 * base.lr)
    without = FinetuneConfig(epochs=1, distillation=DistillationConfig(ikd_weight=0))
    assert chosen(without).lr == pytest.approx(0.2 * base.lr)
    assert chosen(updates=7).freeze_bn_stats and chosen(share=4).freeze_bn_stats
    assert not chosen(updates=7, batchnorm=False).freeze_bn_stats
    assert chosen(batchnorm=False).optimizer == "adamw" and chosen(batchnorm=False).lr == pytest.approx(1e-4)
    assert 0 < chosen(updates=2000).ema_decay < 1
    assert round(base.warmup_epochs * 40) == 4 and round(chosen(updates=2).warmup_epochs * 2) == 1
    plain = FinetuneConfig(epochs=1, distillation=DistillationConfig(kd_weight=0))
    assert [chosen(plain, updates=n).distillation.label_smoothing for n in (100, 2000)] == [0.0, 0.1]
    assert chosen(updates=2000).distillation.label_smoothing == 0.0


def test_what_is_given_is_not_touched():
    given = FinetuneConfig(
        epochs=1, optimizer="lion", lr=0.3, min_lr=0.1, warmup_epochs=0.5, ema_decay=0.9, freeze_bn_stats=True,
        distillation=DistillationConfig(label_smoothing=0.2),
    )  # fmt: skip
    assert chosen(given, updates=1, sharpness=1e9) == given


def test_sharpness_is_the_largest_curvature_and_leaves_no_trace():
    """Against the Hessian itself, of a network with BatchNorm and dropout in train mode."""
    student = network(2, 1, norm=True, dropout=0.0).train()
    module = DistillationModule(student, None, PLAIN)
    images, labels = data(8)
    before = copy.deepcopy(module.state_dict())
    found = measure_sharpness(module, images, labels)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    names = [name for name, _ in student.named_parameters()]

    def loss(*weights):
        outputs = torch.func.functional_call(student, dict(zip(names, weights, strict=True)), (images,))
        return nn.functional.cross_entropy(outputs, labels)

    weights = tuple(parameter.detach() for parameter in student.parameters())
    blocks = torch.autograd.functional.hessian(loss, weights)
    sizes = [w.numel() for w in weights]
    rows = [torch.cat([b.reshape(n, -1) for b in row], 1) for n, row in zip(sizes, blocks, strict=True)]
    largest = torch.linalg.eigvalsh(torch.cat(rows)).abs().max().item()
    assert 0.5 * largest < found < 1.1 * largest


def trained(width, seed=0, epochs=6):
    """A network that knows the task, to begin from."""
    model = network(width, seed, norm=True)
    config = FinetuneConfig(epochs=epochs, lr=0.1, distillation=PLAIN, freeze_bn_stats=False, optimizer="sgd")
    finetune(model, None, batches(64, 8), None, config)
    return model


def test_the_defaults_do_not_destroy_a_good_start_and_a_wild_rate_is_told(tmp_path, caplog):
    teacher, start = trained(8, 2), trained(4, 1)
    held = batches(64, 8, seed=9)
    first = evaluate(start, held)["top1"]
    assert 60 < first <= evaluate(teacher, held)["top1"]  # a start that is better than its teacher can only lose
    lines = []
    result = finetune(
        copy.deepcopy(start),
        teacher,
        batches(32, 8),
        held,
        FinetuneConfig(epochs=1, distillation=OPEN),
        say=lines.append,
    )
    assert result.evaluations[0]["top1"] == first and result.evaluations[0]["epoch"] == 0
    assert result.last_top1 >= first - 2 and len(lines) == 1 + (result.last_top1 < first)
    assert lines[0].startswith("chosen for 4 updates of 8 images") and f"rate {result.config.lr:g}" in lines[0]

    wild = FinetuneConfig(
        epochs=1, distillation=OPEN, lr=0.5, freeze_bn_stats=False, optimizer="sgd", output_dir=str(tmp_path)
    )
    with caplog.at_level(logging.WARNING):
        ruined = finetune(copy.deepcopy(start), teacher, batches(32, 8), held, wild)
    assert ruined.last_top1 < first == ruined.best_top1 and ruined.best["epoch"] == 0
    assert [r.getMessage() for r in caplog.records if "ended below its start" in r.getMessage()]
    from safetensors.torch import load_file

    kept = network(4, norm=True)
    kept.load_state_dict(load_file(ruined.best_path / "model.safetensors"))
    assert same(kept, start)


def test_a_resumed_run_keeps_what_was_chosen(tmp_path):
    """Another start would choose another rate; the checkpoint's choice holds, and is part of the state."""
    teacher, open_config = network(6, norm=True), FinetuneConfig(epochs=2, distillation=OPEN)
    whole = finetune(network(3, 1, norm=True), teacher, batches(), batches(8), open_config)
    config = replace(open_config, output_dir=str(tmp_path), checkpoint_every=1)

    class Stop(Exception):
        pass

    class Stopping(list):
        passes = 0

        def __iter__(self):
            self.passes += 1  # shapes, first batches, the first epoch, the second
            for index, batch in enumerate(list.__iter__(self)):
                if (self.passes, index) == (4, 2):
                    raise Stop
                yield batch

    with pytest.raises(Stop):
        finetune(network(3, 1, norm=True), teacher, Stopping(batches()), batches(8), config)
    state = json.loads((tmp_path / "last" / "state.json").read_text())
    assert state["choices"]["lr"] == whole.config.lr and state["run"]["config"]["lr"] is None
    resumed = finetune(network(3, 5, norm=True), teacher, batches(), batches(8), config, resume=True)
    assert same(resumed.student, whole.student) and resumed.config.choices() == whole.config.choices()
    assert resumed.evaluations == whole.evaluations
    with pytest.raises(CheckpointError, match=r"config.lr is None in the checkpoint and 0.1 now"):
        finetune(network(3, 1, norm=True), teacher, batches(), batches(8), replace(config, lr=0.1), resume=True)


@pytest.mark.parametrize("form", ["minus one", "images", "dicts"])
def test_images_without_labels_learn_from_the_teacher(form, tmp_path):
    images, _ = data(16)
    forms = {
        "minus one": [(part, torch.full((4,), -1)) for part in images.split(4)],
        "images": list(images.split(4)),
        "dicts": [{"pixel_values": part} for part in images.split(4)],
    }
    teacher = network(6)
    config = FinetuneConfig(epochs=4, lr=0.05, distillation=OPEN, output_dir=str(tmp_path), mixup=0.2)
    result = finetune(network(3, 1), teacher, forms[form], forms[form], config)
    assert all(row["ce"] == 0 for row in result.history) and result.history[-1]["kd"] > 0
    assert result.best_top1 is None and set(result.evaluations[0]) >= {"agreement", "kl", "samples"}
    assert result.evaluations[-1]["kl"] < result.evaluations[0]["kl"]
    assert result.best["kl"] == min(row["kl"] for row in result.evaluations)


def test_some_labels_count_for_those_that_have_one():
    images, labels = data(4)
    module = DistillationModule(network(3), None, PLAIN)
    some = labels.clone()
    some[2:] = -1
    assert module(images, some).ce.item() == pytest.approx(module(images[:2], labels[:2]).ce.item(), rel=1e-5)
    assert module(images, some).ce.item() != pytest.approx(module(images, labels).ce.item(), rel=1e-3)


def test_patience_ends_a_run_that_gains_no_more():
    config = FinetuneConfig(epochs=9, lr=0.0, distillation=FULL, patience=2)
    result = finetune(network(3), network(6), batches(), batches(8), config)
    assert result.epochs == 2 and result.best["epoch"] == 0 and CLASSES == 4


def test_the_rate_follows_from_the_median_of_several_batches(monkeypatch):
    found = iter([100.0, 900.0, 120.0, 80.0])
    seen = []
    monkeypatch.setattr(
        "timm_knapsack.training.setup.measure_sharpness",
        lambda module, images, targets, seed, average: (seen.append(images.sum().item()), next(found))[1],
    )
    config = FinetuneConfig(epochs=40, optimizer="sgd", ema_decay=0, distillation=PLAIN)
    result = finetune(network(2), None, batches(32, 8), None, config)  # 160 updates
    reach = 0.5 * 4**0.5 * 0.2
    assert result.config.lr == pytest.approx(reach / 110, rel=0.01)
    assert len(set(seen)) == 4


@pytest.mark.parametrize(("faster", "long", "told", "expected"), [
    (True, True, None, "bf16"), (False, True, None, "no"), (True, False, None, "no"), (True, True, "no", "no"),
])  # fmt: skip
def test_bfloat16_is_chosen_for_long_runs_that_gain_by_it(monkeypatch, tmp_path, faster, long, told, expected):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if told:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)

    def trial(step, device):
        with torch.autocast("cpu", torch.bfloat16, enabled=faster):
            step()  # as it would be timed
        return faster

    monkeypatch.setattr("timm_knapsack.training.setup.step_gains", trial)
    monkeypatch.setattr("timm_knapsack.maps.precision.bfloat16_is_faster", lambda device: faster)
    monkeypatch.setattr("timm_knapsack.training.setup.LONG_RUN", 1.0 if long else 1e18)
    seen, lines = set(), []
    spy = spied(DistillationModule.forward, lambda: seen.add(torch.is_autocast_enabled("cpu")))
    monkeypatch.setattr(DistillationModule, "forward", spy)
    config = FinetuneConfig(epochs=1, distillation=OPEN, output_dir=str(tmp_path), lr=0.001)
    result = finetune(network(4), network(8), batches(16, 8), None, config, say=lines.append)
    assert result.config.choices()["mixed_precision"] == expected
    assert seen == {expected == "bf16"} and ("bfloat16" in lines[0]) == (expected == "bf16")
    again = finetune(network(4), network(8), batches(16, 8), None, config, resume=True)
    assert again.config.mixed_precision == expected


def spied(function, look):
    def wrapped(*args):
        look()
        return function(*args)

    return wrapped
