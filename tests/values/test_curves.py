"""Value curves as data: through what was measured, monotone, convex hull, saved = loaded, and files that are wrong."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_net import mixed, mixed_groups
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import timm_knapsack as tk
from timm_knapsack.errors import ScoreError
from timm_knapsack.values.curves import POWER, TOGETHER, GroupCurve
from timm_knapsack.values.valuation import load_values


def made_up(size, counts=None, seed=0, note=""):
    random = np.random.default_rng(seed)
    counts = sorted({max(1, size // 5), max(1, size // 2), max(1, 3 * size // 4)}) if counts is None else counts
    counts = np.array([c for c in counts if c < size] or [1])
    error = np.concatenate([np.cumsum(random.exponential(size=size))[::-1], [0.0]])
    loss = np.sort(random.exponential(size=len(counts)))[::-1].copy()
    return GroupCurve(random.permutation(size), error, counts, loss, note)


curves = st.builds(
    made_up, st.integers(1, 40), st.none() | st.sets(st.integers(1, 39), min_size=1).map(sorted), st.integers(0, 10**6)
)


@settings(max_examples=100, deadline=None)
@given(curves)
def test_losses_pass_through_what_was_measured_and_fall_with_width(curve):
    losses = curve.losses()
    assert losses.shape == (curve.size + 1,) and np.isfinite(losses).all()
    assert losses[curve.size] == 0
    assert (np.diff(losses) <= 1e-12).all()
    inside = curve.counts[curve.counts < curve.size]  # a group of one unit is measured at that one
    np.testing.assert_allclose(losses[inside], curve.loss[: len(inside)], rtol=1e-9)


def test_the_check_of_the_fall_can_fail():
    falls = GroupCurve(np.array([0, 1]), np.array([2.0, 1.0, 0.0]), np.array([1]), np.array([0.5]))
    rises = GroupCurve(np.array([0, 1]), np.array([1.0, 2.0, 0.0]), np.array([1]), np.array([0.5]))
    assert (np.diff(falls.losses()) <= 0).all() and not (np.diff(rises.losses()) <= 0).all()


def test_noise_in_the_measured_losses_does_not_make_a_curve_rise():
    """Less lost at fewer units, as held-out images may say: the wider one's loss counts for both."""
    error = np.arange(10, -1, -1.0)
    curve = GroupCurve(np.arange(10), error, np.array([2, 5, 8]), np.array([0.3, 0.1, 0.2]))
    losses = curve.losses()
    assert (np.diff(losses) <= 1e-12).all()
    np.testing.assert_allclose(losses[[2, 5, 8]], [0.3, 0.2, 0.2])


def test_losses_of_zero_and_errors_of_zero_are_fine():
    error = np.array([3.0, 2, 1, 0, 0, 0])  # dead units: nothing is lost at all
    curve = GroupCurve(np.arange(5), error, np.array([1, 2, 4]), np.array([0.4, 0.0, 0.0]))
    losses = curve.losses()
    assert np.isfinite(losses).all() and losses[1] == pytest.approx(0.4)
    assert losses[3:].max() < 1e-9
    nothing = GroupCurve(np.arange(3), np.zeros(4), np.array([1, 2]), np.zeros(2))
    assert nothing.losses().max() < 1e-9 and nothing.hull().max() < 1e-5


def test_outside_of_the_measured_widths_it_is_a_power_law():
    error = np.array([16.0, 8, 4, 2, 1, 0])
    curve = GroupCurve(np.arange(5), error, np.array([2, 3]), np.array([0.16, 0.04]))  # error ÷ 2, loss ÷ 4
    np.testing.assert_allclose(curve.losses(), [2.56, 0.64, 0.16, 0.04, 0.01, 0.0])


@settings(max_examples=100, deadline=None)
@given(curves)
def test_the_hull_is_convex_and_the_largest_such_curve_below(curve):
    losses, hull = curve.losses() ** POWER, curve.hull()
    scale = max(losses[1], 1e-12)
    assert (hull[1:] <= losses[1:] + 1e-12 * scale).all()
    assert (np.diff(hull[1:], 2) >= -1e-9 * scale).all()
    assert hull[curve.size] == 0 and hull[1] == losses[1]
    corners = [1, *(i for i in range(2, curve.size) if np.diff(hull, 2)[i - 1] > 1e-9 * scale), curve.size]
    np.testing.assert_allclose(hull[corners], losses[corners], atol=1e-9 * scale)  # it bends where it touches only


