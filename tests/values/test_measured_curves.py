"""value_curves against slice_model and a refit written anew; every kind of network; one process = two."""


import numpy as np
import pytest
import timm
import torch
from forks import in_two_processes
from mixed_net import mixed, mixed_groups
from nets import NETS
from torch import nn
from torch.nn import functional as F

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError, ScoreError
from timm_knapsack.values import measured_curves
from timm_knapsack.values.elimination import RIDGE


def noise(count, size=8, batch=16, seed=0):
    return list(torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).split(batch))


def kl(reference, output):
    return F.kl_div(output.log_softmax(1), reference.log_softmax(1), log_target=True, reduction="none").sum(1)


def assert_curve(curve, size):
    assert sorted(curve.order.tolist()) == list(range(size))
    assert np.isfinite(curve.error).all() and np.isfinite(curve.loss).all() and (curve.loss >= 0).all()
    assert (np.diff(curve.error) <= 0).all() and curve.error[size] == 0
    assert np.isfinite(curve.losses()).all()


# ---- what is measured is the loss of the cut and refitted network ------------------------------------------------

READERS = {"stem": ["inner", "before"], "inner": ["outer"], "before": ["grouped"], "grouped": ["fc"]}
NORM_AFTER = {"inner": "bn1", "outer": "bn2", "before": "bn3", "grouped": "bn4"}


def inputs_of(model, layer, images):
    """[conv groups, positions, inputs]: what the layer sees, by torch's own unfold."""
    seen = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    module, x = model.get_submodule(layer), seen[0]
    if isinstance(module, nn.Linear):
        return x.double().unsqueeze(0)
    x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    x = x.reshape(len(x), module.groups, -1, x.shape[2])
    return x.permute(1, 0, 3, 2).flatten(1, 2).double()


def cut_and_refitted(model, groups, name, keep, images):
    """The slim network with each reader's weights fitted by centred ridge regression to what it gave before."""
    slim = tk.slice_model(model, groups, {name: keep}).eval()
    for layer in READERS[name]:
        full, small = model.get_submodule(layer), slim.get_submodule(layer)
        x = inputs_of(model, layer, images)
        conv_groups, _, width = x.shape
        taps = full.weight[0, 0].numel()
        stay = torch.zeros(width, dtype=torch.bool)  # of the inputs of each conv group
        # a unit of "grouped" is the same channel of both conv groups: two inputs of the linear behind it
        for channel in [*keep, *(u + 4 for u in keep)] if layer == "fc" else keep:
            stay[channel * taps : (channel + 1) * taps] = True
        new_weights, shift = [], []
        for part, weight in zip(x, full.weight.detach().double().flatten(1).chunk(conv_groups), strict=True):
            mean = part.mean(0)
            centred = part - mean
            penalty = RIDGE * centred.square().mean(0).mean() * len(part)
            target = centred @ weight.T
            # ridge towards the old weights of those that stay, as rows added to the regression
            design = torch.cat([centred[:, stay], penalty.sqrt() * torch.eye(int(stay.sum()), dtype=torch.float64)])
            wanted = torch.cat([target, penalty.sqrt() * weight[:, stay].T])
            new = torch.linalg.lstsq(design, wanted, driver="gelsd").solution.T
            new_weights.append(new)
            shift.append(mean @ weight.T - mean[stay] @ new.T)
        shift = torch.cat(shift).float()
        with torch.no_grad():
            small.weight.copy_(torch.cat(new_weights).reshape(small.weight.shape))
            if small.bias is not None:
                small.bias.add_(shift)
            else:
                slim.get_submodule(NORM_AFTER[layer]).running_mean.sub_(shift)
    return slim


@pytest.fixture(scope="module")
def measured():
    """Curves of a stream with two readers, an inner conv, a grouped conv and a linear."""
    model = mixed()
    model.fc.weight.data.mul_(6)  # classes that are told apart
    groups, batches = mixed_groups(model), noise(240)
    curves = tk.value_curves(model, groups, batches)
    images = torch.cat(batches)
    held = torch.arange(240) % 4 == 3
    return model, groups, curves, images[~held], images[held]


