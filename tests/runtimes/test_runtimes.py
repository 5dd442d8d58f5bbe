"""Runtimes give the network's outputs, name every layer in their profiles, refuse what they can't do; the list is open.

ONNX Runtime and OpenVINO come with the dev extra; a test is skipped only where its package is missing.
"""

import json
import re

import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.costs.latency import correction, measurement
from timm_knapsack.costs.latency.layer_timing import Conditions, ProcessClock, ThreadClock
from timm_knapsack.costs.latency.table import LatencyTable, compare_latency
from timm_knapsack.errors import LatencyError, RuntimeChoiceError
from timm_knapsack.runtimes import runtime as runtime_module
from timm_knapsack.runtimes.kinds import RUNTIMES, open_runtime
from timm_knapsack.runtimes.layer_marks import by_layer, mark_layers, marks
from timm_knapsack.runtimes.onnx_graph import OPSET, count_onnx, input_shape, to_onnx
from timm_knapsack.runtimes.runtime import AsModule, Runtime, register_runtime

LAYERS = ["stem", "conv1", "conv2", "down", "wide", "fc"]


def needs(name: str):
    return pytest.mark.skipif(
        not all(runtime_module.find_spec(p) for p in RUNTIMES[name].packages), reason=f"{name} is not installed"
    )


GRAPHS = [pytest.param(name, marks=needs(name)) for name in ("onnxruntime", "openvino")]


