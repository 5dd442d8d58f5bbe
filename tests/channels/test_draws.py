"""Which units a verification takes away, and what its parts see: each by its definition, over many sizes and groups."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from timm_knapsack.channels import dry_run, value_check
from timm_knapsack.channels.dry_run import ShapeCheck
from timm_knapsack.channels.grouping import groups_of
from timm_knapsack.channels.tracing import run_trace
from timm_knapsack.slim.channel_groups import ChannelGroup
from timm_knapsack.slim.copying import on_meta

# ---- by shapes


def kept_in_draw(monkeypatch, sizes, draw):
    """The units of each group that a draw keeps; nothing is cut."""
    check, seen = object.__new__(ShapeCheck), []
    check.groups = [SimpleNamespace(name=str(i), size=n) for i, n in enumerate(sizes)]
    check.shadow = None

    def noted(shadow, groups, keep):
        seen.append(keep)
        raise ZeroDivisionError("enough")

    monkeypatch.setattr(dry_run, "slice_model", noted)
    assert isinstance(check.failure(range(len(sizes)), draw), ZeroDivisionError)
    return seen[0]


@pytest.mark.parametrize("size, least", [(2, 1), (3, 2), (4, 2), (5, 2), (8, 2), (12, 3), (20, 5), (24, 6)])
def test_a_draw_keeps_two_units_and_a_quarter_and_the_first_two_lose_some(monkeypatch, size, least):
    """Each number of units between comes up; from the third draw on a group may keep all of its units."""
    for draw, most in ((1, size - 1), (2, size - 1), (3, size), (6, size)):
        kept = kept_in_draw(monkeypatch, [size] * 500, draw)
        assert {len(units) for units in kept.values()} == set(range(least, most + 1))
        for units in kept.values():
            assert units == sorted(set(units)) and 0 <= units[0] and units[-1] < size
        assert {u for units in kept.values() for u in units} == set(range(size))
    assert kept_in_draw(monkeypatch, [size] * 9, 1) != kept_in_draw(monkeypatch, [size] * 9, 2)


class Halves(nn.Module):
    """Both halves of a conv's channels are cut out, at the place that follows the width."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.conv1(x)
        half = y.shape[1] // 2
        return self.conv2(torch.cat([y[:, :half].exp(), y[:, half:]], 1))


@pytest.fixture(scope="module")
def check():
    net, inputs = on_meta(Halves()), (torch.empty(1, 3, 4, 4, device="meta"),)
    trace = run_trace(net, inputs)
    return ShapeCheck(groups_of(net, net, trace, inputs), net, inputs, trace)


def unit_of(check):
    """For each label the unit that it is of, where nothing was taken away."""
    trace = run_trace(check.shadow, check.inputs)
    unit = np.full(trace.labels.count, -1)
    for (name, dim), first in trace.param_labels.items():
        size = check.groups.shapes[name][dim]
        unit[first : first + size] = check._component[check._first_label[name, dim] + np.arange(size)]
    return trace, unit


def test_cuts_are_compared_one_by_one(check):
    trace, unit = unit_of(check)
    assert check._wrong_cut(trace, unit, {}) is None and len(trace.labels.cuts) >= 2
    for i, cut in enumerate(trace.labels.cuts):
        assert cut is not None

        def with_cut(new, i=i):
            former = list(trace.labels.cuts)
            trace.labels.cuts[i] = new
            try:
                return str(check._wrong_cut(trace, unit, {}))
            finally:
                trace.labels.cuts[:] = former

        assert with_cut(cut) == "None"
        assert with_cut(cut[:-1]) == with_cut(cut[1:]) == "a cut falls in another place than in the full model"
        assert with_cut(cut[::-1].copy()) == "a cut falls in another place than in the full model"
        for place in range(len(cut)):  # one channel in the place of another
            for channel in range(unit.max() + 1):
                holders = np.flatnonzero(unit == channel)
                if len(holders) and channel != unit[cut[place]]:
                    moved = cut.copy()
                    moved[place] = holders[0]
                    assert "a cut falls" in with_cut(moved)
        assert with_cut(None) == "None"  # a part that can't be followed says nothing
        unknown = np.flatnonzero(unit < 0)
        if len(unknown):
            moved = cut.copy()
            moved[0] = unknown[0]  # a label that no parameter has says nothing about its place
            assert with_cut(moved) == "None"


def test_as_many_parts_as_in_the_full_model(check):
    trace, unit = unit_of(check)
    for cuts in (trace.labels.cuts[:-1], [*trace.labels.cuts, trace.labels.cuts[0]]):
        other = SimpleNamespace(labels=SimpleNamespace(cuts=cuts))
        words = f"channels are cut into {len(cuts)} parts instead of {len(trace.labels.cuts)}"
        assert str(check._wrong_cut(other, unit, {})) == words


