"""Latency tables, surfaces, stairs, refusals and the budget loop, on a device that is made up: no test times anything.

``Device`` is a clock whose time moves by what each layer *would* take, a function of its weight's shape. So the truth
is known, and what the code makes of it can be compared with it.
"""

import copy
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.costs.latency import layer_timing
from timm_knapsack.costs.latency.conditions import MeasuringConditions
from timm_knapsack.costs.latency.cost import LatencyCost
from timm_knapsack.costs.latency.layer_timing import Conditions, LayerTimer
from timm_knapsack.costs.latency.network_timing import Latency, notch
from timm_knapsack.costs.latency.plan import find_timed_layers, grid_plan, group_steps, stairs_plan
from timm_knapsack.costs.latency.table import LatencyTable, compare_latency, measure_latency
from timm_knapsack.costs.latency.time_surface import Surface, find_step, fit_surface
from timm_knapsack.errors import BudgetError, LatencyError
from timm_knapsack.slim.channel_groups import Count


def linear_device(module: nn.Module) -> float:
    """Seconds of a conv or linear on a device without stairs: something for each weight, and for each channel."""
    weight = module.weight
    return 1e-5 + 1e-7 * weight.shape[0] * weight.shape[1] + 1e-6 * weight.shape[0]


def stair_device(module: nn.Module) -> float:
    """The same, but channels are taken eight at a time."""
    out, into = (-(-n // 8) * 8 for n in module.weight.shape[:2])
    return 1e-5 + 1e-7 * out * into + 1e-6 * out


class Device:
    """A clock that makes time up.

    Args:
        seconds: what a layer takes.
        overhead: what a whole network takes beyond its layers, as a fraction.
        noise: relative standard deviation of every reading.
        drift: called with the number of the mark; multiplies the time.
    """

    def __init__(self, seconds=linear_device, overhead=0.0, noise=0.0, drift=lambda mark: 1.0, seed=0):
        self.seconds_of, self.overhead, self.noise, self.drift = seconds, overhead, noise, drift
        self.random = np.random.default_rng(seed)
        self.marks, self.now, self.running = 0, 0.0, None
        self.passes = 0

    def mark(self, module=None):
        if self.running is not None:
            noise = 1 + self.noise * self.random.standard_normal()
            self.now += self._time(self.running) * self.drift(self.marks) * noise
        self.marks += 1
        self.passes += module is None
        self.running = module
        return self.now

    def _time(self, module):
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            return self.seconds_of(module)
        layers = [m for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        return (1 + self.overhead) * sum(self.seconds_of(m) for m in layers)

    def seconds(self, marks):
        return [float(b - a) for a, b in pairwise(marks)]


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


class Net(nn.Module):
    """Groups: the stream of 64 and two inner ones of 96."""

    pretrained_cfg = {"input_size": (3, 6, 6)}  # noqa: RUF012

    def __init__(self, width=64, inner=96, blocks=2):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width, inner) for _ in range(blocks)))
        self.fc = nn.Linear(width, 10)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def model():
    return Net().eval()


@pytest.fixture(scope="module")
def groups(model):
    return tk.find_channel_groups(model, verify=False)


@pytest.fixture(scope="module")
def tables(model, groups):
    """Tables of the two exact devices, measured once."""
    return {device: measured(model, groups, Device(device)) for device in (linear_device, stair_device)}


@pytest.fixture
def table(tables):
    """Of the device without stairs; a copy that a test may spoil."""
    return copy.deepcopy(tables[linear_device])


@pytest.fixture
def scores(groups):
    return {group.name: torch.rand(group.size, dtype=torch.float64) for group in groups}


def true_seconds(network, seconds=linear_device):
    return Device(seconds)._time(network)


# ---- one network --------------------------------------------------------------------------------------------------


def test_a_latency_is_the_median_of_its_passes():
    latency = Latency.of([0.010, 0.011, 0.012, 0.030])
    assert latency.median == pytest.approx(0.0115)
    assert repr(latency) == "Latency(11.5 ms ± 2.9 ms, 4 passes)"


