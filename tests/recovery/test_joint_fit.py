"""All layers of a block fitted together: steps lead down, images held out decide, nothing else in the model changes."""

import copy

import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.maps.walk import Walk, find_segments, watch_execution
from timm_knapsack.recovery import joint_fit
from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.recovery.joint_fit import FittedLayer, JointFit


class Block(nn.Module):
    """A residual block with a norm behind one layer and a bias in the other."""

    def __init__(self, width: int = 6, inner: int = 5):
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inner, width, 1)

    def forward(self, x):
        return x + self.conv2(self.act(self.bn1(self.conv1(x))))


def network(inner: int = 5) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sequential(Block(inner=inner)), nn.Flatten(), nn.Linear(6 * 36, 4))
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return net.eval()


def at_block(net: nn.Module, images: torch.Tensor) -> Walk:
    walk = Walk(net, list(images.split(16)), find_segments(net, watch_execution(net, images[:2]).order))
    walk.advance()
    return walk


def moments(walk: Walk, name: str, norm: str | None) -> FittedLayer:
    """The inputs' second moments, gathered the plain way: by unfolding every position."""
    layer, seen = walk.modules[name], []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    for batch in range(walk.probe):
        walk.run(batch)
    handle.remove()
    x = nn.functional.unfold(torch.cat(seen), layer.kernel_size, padding=layer.padding).transpose(1, 2).flatten(0, 1)
    return FittedLayer(name, (x.T @ x / len(x)).unsqueeze(0), x.mean(0, keepdim=True), norm)


def fit(net, targets_of, layers, steps):
    torch.manual_seed(1)
    images = torch.randn(64, 3, 6, 6)
    walk = at_block(net, images)
    targets = targets_of(images).split(16)
    fitted = [moments(walk, name, norm) for name, norm in layers]
    with torch.no_grad():
        return JointFit(walk, fitted, targets, range(4), lambda value: value).run(steps)


def test_batches_of_few_images_hold_some_out_too():
    held = [int(joint_fit._held_out(count, seed).sum()) for count in (1, 2, 4) for seed in range(8)]
    assert [sum(held[start : start + 8]) for start in (0, 8, 16)] == [1, 2, 4]


BOTH = (("1.0.conv1", "1.0.bn1"), ("1.0.conv2", None))


def test_more_steps_come_closer():
    teacher = network(inner=5)
    errors = []
    for steps in (0, 1, 3, 8):
        student = copy.deepcopy(teacher)
        with torch.no_grad():
            for part in (student[1][0].conv1, student[1][0].conv2):
                part.weight.add_(0.1 * torch.randn(part.weight.shape))
        before, after = fit(student, lambda x: teacher[1](teacher[0](x)).detach(), BOTH, steps)
        assert after <= before
        errors.append(after)
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.3 * errors[0]


def test_a_layer_that_enters_the_output_linearly_is_solved_for():
    """Where the error is a parabola, a few conjugate steps reach the least squares solution, shift included."""
    teacher = network()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student[1][0].conv2.weight.normal_()
        student[1][0].conv2.bias.normal_()
    _, after = fit(student, lambda x: teacher[1](teacher[0](x)).detach(), BOTH[1:], 12)
    assert after < 1e-5


def test_shifts_end_in_the_norm_or_the_bias():
    """The network that is left gives what the fit has seen: no hook, no parameter of its own."""
    teacher, student = network(), network()
    with torch.no_grad():
        student[1][0].conv1.weight.add_(0.2)
    images = torch.randn(64, 3, 6, 6)
    _, after = fit(student, lambda x: teacher[1](teacher[0](x)).detach(), BOTH, 3)
    assert all(not module._forward_hooks for module in student.modules())
    assert not torch.equal(student[1][0].bn1.running_mean, teacher[1][0].bn1.running_mean)
    assert all(p.requires_grad and p.grad is None for p in student.parameters())
    torch.manual_seed(1)
    images = torch.randn(64, 3, 6, 6)
    held = torch.zeros(64, dtype=torch.bool)
    held[joint_fit.HELD_OUT - 1 :: joint_fit.HELD_OUT] = True
    with torch.no_grad():
        wanted, made = (net[1](net[0](images)) for net in (teacher, student))
    spread = torch.cat([(t - t.mean((0, 2, 3), keepdim=True)).square().flatten(1).sum(1) for t in wanted.split(16)])
    missed = (made - wanted).square().flatten(1).sum(1)
    assert float(missed[held].sum() / spread[held].sum()) == pytest.approx(after, rel=1e-3)


def test_the_start_is_kept_where_images_held_out_say_so():
    student = network()
    before = copy.deepcopy(student.state_dict())

    def contradictory(images):  # right for the held-out images, wrong for the others
        wanted = student[1](student[0](images)).detach().clone()
        held = torch.zeros(len(images), dtype=torch.bool)
        held[joint_fit.HELD_OUT - 1 :: joint_fit.HELD_OUT] = True
        wanted[~held] *= -1
        return wanted

    assert fit(student, contradictory, BOTH, 4)[1] == pytest.approx(0, abs=1e-9)
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_recovery_with_joint_steps_misses_less(monkeypatch):
    torch.manual_seed(0)
    model = network(inner=8)
    images = [torch.randn(16, 3, 6, 6) for _ in range(8)]
    groups = tk.find_channel_groups(model, torch.zeros(1, 3, 6, 6))
    keep = {group.name: torch.arange(3) for group in groups if group.name == "1.0.conv1"}
    kept = {"1.0.conv1": torch.arange(3)}
    lost = []
    for joint in (0, 6):
        slim = tk.slice_model(model, groups, keep)
        recover_layers(slim, model, images, kept=kept, joint=joint)
        with torch.no_grad():
            lost.append(float((slim[1](slim[0](images[0])) - model[1](model[0](images[0]))).square().mean()))
    assert lost[1] < 0.98 * lost[0]


@pytest.mark.parametrize("joint", [-1, 1.5, True, "four"])
def test_a_number_of_steps_that_is_none_is_refused(joint):
    model = network()
    with pytest.raises(tk.KnapsackError, match=r"joint=.*whole number"):
        tk.recover(copy.deepcopy(model), model, [torch.randn(4, 3, 6, 6)], kept={}, joint=joint)