@pytest.mark.parametrize("name", READERS)
def test_the_loss_is_that_of_the_cut_and_refitted_network_on_images_held_out(measured, name):
    model, groups, curves, fitted, held = measured
    curve = curves[name]
    assert curve.note == ""
    with torch.no_grad():
        reference = model(held)
        for count, loss in zip(curve.counts, curve.loss, strict=True):
            keep = sorted(curve.order[curve.size - count :].tolist())
            slim = cut_and_refitted(model, groups, name, keep, fitted)
            expected = float(kl(reference, slim(held)).mean())
            plain = float(kl(reference, tk.slice_model(model, groups, {name: keep}).eval()(held)).mean())
            assert loss == pytest.approx(expected, rel=2e-3, abs=1e-6)
            assert plain > 1.2 * loss  # without the refit it is another number


def test_curves_say_where_they_come_from(measured):
    _, groups, curves, *_ = measured
    assert set(curves) == {group.name for group in groups}
    assert (curves.model, curves.samples) == ("Mixed", 240)
    for group in groups:
        assert_curve(curves[group.name], group.size)
        assert curves[group.name].counts.tolist() == measured_curves._counts(group.size, (0.75, 0.45, 0.2))
    assert "240 images" in repr(curves)


def test_images_held_out_are_not_fitted():
    batches = list(torch.arange(17).float().reshape(-1, 1, 1, 1).split(7))
    fitted, held = measured_curves.split_held_out(batches)
    assert torch.cat(held).flatten().tolist() == [3, 7, 11, 15]
    assert sorted(torch.cat(fitted + held).flatten().tolist()) == list(range(17))
    many = list(torch.arange(2000).reshape(-1, 1, 1, 1).split(100))
    fitted, held = measured_curves.split_held_out(many)
    assert 150 <= len(torch.cat(held)) <= 192 and len(torch.cat(fitted)) + len(torch.cat(held)) == 2000
    assert [len(part) for part in measured_curves.split_held_out([torch.zeros(2, 3, 4, 4)])[0]] == [1]


class Wide(nn.Module):
    """A classifier with far more inputs than there are images, as conv_head and classifier of an EfficientNet."""

    def __init__(self):
        super().__init__()
        self.conv, self.head, self.fc = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 160, 3), nn.Linear(160, 10)

    def forward(self, x):
        return self.fc(F.relu(self.head(F.relu(self.conv(x)))).mean((2, 3)))


def test_on_fitted_images_a_wide_layer_looks_better_than_it_is(monkeypatch):
    torch.manual_seed(0)
    model = Wide().eval()
    model.fc.weight.data.mul_(20)
    groups, batches = tk.find_channel_groups(model, torch.zeros(1, 3, 8, 8)), noise(40, 8)
    honest = tk.value_curves(model, groups, batches)["head"]
    split = measured_curves.split_held_out
    monkeypatch.setattr(measured_curves, "split_held_out", lambda batches: (split(batches)[0], split(batches)[0]))
    flattering = tk.value_curves(model, groups, batches)["head"]
    assert honest.order.tolist() == flattering.order.tolist()
    assert (flattering.loss < 0.7 * honest.loss).all()


def test_with_an_original_it_is_what_is_lost_beyond():
    model = mixed()
    model.fc.weight.data.mul_(6)
    original = mixed()
    original.fc.weight.data.mul_(5)
    groups, batches = mixed_groups(model), noise(240)
    beyond, alone = (tk.value_curves(model, groups, batches, original=o) for o in (original, None))
    images = torch.cat(batches)
    fitted, held = images[torch.arange(240) % 4 != 3], images[torch.arange(240) % 4 == 3]
    curve = beyond["inner"]
    assert curve.order.tolist() == alone["inner"].order.tolist()
    with torch.no_grad():
        reference = original(held)
        base = float(kl(reference, model(held)).mean())
        for count, loss in zip(curve.counts, curve.loss, strict=True):
            slim = cut_and_refitted(model, groups, "inner", sorted(curve.order[8 - count :].tolist()), fitted)
            assert loss == pytest.approx(max(float(kl(reference, slim(held)).mean()) - base, 0), rel=2e-3, abs=1e-6)
    assert not np.allclose(curve.loss, alone["inner"].loss, rtol=0.05)
    same = tk.value_curves(model, groups, batches, original=model)
    for name in same:
        np.testing.assert_allclose(same[name].loss, alone[name].loss, rtol=1e-6)