def test_measure_latency_reads_the_clock_and_leaves_the_model_alone():
    model = Net().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    latency = measure_latency(model, batch_size=2, clock=Device())
    assert latency.median == pytest.approx(true_seconds(model))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_measuring_stops_when_the_median_is_known(model):
    exact = measure_latency(model, clock=Device())
    noisy = measure_latency(model, clock=Device(noise=0.05), precision=0.01, max_seconds=300)
    assert len(exact.samples) < len(noisy.samples) <= 1000
    assert noisy.uncertainty <= 0.01
    assert noisy.median == pytest.approx(true_seconds(model), rel=0.03)


def test_networks_are_compared_in_turns_so_that_drift_cancels(model):
    half = Net(32, 48).eval()
    truth = true_seconds(half) / true_seconds(model)
    drifting = {"drift": lambda mark: 1 + mark / 20}  # the machine gets slower and slower
    together = compare_latency([model, half], clock=Device(**drifting), precision=0, max_seconds=0)
    clock = Device(**drifting)
    apart = [measure_latency(net, clock=clock, precision=0, max_seconds=0).median for net in (model, half)]
    assert together.ratios[1] == pytest.approx(truth, rel=0.1)
    assert abs(apart[1] / apart[0] / truth - 1) > 0.2  # what the turns are for


def test_a_compared_network_has_run_just_before_it_is_timed(model):
    """Else it would pay for what the others left in the caches, and the slower network more than the faster one."""
    half = Net(32, 48).eval()

    class Cold(Device):
        before = None

        def mark(self, module=None):
            start = super().mark(module)
            if module is not None and module is not self.before:
                self.now += 0.5 * true_seconds(model)  # a network that comes after another one starts cold
                self.before = module
            return start

    comparison = compare_latency([model, half], clock=Cold(), precision=0, max_seconds=0)
    assert comparison.latencies[0].median == pytest.approx(true_seconds(model))
    assert comparison.ratios[1] == pytest.approx(true_seconds(half) / true_seconds(model))


def test_one_disturbed_pass_of_two_leaves_the_ratio_alone(model):
    """Noise only adds: of two passes the faster one says more about the network."""
    half = Net(32, 48).eval()
    truth = true_seconds(half) / true_seconds(model)

    class Disturbed(Device):
        def mark(self, module=None):
            start = super().mark(module)
            if module is not None and self.passes % 4 in (0, 3):  # now the first pass of a turn, now the second
                self.now += true_seconds(model)
            return start

    comparison = compare_latency([model, half], clock=Disturbed(), precision=0, max_seconds=0)
    assert comparison.ratios[1] == pytest.approx(truth)


def test_layer_times_sum_to_the_network(model):
    clock, names = Device(), ["stem", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2", "fc"]
    timer = LayerTimer(model, names, clock)
    times = timer.time_pass(torch.zeros(1, 3, 6, 6))
    assert list(times) == ["", *names]
    assert sum(times.values()) == pytest.approx(true_seconds(model))
    assert times["blocks.0.conv2"] == pytest.approx(linear_device(model.blocks[0].conv2))
    assert not any(module._forward_pre_hooks for module in model.modules())  # copies would take hooks along


def test_a_layer_that_runs_twice_costs_twice():
    model = Net().eval()
    model.blocks[1] = model.blocks[0]
    times = LayerTimer(model, ["blocks.0.conv1", "blocks.0.conv2"], Device()).time_pass(torch.zeros(1, 3, 6, 6))
    assert times["blocks.0.conv1"] == pytest.approx(2 * linear_device(model.blocks[0].conv1))


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 1.5}, {"threads": 0}, {"device": "mps"}])
def test_impossible_conditions_are_refused(model, wrong):
    with pytest.raises(LatencyError, match=next(iter(wrong)).replace("device", "'cpu' and 'cuda'")):
        measure_latency(model, clock=Device(), **wrong)


