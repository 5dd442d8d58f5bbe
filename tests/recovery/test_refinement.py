"""refine: closer to the teacher on new images, never farther on those that decide, on any number of processes."""

import copy

import pytest
import torch
from forks import in_two_processes
from mixed_net import mixed, mixed_groups
from safetensors.torch import load_file, save_file
from torch import nn

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.maps.channels_last import Layout
from timm_knapsack.maps.distance import output_distance
from timm_knapsack.maps.views import random_views
from timm_knapsack.recovery import refinement
from timm_knapsack.recovery.refinement import images_to_fit, refine_steps
from timm_knapsack.slim.cutting import kept_outputs


def noise(count, seed=0):
    """Smooth, so that outputs differ from image to image by more than the rounding of bfloat16."""
    coarse = torch.randn(count, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    return 2 * nn.functional.interpolate(coarse, size=8, mode="bilinear")


def pair():
    torch.manual_seed(3)
    teacher = mixed()
    with torch.no_grad():
        outputs = teacher(noise(64))
        teacher.fc.weight.div_(outputs.std(0).mean())  # outputs that say something, as a trained network's do
        teacher.fc.bias.sub_(outputs.mean(0)).div_(outputs.std(0).mean())
    groups = mixed_groups(teacher)
    keep = {group.name: range((group.size + 1) // 2) for group in groups}
    student = tk.slice_model(teacher, groups, keep).eval()
    return student, teacher, kept_outputs(groups, groups.check_keep(keep), teacher)


def distance(student, teacher, images):
    with torch.no_grad():
        return float(output_distance(teacher(images), student(images), logits=True).mean())


def test_it_comes_closer_to_the_teacher_on_images_it_has_not_seen():
    student, teacher, kept = pair()
    tk.recover(student, teacher, [noise(128)], kept=kept, joint=0, views=False)
    before = distance(student, teacher, noise(64, seed=9))
    taught = copy.deepcopy(teacher.state_dict())
    found = refine_steps(student, teacher, [noise(128)], kept=kept)
    assert distance(student, teacher, noise(64, seed=9)) < before
    assert found.after < found.before and 0 < found.kept <= found.steps
    assert all(torch.equal(value, taught[name]) for name, value in teacher.state_dict().items())


def test_images_held_out_are_left_to_judge():
    """What `prune` recovers on, and what refine judges by, are all images, and none is both."""
    pixels = noise(21)
    fitted = torch.cat(images_to_fit([pixels[:10], pixels[10:]]))
    student, teacher, kept = pair()
    refining = refinement._Refining(student, teacher, pixels, Layout(), kept, 1, None, 0)
    judged = refining.held[: len(refining.held) // 2]  # then views of them
    assert torch.equal(torch.cat([fitted, judged]).sum((1, 2, 3)).sort().values, pixels.sum((1, 2, 3)).sort().values)
    assert torch.equal(fitted, refining.images)
    with pytest.raises(KnapsackError, match="refine got 3 images"):
        images_to_fit([pixels[:3]])


@pytest.mark.parametrize("cost, halved", [(0.5, 0), (3.0, 1), (15.0, 2), (1e6, refinement.HALVINGS)])
def test_steps_are_halved_until_a_random_one_costs_little(cost, halved, monkeypatch):
    """The loss of a random step is made up: so many times what is allowed at the largest step, and quadratic."""
    student, teacher, kept = pair()
    refining = refinement._Refining(student, teacher, noise(16), Layout(), kept, 1, None, 0)
    group = refinement._sized(student)[0]
    weight, before = group["params"][0], copy.deepcopy(student.state_dict())
    whole = weight.detach().clone()

    def distances(_):
        share = float((weight.detach() - whole).abs().mean()) / group["size"]
        return torch.tensor([2.0 + cost * (share / refinement.STEP) ** 2 * refinement.RANDOM_LOSS * 2.0])

    monkeypatch.setattr(refining, "_held_out_distances", distances)
    assert refining._fitting_step(2.0, []) == refinement.STEP / 2**halved
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_the_start_is_kept_where_every_step_leads_away(monkeypatch):
    student, teacher, kept = pair()
    tk.recover(student, teacher, [noise(64)], kept=kept)
    before = copy.deepcopy(student.state_dict())
    monkeypatch.setattr(refinement, "STEP", 10.0)  # of each weight's own size: nothing survives that
    found = refine_steps(student, teacher, [noise(64)], kept=kept, epochs=4)
    assert found.kept == 0 and found.after == found.before
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_a_student_equal_to_its_teacher_stays():
    _, teacher, _ = pair()
    student = copy.deepcopy(teacher)
    found = refine_steps(student, teacher, [noise(16)], kept={}, epochs=2)
    assert found.after <= found.before < 1e-6


def test_modes_and_frozen_parameters_come_back():
    student, teacher, kept = pair()
    student.train()
    frozen = next(student.parameters()).requires_grad_(False)
    tk.refine(student, teacher, [noise(16)], kept=kept, epochs=1)
    assert student.training and not frozen.requires_grad
    assert all(parameter.grad is None for parameter in student.parameters())


def test_batchnorm_statistics_stay():
    student, teacher, kept = pair()
    tk.recover(student, teacher, [noise(64)], kept=kept)
    before = {name: value.clone() for name, value in student.named_buffers()}
    assert before
    tk.refine(student, teacher, [noise(64)], kept=kept, epochs=4)
    assert all(torch.equal(value, before[name]) for name, value in student.named_buffers())


def test_outputs_that_are_no_logits():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)).eval()
    student = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).eval()
    found = refine_steps(student, teacher, [noise(64)], kept={"0": torch.arange(4)}, epochs=40)
    assert found.after < found.before


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        ([noise(3)], {}, "3 images and needs at least 4"),
        ([], {}, "no images"),
        ([noise(16)], {"epochs": 0}, "epochs=0"),
        ([noise(16)], {"images": -1}, "images=-1"),
        ([torch.full((16, 3, 8, 8), torch.nan)], {}, "not finite"),
        ([torch.ones(16, 3, 8, 8)], {}, "one plain colour"),
    ],
)
def test_what_it_refuses(loader, options, words):
    student, teacher, kept = pair()
    with pytest.raises(KnapsackError, match=words):
        tk.refine(student, teacher, loader, kept=kept, **options)


def test_views_are_the_same_for_the_same_seed_and_differ_otherwise():
    images = noise(8)
    assert torch.equal(random_views(images, 3), random_views(images, 3))
    assert not torch.equal(random_views(images, 3), random_views(images, 4))
    changed = (random_views(images, 3, share=1.0) != images).flatten(1).any(1)
    assert changed.all()


def refined(accelerator=None):
    student, teacher, kept = pair()
    found = refine_steps(student, teacher, [noise(64)], kept=kept, epochs=2, accelerator=accelerator)
    return student.state_dict(), found


def refine_on_this_process(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    state, found = refined(accelerator)
    save_file({name: value.contiguous() for name, value in state.items()}, f"{folder}/{accelerator.process_index}")
    print(found)


def test_two_processes_end_with_the_same_weights(tmp_path):
    """Their batches are other ones than a single process draws, so the two are equal to each other, not to one."""
    in_two_processes(refine_on_this_process, tmp_path)
    first, second = load_file(tmp_path / "0"), load_file(tmp_path / "1")
    start, alone = pair()[0].state_dict(), refined()[1]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], start[name]) for name in first)
    assert alone.after < alone.before