# ---- every kind of network ---------------------------------------------------------------------------------------


NOTES = {  # groups with a reader that has no closed form; all others are refitted
    ("ReusedLayer", "conv"): "again is not refitted: it runs 2 times in one forward pass",
    ("Recurrent", "embed"): "lstm is not refitted: it is neither a conv nor a linear",
    ("Recurrent", "lstm"): "lstm is not refitted: it is neither a conv nor a linear",
    ("TransposedConv", "shrink"): "up is not refitted: it is neither a conv nor a linear",
    ("TiedWeights", "stem"): "first is not refitted: it shares its weights with another layer",
    ("TiedWeights", "inner"): "no layer reads it",
}


@pytest.mark.parametrize("name", [name for name, net in NETS.items() if net.groups])
def test_every_group_of_every_kind_of_network_gets_a_curve(name):
    torch.manual_seed(0)
    case = NETS[name]
    model = case.build().eval()
    groups = tk.find_channel_groups(model, torch.zeros(case.shape))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    curves = tk.value_curves(model, groups, noise(24, case.shape[-1], 8))
    assert {group: len(curve.order) for group, curve in curves.items()} == dict(case.groups)
    for group in groups:
        assert_curve(curves[group.name], group.size)
        assert curves[group.name].note == NOTES.get((name, group.name), "")
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    result = tk.sweep(model, curves, [tk.Budget(macs=0.9)], groups=groups)[0]
    assert result.report.line("macs").counted <= 0.9 * result.report.line("macs").original


def test_all_notes_are_looked_at():
    assert all(group in NETS[name].groups for name, group in NOTES)


def small_vit():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5
    ).eval()


def test_heads_and_mlps_of_a_vit_lose_less_than_without_a_refit():
    torch.manual_seed(0)
    model = small_vit()
    model.head.weight.data.normal_(0, 1)
    groups, batches = tk.find_channel_groups(model), noise(64, 32)
    curves = tk.value_curves(model, groups, batches)
    assert all(curve.note == "" for curve in curves.values())
    held = torch.cat(batches)[3::4]
    with torch.no_grad():
        for name in ("blocks.0.mlp.fc1", "blocks.1.attn.qkv"):
            curve = curves[name]
            keep = sorted(curve.order[curve.size - curve.counts[0] :].tolist())
            plain = kl(model(held), tk.slice_model(model, groups, {name: keep}).eval()(held)).mean()
            assert curve.loss[0] < plain


def test_norm_free_networks_are_measured_without_the_refit_and_say_so():
    torch.manual_seed(0)
    model = timm.create_model("test_nfnet", num_classes=4).eval()
    groups = tk.find_channel_groups(model, torch.zeros(1, 3, 32, 32))
    curves = tk.value_curves(model, groups, noise(8, 32, 4), widths=(0.5,))
    noted = [curve.note for curve in curves.values() if "weight standardisation" in curve.note]
    assert len(noted) > len(curves) / 2
    for group in groups:
        assert_curve(curves[group.name], group.size)


def test_features_without_classes_are_compared_by_squared_error():
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20", num_classes=0, channels=(4, 4, 8)).eval()
    curves = tk.value_curves(model, tk.find_channel_groups(model), noise(12, 32, 4), widths=(0.5,))
    assert all((curve.loss >= 0).all() for curve in curves.values()) and max(c.loss[0] for c in curves.values()) > 1e-4


# ---- the user's things --------------------------------------------------------------------------------------------