def test_one_set_of_conditions_serves_every_function(model, groups):
    asked = MeasuringConditions(batch_size=3, threads=1, dtype=torch.float64, max_seconds=0)
    table = LatencyTable.measure(model, groups, conditions=asked, clock=Device(), rounds=1)
    assert table.conditions == Conditions.of(model, batch_size=3, threads=1, dtype=torch.float64)
    by_name = {"batch_size": 3, "threads": 1, "dtype": torch.float64, "max_seconds": 0}
    latency = measure_latency(model, conditions=asked, clock=Device())
    assert latency == measure_latency(model, clock=Device(), **by_name)
    assert latency == compare_latency([model], clock=Device(), **by_name).latencies[0]
    assert Conditions.of(model, asked, batch_size=5).batch_size == 5  # by name wins
    with pytest.raises(LatencyError, match="'thread'; did you mean threads"):
        measure_latency(model, thread=2)


def test_conditions_follow_the_model(model):
    assert Conditions.of(model).memory_format == "contiguous"
    conditions = Conditions.of(Net().to(memory_format=torch.channels_last).double(), batch_size=3)
    assert (conditions.memory_format, conditions.dtype, conditions.batch_size) == ("channels_last", "float64", 3)
    images = conditions.images()
    assert images.shape == (3, 3, 6, 6) and images.is_contiguous(memory_format=torch.channels_last)
    assert Conditions.from_dict(json.loads(json.dumps(conditions.to_dict()))) == conditions


def test_threads_are_set_while_measuring_only(model):
    before = torch.get_num_threads()
    with replace(Conditions.of(model), threads=before + 1).active():
        assert torch.get_num_threads() == before + 1
        assert torch.is_inference_mode_enabled()
    assert torch.get_num_threads() == before


# ---- surfaces and stairs ------------------------------------------------------------------------------------------


def grid(first, second):
    return np.array([(a, b) for a in first for b in second], dtype=float)


KNOTS = (np.array([8, 24, 40, 56, 64]), np.array([8, 32, 64, 96]))


def test_a_surface_goes_through_times_that_rise():
    points = grid(*KNOTS)
    seconds = 1e-5 + 1e-7 * points[:, 0] * points[:, 1] + 1e-6 * points[:, 0]
    surface = fit_surface(points, seconds, KNOTS)
    fitted = [surface.at(*point) for point in points]
    assert fitted == pytest.approx(seconds, rel=1e-3)
    assert surface.at(33, 47) == pytest.approx(1e-5 + 1e-7 * 33 * 47 + 33e-6, rel=1e-3)
    assert surface.at(1, 1) == surface.at(8, 8)  # below what was measured: as much as the least that was
    assert surface.pooled == 0


def falls(values):
    return bool((np.diff(values, axis=0) < -1e-15).any() or (np.diff(values, axis=1) < -1e-15).any())


def test_a_surface_never_falls_however_noisy_the_times_are():
    points = grid(*KNOTS)
    random = np.random.default_rng(2)
    truth = 1e-5 + 1e-7 * points[:, 0] * points[:, 1]
    seconds = truth * np.exp(0.25 * random.standard_normal(len(points)))
    surface = fit_surface(points, seconds, KNOTS)
    assert falls(seconds.reshape(5, 4))  # the check can fail
    assert not falls(surface.values)
    assert surface.pooled > 0 and surface.residual > 0.01  # and it says that it overruled something
    error = np.abs([surface.at(*point) for point in points] - truth) / truth
    assert np.median(error) < np.median(np.abs(seconds - truth) / truth)  # nearer to the truth than the measurement


