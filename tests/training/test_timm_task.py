"""The task for timm's loop and transformers' Trainer: its terms, its state, two processes' worth of interface, and the
example scripts, executed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import timm_knapsack as tk
from timm_knapsack.errors import TrainingError
from timm_knapsack.training.distillation import DistillationConfig, DistillationModule

import timm  # isort: skip

CONVS = {"at": "convs", "verbose": False}  # where widths differ: each has its M_l
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def pair():
    torch.manual_seed(0)
    teacher = timm.create_model("cifar_resnet20", num_classes=3, channels=(4, 6, 8)).eval()
    groups = tk.find_channel_groups(teacher)
    scores = tk.taylor_scores(teacher, groups, None, "magnitude")
    return tk.sweep(teacher, scores, [tk.Budget(macs=0.5)], groups=groups)[0].model, teacher


def batch(images=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, 3, 32, 32, generator=generator), torch.arange(images) % 3


def test_terms_are_those_of_the_distillation_module():
    student, teacher = pair()
    task = tk.InnerDistillationTask(student, teacher, inner_loss_weight=3.0, distill_loss_weight=0.5, **CONVS)
    images, labels = batch()
    result = task(images, labels)
    config = DistillationConfig(ce_weight=1.0, kd_weight=0.5, ikd_weight=3.0, ikd_at="convs", ikd_init="selection")
    losses = DistillationModule(student, teacher, config)(images, labels)
    assert result["loss"].item() == pytest.approx(losses.total.item(), rel=1e-6)
    assert result["ikd_loss"].item() == pytest.approx(losses.ikd.item(), rel=1e-6) and losses.ikd > 0
    result["loss"].backward()
    learning = task.get_trainable_module()
    assert all(p.grad is not None for p in learning.parameters()) and len(learning.projections) > 0
    assert all(p.grad is None for p in teacher.parameters())
    complementary = tk.InnerDistillationTask(student, teacher, task_loss_weight=0.3, verbose=False)
    assert complementary.distill_loss_weight == pytest.approx(0.7)


def test_what_timms_loop_asks_of_a_task():
    student, teacher = pair()
    task = tk.InnerDistillationTask(student, teacher, **CONVS)
    images, labels = batch()
    before = task.init_from_data([images])
    assert before > 0
    task.setup_ema(decay=0.5)
    assert task.get_eval_model() is student and task.get_eval_model(ema=True).module is not student
    names = [name for name, _ in task.trainable_module_ema.named_parameters()]
    assert len(names) == len(list(student.parameters()))  # neither M_l nor teacher in the average
    clipped = {id(p) for p in task.get_clip_parameters()}
    assert clipped == {id(p) for p in task.get_trainable_module().parameters()}
    optimizer = torch.optim.SGD(task.get_trainable_module().parameters(), 0.01)
    task(images, labels)["loss"].backward()
    optimizer.step()
    task.update_ema(step=1)
    state = {**task.get_checkpoint_state(), **task.get_checkpoint_state(ema=True)}
    assert set(state) == {"state_dict", "task_state", "state_dict_ema"}
    assert state["state_dict"].keys() == student.state_dict().keys()

    again = tk.InnerDistillationTask(*pair(), init="ridge", **CONVS)
    with pytest.raises(TrainingError, match="not initialised"):
        again(images, labels)
    again.load_checkpoint_state(state["state_dict"], state["task_state"])
    again.get_trainable_module().train(), task.get_trainable_module().train()
    assert again(images, labels)["loss"].item() == task(images, labels)["loss"].item()


def test_a_teacher_with_another_normalisation_sees_the_same_picture():
    student, teacher = pair()
    images, labels = batch()
    plain = tk.InnerDistillationTask(student, teacher, verbose=False)(images, labels)["kd_loss"]
    student.pretrained_cfg = {**student.pretrained_cfg, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    mean, std = (torch.tensor(teacher.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    task = tk.InnerDistillationTask(student, teacher, verbose=False)
    seen = []
    hook = teacher.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    task(images * std + mean, labels)
    hook.remove()
    torch.testing.assert_close(seen[-1], images)
    assert plain.isfinite()


def test_for_trainer_registers_what_learns_and_evaluates_the_student_alone():
    student, teacher = pair()
    model = tk.InnerDistillationTask(student, teacher, **CONVS).for_trainer()
    images, labels = batch()
    model.train()
    assert model(images, labels)["loss"].requires_grad
    ours = {id(p) for p in model.parameters()}
    assert not ours & {id(p) for p in teacher.parameters()} and {id(p) for p in student.parameters()} < ours
    teacher.forward = None  # it must not run in evaluation
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(images)["logits"], student(images))
    del teacher.forward
    with pytest.raises(TrainingError, match="training needs labels"):
        model.train()(images)


def image_folder(folder, classes=3, images=8):
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "validation"):
        for label in range(classes):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for number in range(images):
                pixels = torch.randint(0, 90, (32, 32, 3), generator=generator) + 80 * label
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(place / f"{number}.png")
    return folder


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_in_timms_loop(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "images")
    torch.manual_seed(0)
    network = timm.create_model("cifar_resnet20", num_classes=3)
    torch.save(network.state_dict(), "base.pth")
    options = "--data images --model cifar_resnet20 --checkpoint base.pth --classes 3 --batch-size 8 --epochs 1"
    example("timm_train_loop").main(options.split())
    assert "top-1 of the average" in capsys.readouterr().out
    loaded = timm.create_model("local-dir:tuned", pretrained=True)
    assert tk.count_macs(loaded) < 0.51 * tk.count_macs(network)
    saved = torch.load("last.pth.tar", weights_only=False)
    assert saved["state_dict"].keys() == saved["state_dict_ema"].keys() == loaded.state_dict().keys()


def test_the_example_with_transformers_trainer(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    image_folder(tmp_path / "images")
    torch.manual_seed(0)
    config = transformers.TimmWrapperConfig(architecture="cifar_resnet20", num_labels=3)
    wrapper = transformers.TimmWrapperForImageClassification(config)
    assert isinstance(wrapper.timm_model, nn.Module)
    options = "--data images --batch-size 8 --epochs 1"
    tuned = example("transformers_trainer").main(options.split(), wrapper)
    assert "accuracy" in capsys.readouterr().out
    images, _ = batch()
    loaded = timm.create_model("local-dir:tuned", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(tuned.eval()(images).logits, loaded(images))
