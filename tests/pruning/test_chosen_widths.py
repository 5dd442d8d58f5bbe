"""The widths that are chosen are compared by values too: code may do something else at just these."""

import pytest
import torch
from nets import PlainChain
from oracle import TOLERANCE, seeded, slim_differs_from_masked

import timm_knapsack as tk
from timm_knapsack.channels import value_check
from timm_knapsack.channels.verification import differing
from timm_knapsack.errors import BudgetError

SHAPE = (1, 3, 8, 8)


class Particular(PlainChain):
    """Does something else at one width of conv1 that verification does not happen to draw."""

    at = 5

    def features(self, x):
        x = self.conv1(x)
        return self.conv2((x * 3 if x.shape[1] == self.at else x).relu()).relu()


def found(net=None):
    net = seeded(net or Particular())
    groups = tk.find_channel_groups(net, torch.empty(SHAPE))
    drawn = {len(value_check.drawn_units(groups["conv1"], how)) for how in value_check.WAYS_TO_DRAW}
    assert groups.verified == "values" and groups["conv1"].size == 6 and Particular.at not in drawn
    scores = {group.name: torch.arange(1.0, group.size + 1) for group in groups}
    return net, groups, scores


def test_a_width_that_computes_something_else_is_named():
    net, groups, _ = found()
    right, wrong = {"conv1": [0, 1, 5], "conv2": [0, 2]}, {"conv1": [0, 1, 2, 3, 5], "conv2": [0, 2]}
    assert slim_differs_from_masked(net, groups, right, SHAPE) < TOLERANCE
    assert slim_differs_from_masked(net, groups, wrong, SHAPE) > 0.01
    assert differing(groups, net, groups.check_keep(right)) == {}
    reasons = differing(groups, net, groups.check_keep(wrong))
    assert list(reasons) == ["conv1"] and "at the width that was chosen" in reasons["conv1"]


def test_a_choice_is_compared_once(monkeypatch):
    """There is nothing to draw: the units are those that were chosen."""
    net, groups, _ = found()
    cut, calls = value_check.slice_model, []
    monkeypatch.setattr(value_check, "slice_model", lambda *args: calls.append(1) or cut(*args))
    assert differing(groups, net, groups.check_keep({"conv1": [0, 1, 5], "conv2": [0, 2]})) == {}
    assert len(calls) == 1


def test_pruning_goes_round_it_and_says_so():
    net, groups, scores = found()
    bounds = {"conv1": (5, 6)}
    assert tk.prune(seeded(PlainChain()), scores=scores, budget=tk.Budget(macs=0.85), bounds=bounds,
                    example_inputs=torch.empty(SHAPE)).model.conv1.out_channels == 5  # fmt: skip
    result = tk.prune(net, scores=scores, budget=tk.Budget(macs=0.85), bounds=bounds, groups=groups)
    assert result.model.conv1.out_channels == 6 and result.model.conv2.out_channels < 5
    assert "at the width that was chosen" in result.report.frozen["conv1"]
    assert slim_differs_from_masked(net, groups, result.keep, SHAPE) < TOLERANCE


def test_where_it_can_not_go_round_it_says_why():
    net, groups, scores = found()
    with pytest.raises(BudgetError, match="bounds do not leave conv1 its 6 units, but at the width that was chosen"):
        tk.prune(net, scores=scores, budget=tk.Budget(macs=0.85), bounds={"conv1": (5, 5)}, groups=groups)
    with pytest.raises(BudgetError, match=r"Frozen: .*conv1 .at the width that was chosen"):
        tk.prune(net, scores=scores, budget=tk.Budget(macs=0.6), bounds={"conv1": (5, 6)}, groups=groups)


class NoneLeft(PlainChain):
    """Divides by zero at one width."""

    def features(self, x):
        x = self.conv1(x)
        return self.conv2((x / (x.shape[1] != Particular.at)).relu()).relu()


def test_a_width_without_finite_outputs_is_wrong_too():
    net, groups, _ = found(NoneLeft())
    keep = groups.check_keep({"conv1": [0, 1, 2, 3, 5]})
    assert list(differing(groups, net, keep)) == ["conv1"]


def test_the_report_says_how_it_was_verified():
    net, groups, scores = found()
    by_values = tk.prune(net, scores=scores, budget=tk.Budget(macs=0.9), groups=groups).report
    assert by_values.verified == "values" and "verified" not in str(by_values)
    groups = tk.find_channel_groups(net, torch.empty(SHAPE), verify="shapes")
    by_shapes = tk.prune(net, scores=scores, budget=tk.Budget(macs=0.9), groups=groups).report
    assert by_shapes.verified == "shapes" and str(by_shapes).endswith("verified by shapes (as asked)")
    assert differing(groups, net, groups.check_keep({"conv1": [0, 1, 2, 3, 5]})) == {}  # shapes were asked for