def test_a_full_cut_that_can_not_be_followed_says_nothing(check, monkeypatch):
    trace, unit = unit_of(check)
    monkeypatch.setattr(check, "_cuts", [None] * len(trace.labels.cuts))
    assert check._wrong_cut(trace, unit, {}) is None


def test_macs_are_counted_exactly(check):
    trace, _ = unit_of(check)
    assert check._wrong_macs(trace, {}) is None
    for i, group in enumerate(check.groups):
        for left in range(1, group.size):
            sizes = [left if other is group else other.size for other in check.groups]
            failure = str(check._wrong_macs(trace, {group.name: range(left)}))
            assert failure == f"{check.groups.macs()} MACs are left instead of {check.groups.macs(sizes)}", i


# ---- by values


def group(size, name="g", crosses=False):
    return ChannelGroup(name, size, (), crosses_norm=crosses)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 13, 20, 40])
@pytest.mark.parametrize("crosses", [False, True])
def test_each_number_of_units_that_a_way_to_draw_may_keep_comes_up(size, crosses):
    """Of a hundred groups: "some" keeps a third to three quarters of those inside, "few" up to a fifth of all."""
    least = min(2 if crosses else 1, size - 1)
    inside = size - 2 if size - 2 >= least else size - 1
    drawn = {how: [value_check.drawn_units(group(size, f"g{i}", crosses), how) for i in range(150)]
             for how in value_check.WAYS_TO_DRAW}  # fmt: skip
    counts = {how: {len(units) for units in drawn[how]} for how in drawn}
    assert counts["some"] == set(range(max(least, inside // 3), max(least, inside * 3 // 4) + 1))
    assert counts["few"] == set(range(least, max(least, size // 5) + 1))
    for some, many in zip(drawn["some"], drawn["many"], strict=True):
        if size == 2:
            assert many == [0, 1]
        elif size == 3:
            assert len(many) == 2
        else:
            assert len(many) in (size - 1, size - 2) and (len(some) - len(many)) % 2 == 1
        assert many[0] == 0 and 0 not in some
    units = {how: {u for units in drawn[how] for u in units} for how in drawn}
    assert units["few"] == set(range(size)) and units["many"] == set(range(size))
    assert units["some"] == set(range(1, size - 1) if inside == size - 2 else range(1, size))


def test_neighbours_are_drawn_in_different_ways_and_each_in_all():
    check = object.__new__(value_check.ValueCheck)
    check.groups = [group(30, f"g{i}") for i in range(6)]
    ways = {how: [value_check.drawn_units(g, how) for g in check.groups] for how in value_check.WAYS_TO_DRAW}
    for draw in check.draws:
        names = [next(how for how in ways if ways[how][i] == check.units(i, draw)) for i in range(6)]
        assert all(a != b for a, b in itertools.pairwise(names))
    for i in range(6):
        assert {tuple(check.units(i, draw)) for draw in check.draws} == {tuple(ways[how][i]) for how in ways}


def groups_with(macs, parameters):
    return SimpleNamespace(macs=lambda: macs, shapes={"a": (parameters - 6,), "b": (2, 3)})


@pytest.mark.parametrize("macs, images", [(1e9, 2), (1e9 + 1, 1)])
def test_the_work_of_comparing(macs, images):
    """Eight passes, in float64, and a thousand MACs for each weight."""
    assert value_check.work_of_check(groups_with(macs, 50)) == 8 * images * 2 * macs + 1000 * 50


def test_what_is_too_dear():
    """More than 200 M parameters; or more than 1e11 MACs and more than a tenth of 256 images forward and backward."""
    assert value_check.too_dear(groups_with(10**12, 200_000_000)) == ""
    assert value_check.too_dear(groups_with(10**12, 200_000_001)) == "2e+08 parameters, more than 2e+08"
    assert value_check.too_dear(groups_with(0, 100_000_000)) == ""  # 1e11 is little
    assert value_check.too_dear(groups_with(0, 100_000_001)) == (
        "it would take more than all of scoring 256 images, more than 10%"
    )
    scoring = 2_000_000_000 * 256 * 3
    parameters = (scoring // 10 - 8 * 2 * 2_000_000_000) // 1000
    assert value_check.too_dear(groups_with(2_000_000_000, parameters)) == ""
    assert value_check.too_dear(groups_with(2_000_000_000, parameters + 1)).startswith("it would take 10% of")


def test_what_a_comparison_may_hide_is_far_below_a_mistake():
    assert 1e-12 < value_check.TOLERANCE < 1e-8
    assert value_check._difference([torch.ones(1)], [torch.ones(1)]) <= value_check.TOLERANCE


def test_random_inputs_are_two_images_where_one_was_given():
    given = (torch.zeros(1, 3, 4), torch.zeros(2, 3), torch.tensor(1.0), torch.tensor([[5, 6]]), "word",
             torch.zeros(0, 3), torch.tensor(4), torch.ones(1, 2, dtype=torch.int32, device="meta"))  # fmt: skip
    for batch in (1, 2):
        image, two, number, indices, word, none, index, meta = value_check._random_inputs(given, batch)
        assert image.shape == (batch, 3, 4) and two.shape == (2, 3) and number.shape == () and none.shape == (0, 3)
        assert {x.dtype for x in (image, two, number)} == {torch.float64} and image.std() > 0.5
        assert torch.equal(indices, torch.tensor([[5, 6]] * batch)) and word == "word" and index == 4
        assert torch.equal(meta, torch.zeros(batch, 2, dtype=torch.int32))
    assert torch.equal(value_check._random_inputs(given, 1)[0], value_check._random_inputs(given, 1)[0])
    assert not torch.equal(image[0], image[1])


@pytest.mark.parametrize("outputs, why", [
    ([], "not finite numbers"), ([torch.tensor([1])], "not finite numbers"),
    ([torch.tensor([1.0, float("nan")])], "not finite"), ([torch.ones(2), torch.tensor([float("inf")])], "not finite"),
    ([torch.zeros(2), torch.zeros(0)], "are zero"), ([torch.zeros(2), torch.tensor([1e-30])], None),
    ([torch.tensor([3]), torch.ones(1)], None), ([torch.zeros(0)], "are zero"),
])  # fmt: skip
def test_outputs_that_would_agree_with_anything_prove_nothing(outputs, why):
    if why is None:
        return value_check._must_tell(outputs)
    with pytest.raises(value_check.NoValues, match=why):
        value_check._must_tell(outputs)


def test_differences_of_odd_outputs():
    difference = value_check._difference
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert difference([], []) == 0 and difference([torch.zeros(0)], [torch.zeros(0)]) == 0
    assert difference([zeros], [zeros]) == 0 and difference([zeros + 1e-3], [zeros]) > 1e20
    assert difference([ones], [torch.ones(1)]) == float("inf") and difference([ones], [ones, ones]) == float("inf")
    assert difference([ones, ones * 1.5], [ones, ones]) == difference([ones * 1.5, ones], [ones, ones]) == 0.5
    assert difference([torch.tensor([1])], [torch.tensor([1])]) == 0
    assert difference([-ones], [ones]) == 2


def test_an_op_that_rounds_coarsely_is_noted_wherever_it_stands():
    with value_check._LowestPrecision() as seen:
        torch.zeros(2, dtype=torch.float64) + 1
        torch.arange(3)
        torch.topk(torch.ones(3, dtype=torch.float64), k=2)
    assert seen.eps == torch.finfo(torch.float64).eps
    with value_check._LowestPrecision() as seen:
        (torch.ones(2, dtype=torch.float64).float() + 1).double()
    assert seen.eps == torch.finfo(torch.float32).eps and value_check._LowestPrecision.eps == 0


@pytest.mark.parametrize("macs, runs", [(1, 60), (0, 60), (200e9 / 60, 60), (200e9 / 30, 30), (20e9, 10), (1e15, 10)])
def test_a_network_runs_sixty_times_at_most_and_ten_at_least(macs, runs, monkeypatch):
    monkeypatch.setattr(value_check, "live_copy", lambda model, *_: model)
    monkeypatch.setattr(value_check, "_run", lambda *_: [])

    class Groups(list):
        def macs(self):
            return macs

    check = value_check.ValueCheck(Groups(), nn.Identity(), (torch.zeros(1, 2),), None)
    assert check.most_runs == runs
    assert check.inputs[0].shape[0] == (2 if macs <= 1e9 else 1)


def test_a_network_of_single_images_is_compared_on_one(monkeypatch):
    def one_only(model, inputs):
        if len(inputs[0]) > 1:
            raise ValueError("one at a time")
        return []

    class Groups(list):
        def macs(self):
            return 1

    monkeypatch.setattr(value_check, "live_copy", lambda model, *_: model)
    monkeypatch.setattr(value_check, "_run", one_only)
    check = value_check.ValueCheck(Groups(), nn.Identity(), (torch.zeros(1, 2),), None)
    assert check.inputs[0].shape == (1, 2)


def test_a_choice_is_compared_at_just_its_widths():
    check = object.__new__(value_check.ChoiceCheck)
    check.groups, check.keep = [group(4, "a"), group(5, "b")], {"a": [1], "b": [0, 2]}
    assert [check.units(i, 0) for i in (0, 1)] == [[1], [0, 2]] and list(check.draws) == [0]