# ---- curves of a network ----------------------------------------------------------------------------------------


@pytest.fixture
def network():
    model = mixed()
    groups = mixed_groups(model)
    made = {g.name: made_up(g.size, seed=i, note="why" if i == 1 else "") for i, g in enumerate(groups)}
    return model, groups, tk.ValueCurves(made, model="Mixed", data="noise", samples=7)


def test_saved_is_loaded(network, tmp_path):
    _, groups, curves = network
    path = tmp_path / "values.safetensors"
    curves.save(path)
    for loaded in (tk.ValueCurves.load(path), tk.ValueCurves.load(path, groups), load_values(path, groups)):
        assert list(loaded) == sorted(curves) or list(loaded) == list(curves)
        for name, curve in curves.items():
            for part in ("order", "error", "counts", "loss"):
                assert np.array_equal(getattr(loaded[name], part), getattr(curve, part))
                assert getattr(loaded[name], part).dtype == getattr(curve, part).dtype
            assert loaded[name].note == curve.note
        assert (loaded.model, loaded.data, loaded.samples) == ("Mixed", "noise", 7)
        assert loaded.about == {"criterion": "curves", "data": "noise", "samples": 7, "power": POWER}
    assert [p.name for p in tmp_path.iterdir()] == ["values.safetensors"]


def test_either_kind_of_file_is_told_by_what_it_holds(network, tmp_path):
    model, groups, curves = network
    curves.save(tmp_path / "a")
    tk.taylor_scores(model, groups, criterion="magnitude").save(tmp_path / "b")
    assert isinstance(load_values(tmp_path / "a", groups), tk.ValueCurves)
    assert isinstance(load_values(tmp_path / "b", groups), tk.Scores)


def changed(path, change, metadata=None):
    """The same file with other tensors or other words."""
    with safe_open(path, framework="pt") as file:
        words = dict(file.metadata())
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {**words, **(metadata or {})})


def set_part(name, value):
    return lambda tensors: tensors.__setitem__(name, torch.tensor(value))


