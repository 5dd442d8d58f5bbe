"""Targets that an activation makes one-sided: what they are, and that fitting to them helps behind the activation."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import timm_knapsack as tk
from timm_knapsack.recovery import closed_form, plans
from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.recovery.rectified import Rectifier
from timm_knapsack.slim.cutting import kept_outputs

INF = math.inf


def rectifier(slope=1.0, offset=0.0, low=0.0, high=INF):
    return Rectifier(torch.tensor([float(slope)]), torch.tensor([float(offset)]), low, high)


def target(rule, wanted, made, extra=0.0):
    return rule.target(torch.tensor([float(wanted)]), torch.tensor([float(made)]), extra).item()


@pytest.mark.parametrize(
    ("rule", "wanted", "made", "expected"),
    [
        (rectifier(), 2, -1, 2),  # the teacher's value counts where it passes
        (rectifier(), -1, -3, -3),  # both are cut off: whatever the student gives is right
        (rectifier(), -1, 1, 0),  # only the teacher's is: as far as the bound
        (rectifier(offset=2), -1, -3, -1),  # a norm's shift moves the bound: z = y + 2, and -1 passes
        (rectifier(offset=2), -3, -1, -2),
        (rectifier(slope=-1), 1, 3, 3),  # a norm that turns the sign round: large values are cut off
        (rectifier(slope=-1), 1, -3, 0),
        (rectifier(slope=-1), -2, 5, -2),
        (rectifier(slope=-2, offset=4), 3, 1, 2),  # z = 4 - 2y: wanted -2, made 2, so the bound
        (rectifier(high=6), 7, 9, 9),  # ReLU6 has two bounds
        (rectifier(high=6), 7, 5, 6),
        (rectifier(high=6), -1, -2, -2),
        (rectifier(high=6), 3, 8, 3),
        (rectifier(low=-INF, high=INF), -3, 5, -3),  # no bounds: plain least squares
    ],
)
def test_targets(rule, wanted, made, expected):
    assert target(rule, wanted, made) == expected


def test_a_shortcut_moves_the_bound():
    assert target(rectifier(), -1, -2, extra=3.0) == -1  # z = 2: it passes
    assert target(rectifier(), -1, 5, extra=-1.0) == 1  # z = -2: as far as z = 0


def test_a_channel_that_the_norm_has_switched_off_keeps_its_target():
    rule = Rectifier(torch.tensor([1.0, 0.0]), torch.zeros(2), 0.0, INF)
    assert rule.target(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0])).tolist() == [0, -1]
    dead = Rectifier(torch.zeros(2), torch.zeros(2), 0.0, INF)
    assert torch.isfinite(dead.target(torch.ones(2), torch.ones(2))).all()


@pytest.mark.parametrize("slope", [1.0, -0.5])
@pytest.mark.parametrize("high", [6.0, INF])
def test_the_distance_from_the_target_bounds_the_error_behind_the_activation(slope, high):
    torch.manual_seed(0)
    rule = Rectifier(torch.tensor([slope]), torch.tensor([0.7]), 0.0, high)
    wanted, made, new = (torch.randn(3, 10_000) * 6).unbind(0)

    def passed(y):
        return (slope * y + 0.7).clamp(0.0, high)

    goal = rule.target(wanted, made)
    torch.testing.assert_close(passed(goal), passed(wanted), rtol=1e-4, atol=1e-4)  # any target is right
    assert ((passed(new) - passed(wanted)).square() <= (slope * (new - goal)).square() + 1e-3).all()
    assert ((goal - made).abs() <= (wanted - made).abs() + 1e-4).all()  # and never farther than the teacher's own


# ---- in a network -------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Convs with an activation behind each but the last."""

    def __init__(self, act, norm, width=12):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = (nn.BatchNorm2d(width) if norm else nn.Identity() for _ in range(2))
        self.act, self.last = act, nn.Conv2d(width, 4, 1)

    def behind(self, x):
        """What the second activation gives."""
        return self.act(self.norm2(self.second(self.act(self.norm1(self.first(x))))))

    def forward(self, x):
        return self.last(self.behind(x))