def test_a_surface_bends_where_the_times_do():
    points = np.repeat(grid(*KNOTS), 3, axis=0)
    seconds = np.where(points[:, 0] > 40, 3e-4, 1e-4) * (1 + 0.01 * np.tile([-1, 0, 1], len(points) // 3))
    surface = fit_surface(points, seconds, KNOTS)
    assert surface.at(40, 32) == pytest.approx(1e-4, rel=0.1)
    assert surface.at(56, 32) == pytest.approx(3e-4, rel=0.1)


@pytest.mark.parametrize("least", [0.0, 5e-324, 1e-300, 1e-12])
def test_a_layer_too_quick_for_the_clock_leaves_a_surface(least):
    points = grid(*KNOTS)
    seconds = np.full(len(points), 1e-5)
    seconds[3] = least
    whole = fit_surface(points, np.full(len(points), 1e-5), KNOTS)
    surface = fit_surface(points, seconds, KNOTS)
    assert np.isfinite(surface.values).all() and (surface.values <= whole.values * 1.05).all()
    none = fit_surface(points, np.full(len(points), least), KNOTS)
    assert np.isfinite(none.values).all() and (none.values < 1e-8).all()


def test_widths_that_no_copy_reaches_together_leave_a_surface():
    points = grid(*KNOTS)
    seconds = 1e-5 + 1e-7 * points[:, 0] * points[:, 1]
    corner = (points == points.max(axis=0)).all(axis=1)
    surface = fit_surface(points[~corner], seconds[~corner], KNOTS)
    assert np.isfinite(surface.values).all() and not falls(surface.values)
    assert [surface.at(*point) for point in points[~corner]] == pytest.approx(seconds[~corner], rel=1e-2)


def test_one_outlier_does_not_move_a_surface():
    points = grid(*KNOTS)
    truth = 1e-5 + 1e-7 * points[:, 0] * points[:, 1]
    seconds = truth * np.where(np.arange(len(points)) == 7, 4.0, 1.0)
    surface = fit_surface(points, seconds, KNOTS)
    error = np.abs([surface.at(*point) for point in points] - truth) / truth
    assert np.quantile(error, 0.8) < 0.05


OFFSETS = (-16, -15, -12, -9, -8, -7, -4, -1, 0)


@pytest.mark.parametrize("step", [1, 4, 8, 16])
def test_stairs_are_found(step):
    offsets = np.array(OFFSETS)
    seconds = 1e-3 + 1e-5 * (-(-offsets // step) * step)
    assert find_step(OFFSETS, seconds) == step
    noisy = seconds * (1 + 0.002 * np.random.default_rng(0).standard_normal(len(seconds)))
    assert find_step(OFFSETS, noisy) == step


def test_channels_off_the_stairs_may_even_be_slower():
    assert find_step(OFFSETS, [1.0, 1.3, 1.3, 1.3, 1.1, 1.4, 1.4, 1.4, 1.2]) == 8


def test_noise_alone_is_no_staircase():
    random = np.random.default_rng(0)
    found = [find_step(OFFSETS, 1 + 0.01 * np.array(OFFSETS) + 0.001 * random.standard_normal(9)) for _ in range(50)]
    assert found.count(1) >= 45


def test_stairs_that_noise_may_hide_are_assumed():
    """Ten percent of noise: nobody can tell, and to miss the stairs costs more than to see some that are not there."""
    random = np.random.default_rng(0)
    found = [find_step(OFFSETS, 1 + 0.01 * np.array(OFFSETS) + 0.1 * random.standard_normal(9)) for _ in range(50)]
    assert 1 not in found and found.count(8) >= 25


# ---- plans --------------------------------------------------------------------------------------------------------


def test_the_copies_show_every_layer_at_every_pair_of_levels(model, groups):
    layers = find_timed_layers(model, groups, Conditions.of(model))
    assert [layer.name for layer in layers][:3] == ["stem", "blocks.0.conv1", "blocks.0.conv2"]
    assert [layer.kind for layer in layers][:3] == ["conv", "pointwise", "conv"]
    copies = grid_plan(groups, layers, [8] * len(groups))
    assert len(copies) == 25
    for layer in layers:
        pairs = {tuple(width.at(copy) for width in layer.widths) for copy in copies}
        free = [width for width in layer.widths if width.units]
        assert len(pairs) == 5 ** len(free), layer.name
    assert all(n % 8 == 0 and n >= 8 for copy in copies for n in copy)
    assert groups.sizes in copies


def test_equal_layers_have_equal_shapes_and_others_not(model, groups):
    layers = {layer.name: layer for layer in find_timed_layers(model, groups, Conditions.of(model))}
    assert layers["blocks.0.conv1"].shape == layers["blocks.1.conv1"].shape
    assert layers["blocks.0.conv1"].shape != layers["blocks.0.conv2"].shape


def test_steps_go_to_the_groups_that_meet_the_layer(model, groups):
    layers = find_timed_layers(model, groups, Conditions.of(model))
    assert group_steps(groups, layers, {"conv": 8, "pointwise": 1, "linear": 1}) == [8, 8, 8]
    assert group_steps(groups, layers, {"linear": 16}) == [16, 1, 1]
    assert groups[0].size == 64
    assert group_steps(groups, layers, {"linear": 64}) == [32, 1, 1]  # too few channels for such bundles


def test_stair_copies_differ_by_single_channels(groups):
    copies = stairs_plan(groups)
    assert [copy[0] - copies[-1][0] for copy in copies] == list(OFFSETS)
    assert copies[-1][0] % 16 == 0


# ---- tables -------------------------------------------------------------------------------------------------------


def measured(model, groups, clock, **options):
    return LatencyTable.measure(model, groups, clock=clock, **{"rounds": 1, **options})


def test_a_table_predicts_networks_that_were_never_measured(model, groups):
    cost = measured(model, groups, Device(overhead=0.1)).cost(model, groups)
    random = np.random.default_rng(3)
    for _ in range(10):
        kept = [int(random.integers(group.size // 8, group.size + 1)) for group in groups]
        slim = tk.slice_model(model, groups, {g.name: range(n) for g, n in zip(groups, kept, strict=True)})
        assert cost.at(kept) == pytest.approx(1.1 * true_seconds(slim), rel=0.02)
        more = np.array(kept) + np.eye(len(groups), dtype=int)
        slopes = [cost.at(row) - cost.at(kept) for row in np.minimum(more, groups.sizes)]
        inside = [n < group.size for n, group in zip(kept, groups, strict=True)]
        assert cost.marginal(kept)[inside] == pytest.approx(np.array(slopes)[inside], rel=0.3)


def test_drift_of_the_machine_is_taken_out(model, groups):
    clock = Device(drift=lambda mark: 1 + (mark // 2000) % 2)  # twice as slow half of the time
    cost = measured(model, groups, clock, rounds=2).cost(model, groups)
    half = [n // 2 for n in groups.sizes]
    slim = tk.slice_model(model, groups, {g.name: range(n) for g, n in zip(groups, half, strict=True)})
    assert cost.at(half) / cost.at(groups.sizes) == pytest.approx(true_seconds(slim) / true_seconds(model), rel=0.1)


def test_stairs_are_found_where_only_one_width_of_a_layer_can_move():
    """As in ResNet-56, whose stream is too narrow to be moved by 16 channels."""
    narrow = Net(width=16, inner=64).eval()
    table = measured(narrow, tk.find_channel_groups(narrow, verify=False), Device(stair_device))
    assert table.stairs["conv"] == 8


def test_stairs_are_assumed_where_no_width_can_move():
    tiny = Net(width=16, inner=16).eval()
    table = measured(tiny, tk.find_channel_groups(tiny, verify=False), Device())
    assert table.stairs["conv"] == 8


def test_stairs_of_a_device_become_bundles(model, groups, tables):
    assert tables[stair_device].stairs["conv"] == 8
    assert tables[stair_device].cost(model, groups).steps == [8, 8, 8]
    assert tables[linear_device].cost(model, groups).steps == [1, 1, 1]


def test_a_saved_table_is_the_table(model, groups, tmp_path, table):
    table.save(tmp_path / "cpu.json")
    loaded = LatencyTable.load(tmp_path / "cpu.json")
    assert loaded == table
    assert loaded.cost(model, groups).at(groups.sizes) == table.cost(model, groups).at(groups.sizes)
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert {"device_name", "threads", "batch_size", "dtype", "memory_format"} <= set(data["conditions"])
    assert set(data["versions"]) == {"torch", "timm", "timm_knapsack", "python"} and data["date"]


def test_a_table_says_how_far_it_can_be_trusted(model, groups, table):
    table.cost(model, groups)
    assert "batch 1" in str(table) and "falls pooled" in str(table)
    assert "something else ran: 0%" in str(table)
    table.visits[3]["reference"] *= 3
    assert "something else ran: 0%" not in str(table)


def test_a_finished_table_is_not_measured_again(model, groups, tmp_path):
    path = tmp_path / "cpu.json"
    table = measured(model, groups, Device(), path=path)
    clock = Device()
    assert measured(model, groups, clock, path=path) == table
    assert clock.passes == 0


class StopsAfter(Device):
    """A device that is unplugged after so many marks."""

    def __init__(self, marks):
        super().__init__()
        self.left = marks

    def mark(self, module=None):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().mark(module)


@pytest.mark.parametrize("marks", [200, 1200])
def test_an_interrupted_measurement_goes_on_where_it_stopped(model, groups, table, tmp_path, marks):
    whole = table
    path = tmp_path / "cpu.json"
    with pytest.raises(KeyboardInterrupt):
        measured(model, groups, StopsAfter(marks), path=path)
    partial = LatencyTable.load(path)
    assert 0 < len(partial.visits) < len(whole.visits) and not partial.complete
    with pytest.raises(LatencyError, match="not complete"):
        partial.cost(model, groups)
    resumed = measured(model, groups, Device(), path=path)
    assert resumed.visits[: len(partial.visits)] == partial.visits
    assert [(v["plan"], v["round"], v["copy"]) for v in resumed.visits] == [
        (v["plan"], v["round"], v["copy"]) for v in whole.visits
    ]
    assert resumed.cost(model, groups).at(groups.sizes) == pytest.approx(whole.cost(model, groups).at(groups.sizes))


def test_measuring_stops_early_when_rounds_agree_and_goes_on_when_not(model, groups):
    exact = measured(model, groups, Device(), rounds=3, max_seconds=1000)
    noisy = measured(model, groups, Device(noise=0.3), rounds=3, max_seconds=1000)
    assert {visit["round"] for visit in exact.visits if visit["plan"] == "grid"} == {0, 1}
    assert {visit["round"] for visit in noisy.visits if visit["plan"] == "grid"} == {0, 1, 2}


def test_time_that_is_up_still_leaves_one_full_round(model, groups):
    table = measured(model, groups, Device(noise=0.3), rounds=4, max_seconds=0)
    assert table.complete
    assert len([visit for visit in table.visits if visit["plan"] == "grid"]) == 25


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_table_is_refused_for_another_network(model, groups, table):
    other = Net(48).eval()
    with pytest.raises(LatencyError, match=r"measured for Net .*this model is Net"):
        table.cost(other, tk.find_channel_groups(other, verify=False))


def test_a_table_is_refused_for_another_batch_size(model, groups, tmp_path):
    table = measured(model, groups, Device(), batch_size=2, path=tmp_path / "cpu.json")
    with pytest.raises(LatencyError, match=r"batch size 2, and 8 is asked"):
        table.cost(model, groups, batch_size=8)
    with pytest.raises(LatencyError, match=r"batch_size 8, not 2"):
        measured(model, groups, Device(), batch_size=8, path=tmp_path / "cpu.json")


@pytest.mark.parametrize("change", [{"device_name": "Another CPU"}, {"threads": 77}])
def test_a_table_is_refused_elsewhere_unless_that_is_said(model, groups, tmp_path, change, table):
    table.conditions = replace(table.conditions, **change)
    table.save(tmp_path / "far.json")
    with pytest.raises(LatencyError, match=f"{next(iter(change.values()))}, and here it is"):
        LatencyTable.load(tmp_path / "far.json").cost(model, groups)
    cost = LatencyTable.load(tmp_path / "far.json", elsewhere=True).cost(model, groups)
    assert cost.at(groups.sizes) == pytest.approx(true_seconds(model), rel=0.02)
    assert cost.compare(model, model) is None  # a prediction, and no measurement that pretends to be one


def test_another_torch_warns(model, groups, table):
    table.versions["torch"] = "1.0"
    with pytest.warns(UserWarning, match=r"torch 1\.0"):
        table.cost(model, groups)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("{}", "not a latency table"), (None, "No such file"), ("[1]", "not a latency table")],
)
def test_files_that_are_no_tables_are_refused(tmp_path, text, message):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LatencyError, match=message):
        LatencyTable.load(path)


def test_a_damaged_table_says_so(model, groups, tmp_path, table):
    table.save(tmp_path / "cpu.json")
    data = json.loads((tmp_path / "cpu.json").read_text())
    del data["visits"]
    (tmp_path / "cpu.json").write_text(json.dumps(data))
    with pytest.raises(LatencyError, match="damaged"):
        LatencyTable.load(tmp_path / "cpu.json")


# ---- budgets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [linear_device, stair_device])
@pytest.mark.parametrize("fraction", [0.7, 0.5])
def test_a_latency_budget_holds_on_the_device(model, groups, scores, tables, device, fraction):
    table = copy.deepcopy(tables[device])
    result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(latency=fraction, table=table))
    ratio = true_seconds(result.model, device) / true_seconds(model, device)
    assert 0.97 * fraction <= ratio <= 1.02 * fraction
    line = result.report.line("latency")
    assert line.measured / line.original_measured == pytest.approx(ratio)
    assert line.counted / line.original == pytest.approx(ratio, rel=0.05)
    assert "measured" in str(result.report)
    if device is stair_device:
        assert all(len(kept) % 8 == 0 for kept in result.keep.values())


def test_a_latency_budget_takes_value_curves_and_the_whole_call(model, groups, tables):
    """Curves, trials, cut, recovery; other budgets choose by the same values."""
    images = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    table = copy.deepcopy(tables[stair_device])
    result = tk.prune(model, images, groups=groups, budget=tk.Budget(latency=0.5, table=table))
    ratio = true_seconds(result.model, stair_device) / true_seconds(model, stair_device)
    assert 0.97 * 0.5 <= ratio <= 1.02 * 0.5
    report = result.report
    assert report.scores["criterion"] == "curves" and report.trials and report.predicted_loss > 0
    assert report.loss.recovered and report.loss.measured >= 0


def test_a_table_that_is_wrong_is_corrected_by_measuring(model, groups, scores):
    class Faster(Device):
        """Slim networks take less than the sum of their layers, as where a cache begins to hold them."""

        def _time(self, module):
            seconds = super()._time(module)
            narrow = isinstance(module, Net) and module.stem.out_channels < 64 and not self.building
            return seconds * (0.8 if narrow else 1)

    clock = Faster()
    clock.building = True
    table = measured(model, groups, clock)
    clock.building = False
    result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(latency=0.5, table=table))
    line = result.report.line("latency")
    assert result.report.corrections >= 1
    assert 0.975 <= line.measured / line.original_measured / 0.5 <= 1.015
    assert line.counted / line.original > 0.55  # the prediction is reported as it was, not as corrected
    table.elsewhere = True  # without measuring, the miss would have gone unseen
    blind = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(latency=0.5, table=table))
    assert blind.report.line("latency").measured is None
    assert clock._time(blind.model) / clock._time(model) < 0.45


def test_noise_does_not_mislead_the_correction(model, groups, scores, table):
    table.check_seconds = 0
    misses = []
    for seed in range(8):  # one alone may be lucky
        table.clock = Device(noise=0.2, seed=seed)
        result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(latency=0.5, table=table))
        misses.append(abs(true_seconds(result.model) / true_seconds(model) / 0.5 - 1))
    assert np.mean(misses) < 0.12


def test_a_time_in_milliseconds_is_a_budget_too(model, groups, scores, table):
    asked = 0.6 * true_seconds(model)
    budget = tk.Budget(latency=f"{asked * 1e3:.6f}ms", table=table)
    result = tk.prune(model, scores=scores, groups=groups, budget=budget)
    assert 0.97 * asked <= true_seconds(result.model) <= 1.02 * asked


def test_time_and_parameters_together(model, groups, scores, table):
    budget = tk.Budget(latency=0.6, params=0.4, table=table)
    result = tk.prune(model, scores=scores, groups=groups, budget=budget)
    assert tk.count_params(result.model) <= 0.4 * tk.count_params(model)
    assert true_seconds(result.model) <= 0.61 * true_seconds(model)


def test_the_report_tells_every_layer(model, groups, scores, table):
    result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(latency=0.5, table=table))
    times = {line.name: line for line in result.report.layer_costs["latency"]}
    modules = dict(result.model.named_modules())
    assert list(times) == table.layers
    for name, line in times.items():
        assert line.original == pytest.approx(linear_device(model.get_submodule(name)))
        assert line.measured == pytest.approx(linear_device(modules[name]))
        assert line.predicted == pytest.approx(line.measured, rel=0.1)
    assert result.report.to_dict()["layer_costs"]["latency"][0]["name"] == "stem"


def test_the_choice_is_near_the_certificate(model, groups, scores, table):
    report = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(latency=0.5, table=table)).report
    assert report.value <= report.upper_bound
    assert report.value >= 0.98 * report.upper_bound


def test_a_time_that_can_not_be_reached_says_what_can(model, groups, scores, table):
    with pytest.raises(BudgetError, match="smallest reachable"):
        tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(latency=0.001, table=table))


