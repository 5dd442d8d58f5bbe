"""How losses add up is found by trial: what is chosen is what lost least, and every trial is what a user would get."""

import pytest
import torch
from mixed_net import mixed, mixed_groups

import timm_knapsack as tk
from timm_knapsack.maps.views import random_views
from timm_knapsack.pipeline import trials
from timm_knapsack.pipeline.measured_loss import measure_loss
from timm_knapsack.pipeline.trials import choose_power, with_trials
from timm_knapsack.values.measured_curves import split_held_out

HALF = tk.Budget(macs=0.5)


def images(count=32):
    return [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(count // 8)]


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = mixed()
    with torch.no_grad():  # outputs that say something, as a trained network's do
        model.fc.weight.div_(model(torch.cat(images())).std(0).mean())
    groups = mixed_groups(model)
    return model, groups, tk.value_curves(model, groups, images())


def test_the_power_that_lost_least_is_chosen(network):
    model, groups, curves = network
    chosen, tried = choose_power(model, curves, HALF, images(), groups=groups)
    losses = {trial.power: trial.loss for trial in tried}
    assert chosen.power in losses and losses[chosen.power] == min(losses.values())
    place = trials.POWERS.index(chosen.power)  # its neighbours were tried as well
    assert all(power in losses for power in trials.POWERS[max(place - 1, 0) : place + 2])
    assert dict(chosen) == dict(curves)


def test_a_trial_is_the_network_cut_and_refitted_on_images_apart(network):
    model, groups, curves = network
    _, tried = choose_power(model, curves, HALF, images(), groups=groups)
    fitted, held = split_held_out(images())
    held = held + [random_views(x, seed=number, share=1.0) for number, x in enumerate(held)]
    for trial in tried:
        result = tk.sweep(model, curves.with_power(trial.power), [HALF], groups=groups)[0]
        tk.recover(result.model, model, fitted, kept=result.kept_channels, joint=0, views=False)
        assert measure_loss(result.model, model, held, recovered=True).measured == pytest.approx(trial.loss, rel=1e-4)


def test_it_follows_what_is_measured(network, monkeypatch):
    """Shown to fail otherwise: with losses that fall towards the least power, the least one is found."""
    model, groups, curves = network
    calls = []

    def swept(model, values, budgets, **_):
        calls.append(values.power)
        return [type("Result", (), {"keep": {g.name: torch.tensor([len(calls)]) for g in groups}, "model": model,
                                    "kept_channels": {}, "power": values.power})]  # fmt: skip

    monkeypatch.setattr(trials, "sweep", swept)
    monkeypatch.setattr(trials, "recover_layers", lambda *_, **__: None)
    lost = lambda *_, **__: type("Loss", (), {"measured": calls[-1]})  # noqa: E731
    monkeypatch.setattr(trials.Yardstick, "loss_of", lost)
    chosen, tried = choose_power(model, curves, HALF, images(), groups=groups)
    assert chosen.power == trials.POWERS[0] == min(trial.power for trial in tried)


def test_few_images_try_nothing(network):
    model, groups, curves = network
    assert choose_power(model, curves, HALF, images(8), groups=groups) == (curves, ())


def test_other_budgets_are_tried_at_their_macs(network):
    model, groups, curves = network
    chosen, tried = choose_power(model, curves, tk.Budget(params=0.6), images(), groups=groups)
    assert tried and chosen.power in trials.POWERS


def test_the_report_predicts_on_the_scale_of_the_trials(network):
    model, groups, curves = network
    report = tk.sweep(model, curves, [HALF], groups=groups)[0].report
    scaled = with_trials(report, [trials.Trial(1.0, 0.3), trials.Trial(1.3, 0.2)])
    assert scaled.predicted_loss == pytest.approx(0.2) and scaled.trials == {"1": 0.3, "1.3": 0.2}
    assert scaled.loss_with_more / scaled.predicted_loss == pytest.approx(
        report.loss_with_more / report.predicted_loss
    )
    assert with_trials(report, []) is report
