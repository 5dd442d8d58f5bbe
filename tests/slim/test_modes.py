"""The one mode guard: every module gets its own mode back, and nobody keeps a second guard by hand."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import timm_knapsack
from timm_knapsack.recovery.batchnorm import reestimate_batchnorm
from timm_knapsack.slim.modes import eval_mode, modes_kept


def mixed():
    """A training model with a frozen norm, and a dropout in eval inside of it."""
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval(), nn.Sequential(nn.Dropout().eval(), nn.ReLU()))


def modes(model):
    return [module.training for module in model.modules()]


def test_each_module_gets_its_own_mode_back():
    first, second = mixed(), mixed().eval()
    before = modes(first), modes(second)
    with eval_mode(first, second):
        assert not any(modes(first) + modes(second))
    assert (modes(first), modes(second)) == before


@pytest.mark.parametrize("guard", [eval_mode, modes_kept])
def test_modes_come_back_after_an_error(guard):
    model = mixed()
    before = modes(model)
    with pytest.raises(RuntimeError, match="inside"), guard(model):
        model.train()
        raise RuntimeError("inside")
    assert modes(model) == before


def test_modes_kept_changes_nothing_itself():
    model = mixed()
    before = modes(model)
    with modes_kept(model):
        assert modes(model) == before


def test_statistics_are_estimated_anew_and_the_norm_stays_frozen():
    model = nn.Sequential(nn.BatchNorm1d(2).eval())
    reestimate_batchnorm(model, [torch.tensor([[1.0, 3.0], [3.0, 5.0]])])
    assert model[0].running_mean.tolist() == [2.0, 4.0]
    assert modes(model) == [True, False] and model[0].momentum == 0.1


def test_nobody_sets_modes_by_hand():
    """``module.training = …`` stands in one file of the library."""
    library = Path(timm_knapsack.__file__).parent
    writers = {
        path.relative_to(library).as_posix()
        for path in library.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "training" and isinstance(node.ctx, ast.Store)
    }
    assert writers == {"slim/modes.py"}
