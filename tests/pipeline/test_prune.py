"""prune(): curves, choice, cut, recovery and what was lost, equal to the same steps taken one by one."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from mixed_net import CLASSES, batches_of, mixed, mixed_groups
from torch.nn import functional as F

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.pipeline.measured_loss import collapse_warning, measure_loss, recovered_if_better
from timm_knapsack.pruning.result import LossLine

HALF = tk.Budget(macs=0.5)


def sharp():
    """A network with a mind of its own: classes that its images are told apart by."""
    model = mixed()
    with torch.no_grad():
        given = torch.cat(images(128))
        logits = model(given)
        model.fc.weight.mul_(3 / logits.std(0).unsqueeze(1))
        model.fc.bias.zero_().sub_(model(given).mean(0))
    assert model(given).argmax(1).unique().numel() == CLASSES
    return model


def images(count=64, batch=16, seed=2):
    return list(torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).split(batch))


def same_weights(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def same_keep(a, b):
    return all(torch.equal(a.keep[name], b.keep[name]) for name in a.keep | b.keep)


@pytest.fixture
def network():
    model = sharp()
    return model, mixed_groups(model)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has collapsed")
        yield


# ---- equal to its steps -------------------------------------------------------------------------------------------


def test_by_default_it_is_curves_choice_and_recovery(network):
    model, groups = network
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = tk.prune(model, images(), budget=HALF, groups=groups)
    curves = tk.value_curves(model, groups, images()).with_power(result.report.scores["power"])
    step = tk.sweep(model, curves, [HALF], groups=groups)[0]
    assert same_keep(result, step)
    assert not same_weights(result.model, step.model)  # sweep refits nothing
    tk.recover(step.model, model, images(), kept=step.kept_channels)
    assert same_weights(result.model, step.model)
    assert result.report.scores["criterion"] == "curves"
    trials = result.report.trials
    assert len(trials) >= 2 and result.report.predicted_loss == pytest.approx(min(trials.values()))
    assert result.report.scores["power"] == float(min(trials, key=trials.get))
    assert result.report.loss == measure_loss(step.model, model, images(), recovered=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert same_weights(tk.prune(model, images(), budget=HALF, groups=groups, method="curves").model, result.model)


def test_the_papers_method_is_taylor_scores_and_the_choice_bit_for_bit(network):
    model, groups = network
    batches = batches_of(16)
    result = tk.prune(model, batches, budget=HALF, groups=groups, method="paper")
    scores = tk.taylor_scores(model, groups, batches, "abs")
    step = tk.sweep(model, scores, [HALF], groups=groups)[0]
    assert same_keep(result, step) and same_weights(result.model, step.model)
    assert result.channel_config == step.channel_config
    assert result.report.scores == {"criterion": "abs", "data": "", "samples": 16}
    assert not result.report.loss.recovered and result.report.predicted_loss is None
    others = tk.prune(model, batches, budget=HALF, groups=groups)
    assert not same_keep(result, others)  # the two are told apart


def test_recovery_can_be_asked_for_or_left_out(network):
    model, groups = network
    plain = tk.prune(model, images(), budget=HALF, groups=groups, recover=False)
    step = tk.sweep(model, tk.value_curves(model, groups, images()), [HALF], groups=groups)[0]
    assert same_weights(plain.model, step.model) and not plain.report.loss.recovered
    recovered = tk.prune(model, images(), budget=HALF, groups=groups)
    assert recovered.report.loss.measured < plain.report.loss.measured
    paper = tk.prune(model, batches_of(16), budget=HALF, groups=groups, method="paper", recover=True)
    assert paper.report.loss.recovered


def test_a_recovery_that_makes_it_worse_is_taken_back(network, monkeypatch):
    model, groups = network
    options = {"scores": tk.value_curves(model, groups, images()), "groups": groups, "budget": HALF}
    spoilt = "timm_knapsack.pipeline.prune.recover_layers"
    monkeypatch.setattr(spoilt, lambda student, *_, **__: student.fc.weight.data.mul_(-1))
    with pytest.warns(UserWarning, match="recovery was taken back"):
        result = tk.prune(model, images(), **options)
    cut = tk.slice_model(model, groups, result.keep)
    assert not result.report.loss.recovered and same_weights(result.model, cut)
    monkeypatch.setattr(spoilt, lambda student, *_, **__: student.fc.weight.data.fill_(float("nan")))
    with pytest.warns(UserWarning, match="recovery was taken back"):
        assert not tk.prune(model, images(), **options).report.loss.recovered
    monkeypatch.setattr(spoilt, lambda student, *_, **__: None)  # neither better nor worse
    assert tk.prune(model, images(), **options).report.loss.recovered


def test_given_scores_serve_many_budgets_and_images_recover(network):
    model, groups = network
    curves = tk.value_curves(model, groups, images())
    alone = tk.prune(model, scores=curves, budget=HALF, groups=groups)
    assert alone.report.loss is None and alone.report.predicted_loss > 0
    both = tk.prune(model, images(), scores=curves, budget=HALF, groups=groups)
    assert same_weights(both.model, tk.prune(model, images(), budget=HALF, groups=groups).model)
    taylor = tk.taylor_scores(model, groups, batches_of(8))
    assert tk.prune(model, images(), scores=taylor, budget=HALF, groups=groups).report.loss.recovered


# ---- loaders ------------------------------------------------------------------------------------------------------


def labelled(batches):
    return [(x, torch.arange(len(x)) % CLASSES) for x in batches]


LOADERS = {
    "iterator": iter,
    "generator": lambda batches: (batch for batch in batches),
    "map": lambda batches: map(lambda batch: batch, batches),
    "pairs": labelled,
    "dicts": lambda batches: [{"pixel_values": x, "labels": y} for x, y in labelled(batches)],
    "dicts, once": lambda batches: ({"pixel_values": x} for x in batches),
    "labels that are none": lambda batches: [(x, torch.full((len(x),), -1)) for x in batches],
    "soft labels": lambda batches: [(x, F.one_hot(y, CLASSES).float()) for x, y in labelled(batches)],
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_loader_gives_the_same(network, kind):
    model, groups = network
    expected = tk.prune(model, images(), budget=HALF, groups=groups)
    found = tk.prune(model, LOADERS[kind](images()), budget=HALF, groups=groups)
    assert same_weights(found.model, expected.model)
    assert found.report.loss.measured == expected.report.loss.measured
    assert (found.report.loss.top1_before is not None) == (kind in ("pairs", "dicts"))


# ---- what was lost ------------------------------------------------------------------------------------------------


def test_the_measured_loss_is_that_of_both_networks(network):
    model, groups = network
    slim = tk.slice_model(model, groups, {"inner": range(3)}).eval()
    x, y = torch.cat(images(50)), torch.arange(50) % CLASSES
    loss = measure_loss(slim, model, list(zip(x.split(16), y.split(16), strict=True)), recovered=True)
    with torch.no_grad():
        before, after = model(x), slim(x)
    distance = F.kl_div(after.log_softmax(1), before.log_softmax(1), log_target=True, reduction="batchmean")
    assert loss.measured == pytest.approx(float(distance), rel=1e-4)
    assert loss.images == 50 and loss.kind == "KL divergence" and loss.recovered
    assert loss.agreement == pytest.approx(float((before.argmax(1) == after.argmax(1)).float().mean()))
    assert loss.top1_before == pytest.approx(100 * float((before.argmax(1) == y).float().mean()), rel=1e-6)
    assert loss.top1_after == pytest.approx(100 * float((after.argmax(1) == y).float().mean()), rel=1e-6)


def test_at_most_512_images_are_measured_on(network):
    model, _ = network
    drawn = []

    def loader():
        for number in itertools.count():
            drawn.append(number)
            yield torch.randn(100, 3, 8, 8), torch.zeros(100, dtype=torch.long)

    loss = measure_loss(model, model, loader(), recovered=False)
    assert loss.images == 512 and str(loss).endswith("on the first 512 images given")
    assert len(drawn) == 6


def test_the_last_line_says_what_was_lost(network):
    model, groups = network
    with_labels = tk.prune(model, labelled(images()), budget=HALF, groups=groups).report
    loss = with_labels.loss
    words = f"recovered: top-1 {loss.top1_after:.1f} % (original {loss.top1_before:.1f} %) on the 64 images given"
    assert with_labels.outcome.startswith(words)
    assert f"KL divergence {loss.measured:.3g}" in with_labels.outcome
    assert f"({with_labels.predicted_loss:.3g} in its trial" in with_labels.outcome
    assert str(with_labels).endswith(with_labels.outcome)
    without = tk.prune(model, images(), budget=HALF, groups=groups).report
    words = f"recovered: the same class as the original on {without.loss.agreement:.1%} of the 64 images given"
    assert without.outcome.startswith(words)
    paper = tk.prune(model, batches_of(8), budget=HALF, groups=groups, method="paper").report
    assert paper.outcome.startswith("not recovered: top-1") and "predicted" not in paper.outcome
    alone = tk.prune(model, scores=tk.value_curves(model, groups, images()), budget=HALF, groups=groups).report
    assert alone.outcome.startswith("predicted loss") and alone.outcome.endswith("not measured, not recovered")
    taylor = tk.prune(model, scores=tk.taylor_scores(model, groups, batches_of(8)), budget=HALF, groups=groups).report
    assert taylor.outcome.startswith("importance kept: ")
    assert all("importance" not in report.outcome for report in (with_labels, without, paper, alone))


def test_a_network_cut_to_the_least_has_collapsed_and_one_cut_a_little_has_not(network):
    model, groups = network
    least = tk.Budget(macs=int(groups.macs([1] * len(groups))))
    own = [(x, model(x).argmax(1)) for x in images(128)]
    with pytest.warns(UserWarning, match=r"has collapsed: top-1 .*To get it back, ask for a larger budget"):
        tk.prune(model, own, budget=least, groups=groups)
    with pytest.warns(UserWarning, match="has collapsed: the same class.*The groups that lose most are .*ignore"):
        tk.prune(model, images(128), budget=least, groups=groups)
    with pytest.warns(UserWarning, match="recover it with images"):
        tk.prune(model, own, budget=least, groups=groups, method="paper")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tk.prune(model, own, budget=tk.Budget(macs=0.9), groups=groups)


def test_what_counts_as_a_collapse():
    line = LossLine("KL divergence", 3.0, 10, True, 0.6)
    assert not line.collapsed and replace(line, agreement=0.4).collapsed
    assert not replace(line, agreement=0.1, top1_before=80.0, top1_after=40.0).collapsed
    assert replace(line, agreement=0.9, top1_before=80.0, top1_after=39.9).collapsed
    features = LossLine("squared error", 0.6, 10, True)
    assert features.collapsed and not replace(features, measured=0.4).collapsed
    assert collapse_warning("net", line, {"a": 1.0}) == ""
    assert "squared error 0.6" in collapse_warning("net", features, {})


# ---- kind errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "papers"}, "method='papers' is none of curves, paper"),
        ({"method": "paper", "criterion": "sum"}, "a criterion is given; leave one of them out"),
        ({"method": "paper", "scores": {}}, "scores are given; leave one of them out"),
        ({"recover": True, "loader": None, "criterion": "magnitude"}, "recover=True needs images"),
        ({"loader": None}, "criterion 'curves' needs data: pass a loader of images"),
        ({"loader": [], "criterion": "curves"}, "gave no images"),
        ({"loader": [3]}, "expected images"),
        ({"criterion": "curves", "per_sample": True}, "per_sample is for Taylor scores"),
        ({"criterion": "curvs"}, "curves"),
        ({"budget": 0.5}, "must be a Budget"),
    ],
    ids=str,
)
def test_errors_say_what_to_do(network, options, words):
    model, groups = network
    with pytest.raises(KnapsackError, match=words) as error:
        tk.prune(model, **{"loader": images(8), "budget": HALF, "groups": groups, **options})
    assert "\n" not in str(error.value)


def test_what_can_only_get_better_is_recovered(network):
    """A cut network whose outputs are no numbers, such as one whose norms were given the wrong statistics."""
    model, groups = network
    slim = tk.sweep(model, tk.taylor_scores(model, groups, criterion="magnitude"), [HALF], groups=groups)[0].model
    weight = slim.fc.weight.detach().clone()
    slim.fc.weight.data.fill_(float("nan"))
    loss, warning = recovered_if_better(slim, model, images(), lambda: slim.fc.weight.data.copy_(weight))
    assert loss.recovered and not warning and slim.fc.weight.isfinite().all()
