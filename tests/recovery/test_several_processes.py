"""recover on two processes gives the weights of one; and what few, constant or half-precision images do to it."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import timm
import torch
from forks import in_two_processes
from mixed_net import mixed, mixed_groups
from nets import NETS
from safetensors.torch import load_file, save_file
from torch import nn

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.recovery import closed_form
from timm_knapsack.slim.cutting import kept_outputs


def noise(count, size=8, batch=16, seed=0):
    return list(torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).split(batch))


def halved(model, groups):
    keep = {group.name: range((group.size + 1) // 2) for group in groups}
    return tk.slice_model(model, groups, keep).eval(), kept_outputs(groups, groups.check_keep(keep), model)


def network(kind):
    torch.manual_seed(3)
    if kind == "mixed":
        model = mixed()
        return model, mixed_groups(model), 8
    if kind == "resnet":
        model = timm.create_model("cifar_resnet20", num_classes=4, channels=(4, 6, 8)).eval()
        return model, tk.find_channel_groups(model), 32
    model = NETS["VisionTransformer"].build().eval()
    return model, tk.find_channel_groups(model, torch.zeros(1, 3, 8, 8)), 8


FIRST_BATCH_ALONE = "resnet fitted together on the first batch"  # so that one of two processes has none of it
CASES = {  # network: images, batch size
    "mixed even": ("mixed", 64, 16),
    "mixed uneven": ("mixed", 50, 16),
    "mixed one batch": ("mixed", 24, 32),
    "resnet three batches": ("resnet", 20, 8),
    "vit uneven": ("vit", 70, 16),
    FIRST_BATCH_ALONE: ("resnet", 24, 8),
}


def recovered(case, accelerator=None):
    kind, count, batch = CASES[case]
    model, groups, size = network(kind)
    slim, kept = halved(model, groups)
    few = {"JOINT_IMAGES": batch, "JOINT_EQUATIONS": 0} if case == FIRST_BATCH_ALONE else {}
    with patch.multiple(closed_form, **few) if few else nullcontext():
        return tk.recover(slim, model, noise(count, size, batch), kept=kept, accelerator=accelerator).state_dict()


def recover_on_this_process(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2, accelerator.num_processes
    for case in CASES:
        state = recovered(case, accelerator)
        save_file({k: v.contiguous() for k, v in state.items()}, f"{folder}/{case} {accelerator.process_index}")


def test_two_processes_give_the_weights_of_one(tmp_path):
    in_two_processes(recover_on_this_process, tmp_path)
    for case, (kind, *_) in CASES.items():
        one = recovered(case)
        first, second = (load_file(tmp_path / f"{case} {rank}") for rank in range(2))
        cut = halved(*network(kind)[:2])[0].state_dict()
        assert any(not torch.allclose(one[name], cut[name], rtol=1e-2) for name in one)  # something was refitted
        for name, expected in one.items():
            assert torch.equal(first[name], second[name]), f"{case}: {name}"
            scale = float(expected.abs().max()) if expected.is_floating_point() else 1
            torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-6 * scale)


# ---- little to go by ----------------------------------------------------------------------------------------------


def finite(model):
    return all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["mixed", "vit", "resnet"])
def test_a_few_images_give_finite_weights(kind, count):
    model, groups, size = network(kind)
    slim, kept = halved(model, groups)
    tk.recover(slim, model, noise(count, size), kept=kept)
    assert finite(slim)


def distance(model, slim, x):
    with torch.no_grad():
        return float((model(x) - slim(x)).square().mean())


@pytest.mark.parametrize("kind", ["mixed", "vit"])
def test_constant_images_are_refused_and_nothing_is_changed(kind):
    model, groups, size = network(kind)
    slim, kept = halved(model, groups)
    before = {name: value.clone() for name, value in slim.state_dict().items()}
    with pytest.raises(KnapsackError, match="one plain colour"):
        tk.recover(slim, model, [torch.zeros(8, 3, size, size), torch.ones(8, 3, size, size)], kept=kept)
    assert all(torch.equal(value, before[name]) for name, value in slim.state_dict().items())


def test_dead_channels_give_finite_weights():
    model, groups, _ = network("mixed")
    with torch.no_grad():
        for norm in (model.bn0, model.bn1, model.bn3):
            norm.weight[:2], norm.bias[:2] = 0, 0
        model.outer.weight[:, :2] = 0
    slim, kept = halved(model, groups)
    x = torch.cat(noise(32, seed=4))
    before = distance(model, slim, x)
    tk.recover(slim, model, noise(64), kept=kept)
    assert finite(slim) and distance(model, slim, x) < before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_recover_or_say_why_not(dtype):
    model, groups, _ = network("mixed")
    model = model.to(dtype)
    slim, kept = halved(model, groups)
    x = torch.cat(noise(32, seed=4)).to(dtype)
    before = distance(model, slim, x)
    try:
        tk.recover(slim, model, [batch.to(dtype) for batch in noise(64)], kept=kept)
    except KnapsackError as error:
        assert dtype == torch.float16 and "float" in str(error)
        return
    assert finite(slim) and next(slim.parameters()).dtype == dtype
    assert distance(model, slim, x) < before


def test_images_that_are_not_finite_are_an_error():
    model, groups, _ = network("mixed")
    slim, kept = halved(model, groups)
    with pytest.raises(KnapsackError, match="not finite"):
        tk.recover(slim, model, [*noise(8), torch.full((8, 3, 8, 8), float("nan"))], kept=kept)
    with pytest.raises(KnapsackError, match="not finite"):
        tk.value_curves(model, groups, [*noise(8), torch.full((8, 3, 8, 8), float("inf"))])


# ---- without rounds it is plain regression ------------------------------------------------------------------------


def test_without_rounds_a_layer_is_the_ridge_regression_on_the_students_features(monkeypatch):
    """The first layer behind a cut: centred least squares of the teacher's map on what the student sees."""
    monkeypatch.setattr(closed_form, "ROUNDS", 0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 10, 1), nn.ReLU(), nn.Conv2d(10, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    groups = tk.find_channel_groups(net, torch.zeros(1, 3, 8, 8))
    keep = {"0": range(5), "2": range(6)}
    slim, kept = tk.slice_model(net, groups, keep), kept_outputs(groups, groups.check_keep(keep), net)
    x = torch.cat(noise(32))
    tk.recover(slim, net, noise(32), kept=kept, ridge=1e-9, views=False)
    with torch.no_grad():
        seen = slim[1](slim[0](x)).permute(0, 2, 3, 1).flatten(0, 2).double()
        wanted = net[2](net[1](net[0](x))).permute(0, 2, 3, 1).flatten(0, 2).double()
    design = torch.cat([seen, torch.ones(len(seen), 1, dtype=torch.float64)], 1)
    expected = torch.linalg.lstsq(design, wanted).solution
    torch.testing.assert_close(slim[2].weight.flatten(1).T.double(), expected[:-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(slim[2].bias.double(), expected[-1], rtol=1e-3, atol=1e-4)