# ---- costs --------------------------------------------------------------------------------------------------------


def test_a_cost_is_the_sum_of_its_surfaces():
    surface = Surface((np.array([1.0, 10.0]), np.array([2.0])), np.array([[1.0], [10.0]]))
    widths = (Count(0, ((0, 1),)), Count(2, ()))
    both = (Count(0, ((1, 2),)), Count(2, ()))
    cost = LatencyCost(["a", "b"], [widths, both], [surface, surface], 2, calibration=(2.0, 0.5))
    assert cost.at([4, 3]) == pytest.approx(2 * (4 + 6) + 0.5)
    assert cost.marginal([4, 3]) == pytest.approx([2, 4])
    assert cost.at([0.5, 100]) == pytest.approx(2 * (1 + 10) + 0.5)  # outside of what was measured: its ends


def test_flat_stretches_still_have_a_slope():
    knots = np.array([8.0, 16.0, 24.0])
    surface = Surface((knots, np.array([1.0])), np.array([[1.0], [2.0], [2.0]]))
    widths = [(Count(0, ((0, 1),)), Count(1, ()))]
    narrow = LatencyCost(["a"], widths, [surface], 1, windows=np.array([[1.0], [1.0]]))
    wide = LatencyCost(["a"], widths, [surface], 1, windows=np.array([[8.0], [1.0]]))
    assert narrow.marginal([20]) == pytest.approx([0.0])
    assert wide.marginal([20]) == pytest.approx([0.5 / 12])