ERROR = [float(n) for n in range(8, -1, -1)]
WRONG = {
    "order twice": set_part("inner/order", [0, 0, 1, 2, 3, 4, 5, 6]),
    "order too far": set_part("inner/order", [8, 0, 1, 2, 3, 4, 5, 6]),
    "order of two dims": set_part("inner/order", [[0, 1], [2, 3]]),
    "order a number": set_part("inner/order", 3),
    "error nan": set_part("inner/error", [float("nan"), *ERROR[1:]]),
    "error rises": set_part("inner/error", ERROR[::-1]),
    "error too short": set_part("inner/error", ERROR[1:]),
    "counts none": lambda tensors: tensors.update(
        {"inner/counts": torch.zeros(0).long(), "inner/loss": torch.zeros(0)}
    ),
    "counts zero": set_part("inner/counts", [0, 4, 6]),
    "counts all": set_part("inner/counts", [1, 4, 8]),
    "counts fall": set_part("inner/counts", [6, 4, 1]),
    "counts more than losses": set_part("inner/counts", [1, 2, 4, 6]),
    "loss nan": set_part("inner/loss", [0.3, float("nan"), 0.1]),
    "loss infinite": set_part("inner/loss", [float("inf"), 0.2, 0.1]),
    "loss negative": set_part("inner/loss", [0.3, 0.2, -0.1]),
    "part missing": lambda tensors: tensors.pop("inner/error"),
    "a stray tensor": set_part("stray", [1.0]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_whose_curves_make_no_sense_is_refused_in_one_line(kind, network, tmp_path):
    _, groups, curves = network
    path = tmp_path / "values.safetensors"
    curves.save(path)
    changed(path, lambda tensors: None)
    tk.ValueCurves.load(path, groups)  # unchanged, it is read
    changed(path, WRONG[kind])
    with pytest.raises(ScoreError) as error:
        tk.ValueCurves.load(path, groups)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    "metadata",
    [{"format": "timm-knapsack/other"}, {"about": "{"}, {"about": "[]"}, {"about": "{}"}, {"notes": "3"}],
    ids=json.dumps,
)
def test_words_that_make_no_sense_are_refused(metadata, network, tmp_path):
    _, groups, curves = network
    path = tmp_path / "values.safetensors"
    curves.save(path)
    changed(path, lambda tensors: None, metadata)
    with pytest.raises(ScoreError) as error:
        tk.ValueCurves.load(path, groups)
    assert "\n" not in str(error.value)


def test_other_files_are_refused(network, tmp_path):
    model, groups, _ = network
    scores, broken, weights = tmp_path / "scores", tmp_path / "broken", tmp_path / "weights"
    tk.taylor_scores(model, groups, criterion="magnitude").save(scores)
    broken.write_bytes(b"not safetensors")
    save_file({"a": torch.ones(2)}, weights)
    for path, words in [(scores, "not a file of value curves"), (weights, "not a file of value curves")]:
        with pytest.raises(ScoreError, match=words):
            tk.ValueCurves.load(path)
    for path in (broken, tmp_path / "missing", tmp_path):
        for load in (tk.ValueCurves.load, load_values):
            with pytest.raises(ScoreError, match=r"can't be read as|there is no file") as error:
                load(path)
            assert "\n" not in str(error.value)


def test_curves_of_other_groups_are_refused(network, tmp_path):
    _, groups, curves = network
    others = {
        "no curve for 'inner'": {name: curve for name, curve in curves.items() if name != "inner"},
        "a curve for 'layer9', which is no group": {**curves, "layer9": made_up(3)},
        "the curve of 'inner' has 5 units, the group 8": {**curves, "inner": made_up(5)},
    }
    for words, other in others.items():
        with pytest.raises(ScoreError, match=words):
            tk.ValueCurves(other).checked(groups)
        tk.ValueCurves(other, model="Mixed").save(tmp_path / "values")
        with pytest.raises(ScoreError, match=rf"values \(measured on Mixed\).*{words}"):
            tk.ValueCurves.load(tmp_path / "values", groups)


@pytest.mark.parametrize("fraction", [0.8, 0.5, 0.3])
def test_the_ladder_meets_budgets(network, fraction):
    model, groups, curves = network
    budget = tk.Budget(macs=fraction)
    result = tk.sweep(model, curves, [budget], groups=groups)[0]
    report = result.report
    line = report.line("macs")
    assert line.counted <= line.asked
    counts = {name: len(kept) for name, kept in result.keep.items()}
    for name, kept in result.keep.items():  # the units that go last stay
        assert kept.tolist() == sorted(curves[name].order[curves[name].size - counts[name] :].tolist())
    powers = {name: curves[name].hull()[count] for name, count in counts.items()}
    lost = {name: power ** (1 / POWER) for name, power in powers.items()}
    assert report.predicted_loss == pytest.approx(sum(loss**TOGETHER for loss in lost.values()) ** (1 / TOGETHER))
    assert report.group_losses == {
        name: pytest.approx(loss) for name, loss in lost.items() if name in report.group_losses
    }
    assert list(report.group_losses.values()) == sorted(report.group_losses.values(), reverse=True)
    assert report.predicted_loss >= sum(lost.values())  # groups that are cut together lose more than one by one
    assert report.loss_with_more <= report.predicted_loss and 0 <= report.loss_gap <= report.predicted_loss
    for name, size in groups_sizes(groups).items():  # one more unit of any group would not have fitted, or buys nothing
        more = {**result.keep, name: torch.arange(min(counts[name] + 1, size))}
        slim = tk.slice_model(model, groups, more)
        fits = tk.count_macs(slim, (3, 8, 8)) <= line.asked
        assert not fits or counts[name] == size or lost[name] < 1e-9


def groups_sizes(groups):
    return {group.name: group.size for group in groups}


def test_a_smaller_budget_loses_more(network):
    model, groups, curves = network
    results = tk.sweep(model, curves, [tk.Budget(macs=f) for f in (1.0, 0.8, 0.5, 0.3)], groups=groups)
    lost = [result.report.predicted_loss for result in results]
    assert lost[0] == 0 and lost == sorted(lost) and lost[-1] > lost[1]


def test_groups_of_one_unit():
    curve = GroupCurve(np.array([0]), np.array([1.0, 0.0]), np.array([1]), np.array([0.0]))
    assert curve.losses()[1] == 0 and curve.hull()[1] == 0
    assert np.isfinite(curve.losses()).all()
