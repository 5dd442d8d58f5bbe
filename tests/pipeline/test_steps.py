"""A choice in several steps: within the budget, equal to one step where one is asked for, with the same limits."""

import pytest
import timm
import torch

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.pipeline.steps import choose_in_steps
from timm_knapsack.slim.cutting import kept_outputs


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20", num_classes=4, channels=(6, 8, 10)).eval()
    loader = [torch.randn(16, 3, 32, 32)]
    groups = tk.find_channel_groups(model)
    return model, loader, groups, tk.value_curves(model, groups, loader)


def test_one_step_is_the_plain_choice(network):
    model, loader, groups, curves = network
    plain = tk.sweep(model, curves, [tk.Budget(macs=0.5)], groups=groups)[0]
    one = choose_in_steps(model, curves, tk.Budget(macs=0.5), loader, groups=groups, steps=1)
    assert one.report.steps == 1 and one.report.predicted_loss == plain.report.predicted_loss
    assert all(torch.equal(one.keep[name], units) for name, units in plain.keep.items())


@pytest.mark.parametrize("steps", [2, 3])
def test_several_steps_meet_the_budget_and_say_what_they_kept(network, steps):
    model, loader, groups, curves = network
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"min_keep": 0.3, "ignore": ("layer1.0.conv1",)}
    result = choose_in_steps(model, curves, tk.Budget(macs=0.4), loader, groups=groups, steps=steps, **options)
    line = result.report.line("macs")
    assert 0.95 * line.asked < line.counted <= line.asked and line.counted == tk.count_macs(result.model)
    assert result.report.steps == steps
    for group in groups:  # limits are shares of the whole group, not of what an earlier step has left
        assert len(result.keep[group.name]) >= 0.3 * group.size
    assert len(result.keep["layer1.0.conv1"]) == 6
    alone = tk.slice_model(model, groups, result.keep)
    shapes = {name: value.shape for name, value in alone.state_dict().items()}
    assert shapes == {name: value.shape for name, value in result.model.state_dict().items()}
    kept = kept_outputs(groups, result.keep, model)
    assert all(torch.equal(result.kept_channels[name], index) for name, index in kept.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert result.model.channel_config == result.channel_config


def test_the_saved_result_is_the_model(network, tmp_path):
    model, loader, groups, curves = network
    result = tk.prune(model, loader, scores=curves, groups=groups, budget=tk.Budget(macs=0.5), steps=2,
                      base_args={"num_classes": 4, "channels": (6, 8, 10)})  # fmt: skip
    assert result.report.steps == 2 and result.report.loss.recovered
    tk.save_pretrained(result, tmp_path / "half")
    again = timm.create_model(f"local-dir:{tmp_path / 'half'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), result.model.eval()(images))


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "two"])
def test_numbers_of_steps_that_make_no_sense(network, steps):
    model, loader, groups, curves = network
    with pytest.raises(KnapsackError, match="steps="):
        choose_in_steps(model, curves, tk.Budget(macs=0.5), loader, groups=groups, steps=steps)


def test_several_steps_need_curves_and_images(network):
    model, loader, groups, curves = network
    scores = tk.taylor_scores(model, groups, None, criterion="magnitude")
    for values, images in ((scores, loader), (curves, None)):
        with pytest.raises(KnapsackError, match="it needs curves, and images"):
            choose_in_steps(model, values, tk.Budget(macs=0.5), images, groups=groups, steps=2)
