"""Recovery: exact where an exact answer exists, harmless where nothing was lost, and it says what it can't do."""

import copy
import logging

import pytest
import timm
import torch
from nets import LAYERS
from torch import nn
from torch.nn import functional as F

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.maps.patches import outputs, patches
from timm_knapsack.recovery.batchnorm import reestimate_batchnorm
from timm_knapsack.recovery.closed_form import planned_layers, recover_layers
from timm_knapsack.recovery.ridge import RidgeSums
from timm_knapsack.slim.cutting import kept_outputs


def images(n=8, size=16, channels=3, seed=0):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", LAYERS)
def test_the_fit_finds_the_weights_that_made_the_target(kind):
    torch.manual_seed(1)
    layer, truth = LAYERS[kind](), LAYERS[kind]()
    sums = RidgeSums(layer)
    for _ in range(3):
        x = torch.randn(16, 9, 12) if kind == "linear" else torch.randn(16, 6, 11, 12)
        target = outputs(layer, truth(x).detach())
        if layer.bias is not None:
            target = target - layer.bias.detach().reshape(target.shape[0], 1, -1)
        sums.add(patches(layer, x), target)
    fit = sums.fit(ridge=1e-9, shifts=layer.bias is not None)
    assert torch.allclose(fit.weight, truth.weight, atol=1e-4)
    if layer.bias is not None:
        assert torch.allclose(layer.bias + fit.shift.float(), truth.bias, atol=1e-4)
    assert fit.error_after < 1e-5 < fit.error_before


def test_the_penalty_is_chosen_on_images_that_were_not_fitted():
    """Far fewer positions than inputs, and a target that is noise: the layer had better stay as it is."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 3)
    sums = RidgeSums(layer)
    x, noise = torch.randn(1, 40, 64), torch.randn(1, 40, 3)
    sums.add(x, x @ layer.weight.detach().T + noise)
    assert sums.fit(None, shifts=True).ridge >= 1.0
    assert sums.fit(1e-6, shifts=True).error_after < 1e-3  # as fitted, it looks perfect


class Redundant(nn.Module):
    """The second half of every hidden layer repeats the first, as a residual net with a stem and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.act = nn.ReLU()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return self.act(self.bn2(self.conv2(y)) + x)


def redundant_net():
    torch.manual_seed(0)
    net = Redundant().eval()
    for block in net.blocks:
        for norm in (block.bn1, block.bn2):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
            norm.weight.data.uniform_(0.5, 1.5)
        for tensor in (block.conv1.weight.data, *block.bn1.state_dict().values()):
            if tensor.dim():
                tensor[6:] = tensor[:6]
    return net


def half_of(net):
    groups = tk.find_channel_groups(net, torch.zeros(1, 3, 16, 16))
    keep = {f"blocks.{i}.conv1": range(6) for i in range(3)}
    slim = tk.slice_model(net, groups, keep)
    kept = {f"blocks.{i}.conv1": torch.arange(6) for i in range(3)}
    return slim, kept


def test_what_the_kept_channels_can_say_is_rebuilt_exactly():
    net = redundant_net()
    slim, kept = half_of(net)
    x = images(seed=5)
    with torch.no_grad():
        lost = (slim(x) - net(x)).abs().max()
        tk.recover(slim, net, [images(32), images(32, seed=1)], kept=kept, ridge=1e-9)
        left = (slim(x) - net(x)).abs().max()
    assert lost > 0.02  # the check could fail: without recovery the outputs differ
    assert left < 1e-3 * lost