class Net(nn.Module):
    """A block whose sum joins two convs, a depthwise conv, a classifier."""

    pretrained_cfg = {"input_size": (3, 8, 8)}  # noqa: RUF012

    def __init__(self, width=16):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = nn.Conv2d(8, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.down, self.bn3 = nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.wide = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        x = self.bn0(self.stem(x)).relu()
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        x = (y + self.bn3(self.down(x))).relu()
        return self.fc(self.wide(x).mean((2, 3)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, 3, 8, 8))  # norms that do something
    return net.eval()


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(model, images):
    with torch.no_grad():
        return model(images)


# ---- outputs


@pytest.mark.parametrize("name", ["torch", *GRAPHS])
def test_a_runtime_gives_the_networks_outputs(name, model, images, expected):
    runtime = open_runtime(name, threads=1)
    torch.testing.assert_close(runtime.prepare(model, images)(images), expected, rtol=1e-4, atol=1e-5)
    assert runtime.describe()["runtime"] == name and runtime.describe()["threads"] == 1
    json.dumps(runtime.describe())


def test_compiled_networks_beyond_the_usual_limit_stay_compiled(model, images, expected, monkeypatch):
    """torch.compile gives up on the ninth network of the same code and other widths; a stand-in back end counts."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: whole(module, backend=backend, **options))
    runtime = open_runtime("compile", threads=1)
    runtime.forget()
    runs = [runtime.prepare(Net(width).eval(), images) for width in range(8, 19)]
    assert len(compiled) == 11
    with torch.inference_mode():
        assert all(run(images).shape == expected.shape for run in runs)
    assert len(compiled) == 11  # nothing is compiled a second time
    runtime.forget()


@pytest.mark.parametrize("name", GRAPHS)
def test_int8_is_near_and_not_the_same(name, model, images, expected):
    run = open_runtime(name, threads=1, int8=True).prepare(model, images, calibration=[images])
    error = (run(images) - expected).abs().max() / expected.abs().max()
    assert 1e-4 < error < 0.2


def test_a_run_can_be_evaluated_as_a_module(images, expected, model):
    labels = expected.argmax(1)
    assert tk.evaluate(AsModule(model), [(images, labels)])["top1"] == 100.0


# ---- profiles


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_profile_tells_the_time_of_every_layer(name, int8, model, images):
    runtime = open_runtime(name, threads=1, int8=int8)
    passes = runtime.layer_seconds(runtime.convert(model, images), images, LAYERS, 3)
    assert len(passes) == 3
    for times in passes:
        assert set(times) == {"", *LAYERS}
        assert all(seconds >= 0 for seconds in times.values()) and sum(times.values()) > 0


@needs("onnxruntime")
def test_values_of_a_graph_know_their_layers(model, images):
    graph = mark_layers(to_onnx(model, images), model).graph
    found = {node.op_type: marks(node.output[0]) for node in graph.node}
    assert found["Add"] == ["conv2", "down"]  # a sum has swallowed one of the two: whichever runs last
    assert found["Gemm"] == ["fc"]
    assert [marks(node.name) for node in graph.node if node.op_type == "Conv"] == [[n] for n in LAYERS[:-1]]


def test_a_fused_sum_belongs_to_the_conv_that_runs_last():
    down_last = [(["⟨conv2⟩2"], 1.0), (["⟨conv2⟩⟨down⟩5_nchwc"], 2.0)]
    conv_last = [(["⟨down⟩2"], 2.0), (["⟨conv2⟩⟨down⟩5_nchwc"], 1.0)]
    expected = {"": 0.0, "conv2": 1.0, "down": 2.0}
    assert by_layer(down_last, LAYERS) == by_layer(conv_last, LAYERS) == expected
    assert by_layer([*down_last, (["⟨conv2⟩⟨down⟩6"], 4.0)], LAYERS) == {**expected, "down": 6.0}  # follows the last
    assert by_layer([(["⟨fc⟩1"], 1.0), (["⟨fc⟩1"], 1.0)], LAYERS) == {"": 0.0, "fc": 2.0}  # a layer that runs twice


# ---- ONNX graphs


@needs("onnxruntime")
def test_the_graph_counts_what_the_network_counts(model, images):
    import onnx

    proto = to_onnx(model, images, dynamic_batch=True)
    onnx.checker.check_model(proto, full_check=True)
    assert proto.opset_import[0].version == OPSET
    assert input_shape(proto) == ("images", (None, 3, 8, 8))
    assert count_onnx(proto)["macs"] == count_onnx(proto, batch_size=3)["macs"] == tk.count_macs(model)
    folded = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.BatchNorm2d))  # of two, one is left
    assert count_onnx(proto)["params"] == tk.count_params(model) - folded


@needs("onnxruntime")
def test_what_has_no_graph_is_an_error_in_one_line(images):
    class Odd(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(RuntimeChoiceError, match=r"Odd can't be made an ONNX graph: .*\w") as error:
        to_onnx(Odd(), images)
    assert "\n" not in str(error.value)


# ---- refusals


def test_unknown_missing_and_impossible_runtimes_are_refused(monkeypatch):
    with pytest.raises(RuntimeChoiceError, match="runtime 'onnx' is not known; did you mean 'onnxruntime'"):
        open_runtime("onnx")
    with pytest.raises(RuntimeChoiceError, match="'torch' can't quantise to int8; choose one of onnxruntime, openvino"):
        open_runtime("torch", int8=True)
    monkeypatch.setattr(runtime_module, "find_spec", lambda name: None)
    advice = re.escape("needs onnx and onnxscript and onnxruntime: pip install 'timm-knapsack[onnxruntime]'")
    with pytest.raises(RuntimeChoiceError, match=f"^runtime 'onnxruntime' {advice}$"):
        open_runtime("onnxruntime")
    with pytest.raises(RuntimeChoiceError, match=r"needs .*: pip install 'timm-knapsack\[onnx\]' 'tensorrt>=10'"):
        open_runtime("tensorrt", device="cuda")


@needs("onnxruntime")
def test_a_runtime_with_a_layout_of_its_own_is_told_none(model):
    with pytest.raises(LatencyError, match="takes float32 and lays memory out by itself"):
        Conditions.of(model, runtime="onnxruntime", channels_last=True)
    with pytest.raises(RuntimeChoiceError, match="runs on cpu, not on cuda"):
        open_runtime("onnxruntime", device="cuda")


@pytest.mark.parametrize(
    ("name", "clock"), [("torch", ThreadClock), pytest.param("openvino", ProcessClock, marks=needs("openvino"))]
)
def test_cpu_time_is_read_where_the_runtime_computes(name, clock, model):
    assert type(Conditions.of(model, runtime=name, timer="thread", threads=1).clock()) is clock


# ---- tables and comparisons


@pytest.fixture(scope="module")
def groups(model):
    return tk.find_channel_groups(model, verify=False)


@pytest.fixture
def few_copies(monkeypatch):
    """Four copies in place of 34: a conversion takes a second."""
    monkeypatch.setattr(measurement, "stairs_plan", lambda groups: [list(groups.sizes)])
    shares = ((1, 1), (2, 1), (1, 2), (2, 2))
    grid = lambda groups, *_: [[g.size // share[i % 2] for i, g in enumerate(groups)] for share in shares]  # noqa: E731
    monkeypatch.setattr(measurement, "grid_plan", grid)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_table_is_of_its_runtime(name, model, groups, tmp_path, few_copies):
    path = tmp_path / "table.json"
    table = LatencyTable.measure(model, groups, path=path, runtime=name, threads=1, max_seconds=0, rounds=1)
    assert table.conditions.runtime == name and table.versions[RUNTIMES[name].packages[-1]][0].isdigit()
    assert f", in {name};" in str(table)
    again = LatencyTable.load(path)
    assert again == table
    assert again.cost(model, groups).at(groups.sizes) > 0
    with pytest.raises(LatencyError, match=f"in the runtime '{name}', and 'torch' is asked for"):
        again.cost(model, groups, runtime="torch")
    with pytest.raises(LatencyError, match=f"this run has runtime 'torch', not '{name}'"):
        LatencyTable.measure(model, groups, path=path, threads=1)


@needs("onnxruntime")
def test_a_budget_of_time_is_settled_in_the_tables_runtime(model, groups, few_copies, monkeypatch):
    table = LatencyTable.measure(model, groups, runtime="onnxruntime", threads=1, max_seconds=0, rounds=1)
    table.check_seconds = 0
    monkeypatch.setattr(correction, "MAX_CORRECTIONS", 0)
    scores = {group.name: torch.rand(group.size, dtype=torch.float64) for group in groups}
    cost = table.cost(model, groups)
    kept = [group.size // 2 for group in groups]
    slim = tk.slice_model(model, groups, {g.name: torch.arange(k) for g, k in zip(groups, kept, strict=True)})
    lines = cost.layer_costs(model, slim, groups.sizes, kept, passes=1)
    assert [line.name for line in lines] == table.layers
    result = tk.prune(model, scores=scores, budget=tk.Budget(latency=1.0, table=table), groups=groups)
    assert result.report.line("latency").measured > 0
    assert result.report.options["latency conditions"]["runtime"] == "onnxruntime"


def test_an_old_table_of_a_compiled_network_is_one_of_its_runtime(model):
    data = Conditions.of(model).to_dict()
    for compiled, name in ((True, "compile"), (False, "torch")):
        old = {key: value for key, value in data.items() if key not in ("runtime", "int8")} | {"compiled": compiled}
        assert Conditions.from_dict(old).runtime == name


class Twice(Runtime):
    """Runs a network twice; tells made-up times of its layers."""

    name, summary, profiles = "twice", "for tests", True

    def start(self, converted, inputs):
        return lambda images: (converted(images), converted(images))[1]

    def layer_seconds(self, converted, inputs, layers, passes):
        modules = dict(converted.named_modules())
        return [{"": 1e-6, **{n: 1e-6 * modules[n].weight.numel() for n in layers}} for _ in range(passes)]


def test_a_runtime_from_outside_serves_tables_and_comparisons(model, groups):
    register_runtime(Twice)
    try:
        with pytest.raises(RuntimeChoiceError, match="is there already"):
            register_runtime(Twice)
        table = LatencyTable.measure(model, groups, runtime="twice", threads=1, max_seconds=0, rounds=1)
        cost = table.cost(model, groups)
        assert cost.layers_at(groups.sizes)[LAYERS.index("conv2")] > cost.layers_at(groups.sizes)[LAYERS.index("down")]
        assert compare_latency([model, model], runtime="twice", max_seconds=0).ratios[0] == 1
    finally:
        RUNTIMES.remove("twice")
    with pytest.raises(RuntimeChoiceError, match="takes a subclass of Runtime"):
        register_runtime(Twice(threads=1))