def images(count=32, size=10, seed=0):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def chain(act, norm=False):
    torch.manual_seed(1)
    net = nn.Sequential(Chain(act, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 0.5, 0.7), nn.init.normal_(module.bias, 0, 0.3)  # some are negative
            nn.init.normal_(module.running_mean, 0, 0.1), nn.init.uniform_(module.running_var, 0.2, 0.6)
    return net


def halved(net, names=("0.first",)):
    groups = tk.find_channel_groups(net, torch.zeros(1, 3, 10, 10))
    keep = {name: range(groups[name].size // 2) for name in names}
    return tk.slice_model(net, groups, keep), kept_outputs(groups, groups.check_keep(keep), net)


def error(net, rounds, monkeypatch):
    monkeypatch.setattr(closed_form, "ROUNDS", rounds)
    slim, kept = halved(net)
    fits = recover_layers(slim, net, [images(48), images(48, seed=1)], kept=kept, ridge=1e-4)
    assert all(torch.isfinite(p).all() for p in slim.parameters())
    x = images(64, seed=7)
    with torch.no_grad():
        return float((slim[0].behind(x) - net[0].behind(x)).square().mean()), slim, fits


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.ReLU(inplace=True)], ids=["relu", "relu6", "in place"])
def test_rounds_lower_the_error_behind_the_activation(act, norm, monkeypatch):
    net = chain(act, norm)
    errors = [error(net, rounds, monkeypatch)[0] for rounds in (0, 1, 2, 6)]
    assert errors[2] < 0.98 * errors[0]
    for before, after in itertools.pairwise(errors):
        assert after < 1.01 * before


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Identity()], ids=lambda a: type(a).__name__)
def test_behind_other_activations_there_are_no_rounds(act, monkeypatch):
    net = chain(act)
    _, plain, _ = error(net, 0, monkeypatch)
    _, rounds, _ = error(net, 3, monkeypatch)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), rounds.state_dict().values(), strict=True)
    )


def test_a_layer_without_an_activation_is_fitted_plainly(monkeypatch):
    """All but the last layer's targets are one-sided; the last is the same regression as without rounds."""
    seen = []
    original = plans.Planner._rectifier

    def noted(self, name, tap, gain):
        found = original(self, name, tap, gain)
        seen.append((name, None if found is None else (found.low, found.high)))
        return found

    monkeypatch.setattr(plans.Planner, "_rectifier", noted)
    error(chain(nn.ReLU()), 1, monkeypatch)
    assert dict(seen) == {"0.first": (0.0, INF), "0.second": (0.0, INF), "0.last": None}
    seen.clear()
    net = chain(nn.ReLU6())
    net[0].first.weight.data.mul_(9)  # values beyond 6
    error(net, 1, monkeypatch)
    assert dict(seen)["0.first"] == (0.0, 6.0)


class Residual(nn.Module):
    """A block with a shortcut of its own conv, as at the start of a ResNet's stage."""

    def __init__(self, inputs, inner, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.down(x))


class WithShortcuts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8, 16, 12, 2), Residual(12, 16, 12, 1))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_block_that_ends_with_a_shortcut_conv(rounds, monkeypatch):
    monkeypatch.setattr(closed_form, "ROUNDS", rounds)
    torch.manual_seed(0)
    net = WithShortcuts().eval()
    groups = tk.find_channel_groups(net, torch.zeros(1, 3, 10, 10))
    keep = {f"blocks.{i}.conv1": range(8) for i in range(2)} | {"stem": range(6)}
    slim, kept = tk.slice_model(net, groups, keep), kept_outputs(groups, groups.check_keep(keep), net)
    x = images(32, seed=9)
    with torch.no_grad():
        lost = (slim(x) - net(x)).square().mean()
        fits = recover_layers(slim, net, [images(48), images(48, seed=1)], kept=kept)
        left = (slim(x) - net(x)).square().mean()
    kinds = {fit.name: fit.target for fit in fits if not fit.skipped}
    assert [kinds[f"blocks.{i}.conv2"] for i in range(2)] == ["block", "block"]
    assert kinds["blocks.0.down.0"] == "layer"
    assert left < 0.5 * lost