def test_nothing_lost_nothing_changed():
    net = timm.create_model("resnet10t", num_classes=4).eval()
    same = copy.deepcopy(net)
    fits = recover_layers(same, net, [images(4, 32)])
    assert fits == []
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), same.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
def test_recovery_brings_a_pruned_model_nearer_to_its_teacher(name):
    torch.manual_seed(0)
    size = 32 if name.startswith("vit") else 64
    options = {"img_size": size} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=4, **options).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("gamma"):
            parameter.data.fill_(0.5)  # as after training; the initial 1e-6 would hide the blocks
    x = images(16, size)
    groups = tk.find_channel_groups(model, x[:1])
    inner = [g.name for g in groups if sum(s.role == "out" for s in g.slices) == 1]
    keep = {n: range(0, groups[n].size, 2) for n in inner}
    slim = tk.slice_model(model, groups, keep)
    kept = kept_outputs(groups, groups.check_keep(keep), model)
    with torch.no_grad():
        before = (slim(x) - model(x)).square().mean()
        teacher_state = copy.deepcopy(model.state_dict())
        tk.recover(slim, model, [images(64, size, seed=2)], kept=kept)
        after = (slim(x) - model(x)).square().mean()
    assert after < before
    assert all(torch.equal(a, b) for a, b in zip(teacher_state.values(), model.state_dict().values(), strict=True))


def test_gates_and_depthwise_convs_are_fitted_too():
    model = timm.create_model("mobilenetv3_small_050", num_classes=4).eval()
    groups = tk.find_channel_groups(model)
    result = tk.prune(model, scores=tk.taylor_scores(model, groups, criterion="magnitude"), budget=tk.Budget(macs=0.6))
    fits = recover_layers(result.model, model, [images(32, 96)])
    fitted = [fit for fit in fits if not fit.skipped]
    assert any("conv_dw" in fit.name for fit in fitted) and any(".se." in fit.name for fit in fitted)
    assert all(fit.after <= fit.before * 1.0001 for fit in fitted)
    assert torch.isfinite(result.model(images(4, 96))).all()


def test_flags_and_gradients_are_left_as_they_were():
    net = redundant_net()
    slim, kept = half_of(net)
    slim.train()
    slim.blocks[1].eval()
    net.train()
    tk.recover(slim, net, [images(8)], kept=kept)
    assert slim.training and not slim.blocks[1].training and net.training
    assert all(p.requires_grad and p.grad is None for p in slim.parameters())


def test_a_layer_without_a_closed_form_is_left_alone_and_named(caplog):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 1)
            self.again = nn.Conv2d(8, 8, 1)
            self.last = nn.Linear(8, 2)

        def forward(self, x):
            x = F.relu(self.first(x))
            return self.last(self.again(F.relu(self.again(x))).mean((2, 3)))

    torch.manual_seed(0)
    net = Shared().eval()
    groups = tk.find_channel_groups(net, torch.zeros(1, 3, 8, 8))
    keep = {g.name: range(0, g.size, 2) for g in groups}
    slim = tk.slice_model(net, groups, keep)
    with caplog.at_level(logging.INFO):
        fits = recover_layers(slim, net, [images(8, 8)], kept=kept_outputs(groups, groups.check_keep(keep), net))
    skipped = {fit.name: fit.skipped for fit in fits if fit.skipped}
    assert skipped == {"again": "it runs 2 times in one forward pass"}
    assert "again" in caplog.text