def test_a_width_between_two_stairs_costs_as_the_upper_one():
    surface = Surface((np.array([8.0, 16.0, 28.0]), np.array([1.0])), np.array([[1.0], [2.0], [3.0]]))
    widths = [(Count(0, ((0, 1),)), Count(1, ()))]
    cost = LatencyCost(["a"], widths, [surface], 1, stairs=[8], windows=np.array([[8.0], [1.0]]))
    assert [cost.at([n]) for n in (3, 8, 9, 15, 16, 24, 25, 28)] == pytest.approx([1, 1, 2, 2, 2, 2 + 8 / 12, 3, 3])
    assert cost.marginal([12]) == pytest.approx([(2 + 4 / 12 - 1) / 12])  # a bundle is not free


def test_the_clock_of_a_cpu_is_a_wall_clock_and_nothing_else_is_known(model):
    conditions = Conditions.of(model)
    assert isinstance(conditions.clock(), layer_timing.WallClock)
    assert isinstance(replace(conditions, device="cuda").clock(), layer_timing.CudaClock)
    assert isinstance(replace(conditions, timer="thread").clock(), layer_timing.ThreadClock)
    with pytest.raises(LatencyError, match="threads=1"):
        Conditions.of(model, threads=2, timer="thread")
    with pytest.raises(LatencyError, match="timer='sundial'"):
        Conditions.of(model, timer="sundial")
    with pytest.raises(LatencyError, match="tpu"):
        replace(conditions, device="tpu").clock()
    assert notch([1.0]) == float("inf")


def test_a_real_clock_runs_through_once(model, groups, tmp_path):
    table = LatencyTable.measure(model, groups, path=tmp_path / "t.json", rounds=1, max_seconds=0, progress=True)
    assert table.complete and all(seconds >= 0 for visit in table.visits for seconds in visit["layers"])
