"""The last layer's penalty: by the divergence of class scores on the other half, few images or many."""

import copy

import pytest
import torch
from torch import nn

from timm_knapsack.recovery.closed_form import recover_layers
from timm_knapsack.recovery.output_layer import penalty_of_scores
from timm_knapsack.recovery.ridge import RidgeSums


def penalty(layer, x, target):
    sums = RidgeSums(layer)
    sums.add(x[None], target[None])
    return penalty_of_scores(sums, [(x[None], target[None])], layer.bias.detach(), True, lambda value: value)


def test_scores_that_follow_from_the_inputs_are_fitted():
    layer, x = nn.Linear(8, 5), torch.randn(64, 8)
    assert penalty(layer, x, x @ (3 * torch.randn(8, 5))) <= 1e-2


def test_scores_that_do_not_follow_from_the_inputs_are_hardly_changed():
    """Fewer images than inputs, and the wanted change is noise: a fit is perfect on its own half, and wrong beyond."""
    layer, x = nn.Linear(64, 5), torch.randn(40, 64)
    assert penalty(layer, x, x @ layer.weight.detach().T + torch.randn(40, 5)) >= 10


class Scores(nn.Module):
    """A stem and a classifier; ``times`` is what comes behind it."""

    def __init__(self, times=1.0):
        super().__init__()
        self.stem, self.head, self.times = nn.Conv2d(3, 12, 3), nn.Linear(12, 4), times
        self.num_classes = 4

    def forward(self, x):
        return self.head(self.stem(x).relu().mean((2, 3))) * self.times


@pytest.mark.parametrize(("times", "asked"), [(1.0, 1), (2.0, 0)])
def test_only_the_layer_whose_output_is_the_networks_counts(times, asked, monkeypatch):
    torch.manual_seed(0)
    teacher = Scores(times).eval()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.stem, student.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)
        student.stem.weight.copy_(teacher.stem.weight[:6])
        student.stem.bias.copy_(teacher.stem.bias[:6])
        student.head.weight.copy_(teacher.head.weight[:, :6])
    calls = []
    place = "timm_knapsack.recovery.closed_form.penalty_of_scores"
    monkeypatch.setattr(place, lambda *args: calls.append(args) or 1e-2)
    fits = recover_layers(student, teacher, [torch.randn(40, 3, 6, 6)], kept={"stem": torch.arange(6)})
    assert len(calls) == asked and {fit.name for fit in fits if not fit.skipped} == {"stem", "head"}