@pytest.mark.parametrize("name", ["cifar_resnet20", "vit_tiny_patch16_224"])
def test_what_is_planned_is_what_is_done(name):
    """Of a ResNet and of a transformer; with eight images some layers have too few positions."""
    torch.manual_seed(0)
    size = {"img_size": 32} if "vit" in name else {}
    net = timm.create_model(name, num_classes=4, **size).eval()
    groups = tk.find_channel_groups(net, torch.zeros(1, 3, 32, 32), verify="none")
    keep = {g.name: range(g.size if g.is_stream else (g.size + 1) // 2) for g in groups}
    slim, kept = tk.slice_model(net, groups, keep).eval(), kept_outputs(groups, groups.check_keep(keep), net)
    planned = planned_layers(slim, net, images(2, 32), kept=kept, images=8)
    before = copy.deepcopy(slim.state_dict())
    fits = {fit.name: fit for fit in recover_layers(slim, net, [images(8, 32)], kept=kept, joint=0, views=False)}
    assert set(planned) == {n for n, m in slim.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert set(fits) == {layer for layer, how in planned.items() if how != "before"}
    for layer, fit in fits.items():
        assert fit.skipped or fit.target == ("block" if planned[layer] == "to sums" else "layer")
        assert planned[layer] == fit.skipped or not fit.skipped
        same = torch.equal(before[f"{layer}.weight"], slim.state_dict()[f"{layer}.weight"])
        assert same or planned[layer] in ("to sums", "to outputs")


def test_batchnorm_statistics_are_the_mean_over_the_images():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    batches = [images(6), images(6, seed=1)]
    reestimate_batchnorm(net, batches)
    with torch.no_grad():
        y = [net[0](x) for x in batches]
    assert torch.allclose(net[1].running_mean, torch.stack([b.mean((0, 2, 3)) for b in y]).mean(0), atol=1e-5)
    variances = torch.stack([b.var((0, 2, 3)) for b in y]).mean(0)
    assert torch.allclose(net[1].running_var, variances, rtol=1e-4)
    assert not net[1].training and net[1].momentum == 0.1


def test_kind_errors():
    net = redundant_net()
    slim, kept = half_of(net)
    with pytest.raises(KnapsackError, match="nothing says which; pass kept="):
        tk.recover(slim, net, [images(4)])
    with pytest.raises(KnapsackError, match="names 3 channels, the student's layer has 6"):
        tk.recover(slim, net, [images(4)], kept={**kept, "blocks.0.conv1": torch.arange(3)})
    with pytest.raises(KnapsackError, match="is it the model that was pruned"):
        tk.recover(slim, timm.create_model("resnet10t"), [images(4)], kept=kept)
    with pytest.raises(KnapsackError, match="gave no images"):
        tk.recover(slim, net, [], kept=kept)
    with pytest.raises(KnapsackError, match="expected images"):
        tk.recover(slim, net, [{"x": 1}], kept=kept)


@pytest.mark.parametrize("ridge", [-1, 0, 0.0, float("nan"), float("inf"), True, "small"])
def test_a_penalty_without_a_single_best_fit_is_refused(ridge):
    """Constant images make every Gram matrix singular: without a penalty there is no solution."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.raises(KnapsackError, match=r"ridge=.*expected a number above 0"):
        tk.recover(copy.deepcopy(net), net, [torch.ones(4, 3, 8, 8)], kept={}, ridge=ridge)


@pytest.mark.parametrize("number", [-1, 0, 1.5, True, "many"])
def test_a_number_of_images_that_is_none_is_refused(number):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.raises(KnapsackError, match=r"images=.*at least one image"):
        tk.recover(copy.deepcopy(net), net, [images()], kept={}, images=number)


class TwoSums(nn.Module):
    """A transformer's block: attention's place is taken by a linear, and each branch reads through a norm."""

    def __init__(self, width=6):
        super().__init__()
        self.norm1, self.mix, self.norm2 = nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def test_a_branch_inside_a_block_is_fitted_to_its_own_sum_too():
    """What an earlier layer lost is made good at the first sum behind it, not only at the end of the block."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(6, 6), nn.Sequential(TwoSums(), TwoSums()), nn.Linear(6, 3)).eval()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student[1][0].fc1 = nn.Linear(6, 3)
        student[1][0].fc1.weight.copy_(teacher[1][0].fc1.weight[:3])
        student[1][0].fc1.bias.copy_(teacher[1][0].fc1.bias[:3])
        student[1][0].fc2 = nn.Linear(3, 6)
        student[1][0].fc2.weight.copy_(teacher[1][0].fc2.weight[:, :3])
    data = [torch.randn(32, 5, 6, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    fits = recover_layers(student, teacher, [x.reshape(32, 5, 6, 1).flatten(2) for x in data],
                          kept={"1.0.fc1": torch.arange(3)})  # fmt: skip
    kinds = {fit.name: fit.target for fit in fits}
    assert kinds["1.0.fc2"] == kinds["1.1.mix"] == kinds["1.1.fc2"] == "block"
    assert kinds["1.1.fc1"] == "layer"