def test_batches_of_any_form_give_the_same():
    model = mixed()
    groups, images = mixed_groups(model), noise(16, batch=4)
    expected = tk.value_curves(model, groups, images)
    labels = torch.zeros(4, dtype=torch.long)
    for loader in (
        [(x, labels) for x in images],
        ({"pixel_values": x, "labels": labels} for x in images),
        [[x] for x in [*images, *images]][:4],
    ):
        found = tk.value_curves(model, groups, loader)
        assert all(np.array_equal(found[n].loss, expected[n].loss) for n in expected)
    limited = tk.value_curves(model, groups, [*images, *images], images=16)
    assert all(np.array_equal(limited[n].loss, expected[n].loss) for n in expected) and limited.samples == 16


def test_modes_and_gradients_are_left_as_they_were():
    model = mixed().train()
    model.bn1.eval()
    groups = mixed_groups(model)
    expected = tk.value_curves(mixed(), groups, noise(8))
    found = tk.value_curves(model, groups, noise(8))
    assert model.training and not model.bn1.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(np.array_equal(found[n].loss, expected[n].loss) for n in expected)


def test_a_bar_is_shown_on_request(capsys):
    model = mixed()
    tk.value_curves(model, mixed_groups(model), noise(8), progress=False)
    assert capsys.readouterr().err == ""
    tk.value_curves(model, mixed_groups(model), noise(8), progress=True)
    assert "value curves" in capsys.readouterr().err


def test_too_few_images_are_an_error_and_two_are_not():
    model = mixed()
    groups = mixed_groups(model)
    with pytest.raises(ScoreError, match="at least two images"):
        tk.value_curves(model, groups, noise(1))
    with pytest.raises(KnapsackError, match="gave no images"):
        tk.value_curves(model, groups, [])
    for count in (2, 3, 4, 5):
        curves = tk.value_curves(model, groups, noise(count))
        for group in groups:
            assert_curve(curves[group.name], group.size)


def test_constant_images_and_dead_channels():
    model = mixed()
    with torch.no_grad():
        for parameter in (model.bn1.weight, model.bn1.bias):
            parameter[:3] = 0
    groups = mixed_groups(model)
    curves = tk.value_curves(model, groups, noise(16))
    assert set(curves["inner"].order[:3].tolist()) == {0, 1, 2}
    flat = tk.value_curves(model, groups, [torch.ones(8, 3, 8, 8), torch.zeros(8, 3, 8, 8)])
    for group in groups:
        assert_curve(flat[group.name], group.size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    model = mixed().to(dtype)
    groups = mixed_groups(model)
    curves = tk.value_curves(model, groups, [x.to(dtype) for x in noise(24)])
    for group in groups:
        assert_curve(curves[group.name], group.size)


# ---- several processes --------------------------------------------------------------------------------------------

CASES = {"even": (32, 4), "uneven": (28, 8), "one batch": (8, 8)}


def network(kind):
    torch.manual_seed(3)
    if kind == "mixed":
        model = mixed()
        return model, mixed_groups(model), 8
    model = NETS["VisionTransformer"].build().eval()
    return model, tk.find_channel_groups(model, torch.zeros(1, 3, 8, 8)), 8


def measure_on_this_process(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2, accelerator.num_processes
    for kind in ("mixed", "vit"):
        model, groups, size = network(kind)
        for case, (count, batch) in CASES.items():
            curves = tk.value_curves(model, groups, noise(count, size, batch), accelerator=accelerator)
            curves.save(f"{folder}/{kind} {case} {accelerator.process_index}")


def test_two_processes_give_the_curves_of_one(tmp_path):
    in_two_processes(measure_on_this_process, tmp_path)
    for kind in ("mixed", "vit"):
        model, groups, size = network(kind)
        for case, (count, batch) in CASES.items():
            one = tk.value_curves(model, groups, noise(count, size, batch))
            for rank in range(2):
                two = tk.ValueCurves.load(tmp_path / f"{kind} {case} {rank}", groups)
                assert two.samples == one.samples == count
                for name, curve in one.items():
                    assert two[name].order.tolist() == curve.order.tolist()
                    np.testing.assert_allclose(two[name].error, curve.error, rtol=1e-5, atol=1e-9)
                    np.testing.assert_allclose(two[name].loss, curve.loss, rtol=1e-3, atol=1e-7)
