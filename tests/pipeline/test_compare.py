"""Networks side by side: each by its own preprocessing, times in turns, what a runtime can't run is left out."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import timm_knapsack as tk
from timm_knapsack.cli.app import main
from timm_knapsack.costs.latency.conditions import MeasuringConditions
from timm_knapsack.errors import KnapsackError, RuntimeChoiceError
from timm_knapsack.pipeline import compare
from timm_knapsack.pipeline.compare import compare_networks, comparison_tables, draw_comparison, open_contender

ONNX = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
QUICK = MeasuringConditions(max_seconds=0, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``net``: a pruned network, saved; ``net-onnx``: the same exported; ``base.safetensors``: what it was."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("compare")
    model = timm.create_model("cifar_resnet20").eval()
    save_file(model.state_dict(), folder / "base.safetensors")
    result = tk.prune(model, budget=tk.Budget(macs=0.3), criterion="magnitude")
    tk.save_pretrained(result, folder / "net", verify=False)
    if find_spec("onnxruntime") is not None:
        tk.export_model(folder / "net", "onnx", folder / "net-onnx")
    return folder


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    return random.integers(0, 255, (24, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, 24).tolist()


@ONNX
def test_the_same_network_in_two_forms_has_the_same_facts(folder, data):
    names = [str(folder / "net"), str(folder / "net-onnx" / "model.onnx")]
    saved, exported = compare_networks(names, data, runtimes=["torch", "onnxruntime"], conditions=QUICK, memory=False)
    assert saved.top1 == exported.top1 and saved.samples == exported.samples == 24
    assert saved.macs == exported.macs and abs(saved.params - exported.params) < 0.02 * saved.params
    assert exported.bytes == (folder / "net-onnx" / "model.onnx").stat().st_size
    assert saved.seconds["onnxruntime"]["ratio"] == 1.0
    assert exported.seconds["torch"] is None and exported.seconds["onnxruntime"]["ratio"] > 0
    json.dumps([saved.facts(), exported.facts()])
    counted, measured = comparison_tables([saved, exported])
    assert counted[1][1][0] == "net-onnx/model.onnx"
    assert measured[1][1][:4] == ["torch", "net-onnx/model.onnx", "–", "–"]


def test_names_with_weights_and_without(folder):
    with_weights = open_contender(f"cifar_resnet20={folder / 'base.safetensors'}")
    random = open_contender("cifar_resnet20", pretrained=False)
    assert with_weights.macs == random.macs == tk.count_macs(random.module)
    assert with_weights.bytes == (folder / "base.safetensors").stat().st_size
    expected = timm.create_model("cifar_resnet20").state_dict()
    assert random.bytes == sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    found = compare_networks([str(folder / "net")] * 2, runtimes=[], memory=False)
    assert [one.name for one in found] == ["net (1)", "net (2)"]


def test_each_network_is_timed_on_images_of_its_own_size(folder, monkeypatch):
    seen = []

    def turns(conditions, runs, **limits):
        for run in runs:
            seen.append(run(None).shape)
        return original(conditions, runs, **limits)

    original = compare.time_in_turns
    monkeypatch.setattr(compare, "time_in_turns", turns)
    options = {"conditions": QUICK, "pretrained": False, "memory": False}
    compare_networks([str(folder / "net"), "test_vit"], runtimes=["torch"], **options)
    assert seen == [(1, 10), (1, 1000)]


def test_peak_memory_is_that_of_a_process_of_its_own(folder):
    (one,) = compare_networks([str(folder / "net")], runtimes=["torch"], conditions=QUICK)
    held = one.memory["torch"]
    assert held is None or held > one.bytes / 2


def test_a_picture_is_drawn(folder, tmp_path):
    found = compare_networks([str(folder / "net")], runtimes=["torch"], conditions=QUICK, memory=False)
    draw_comparison(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(KnapsackError, match="nothing to draw"):
        draw_comparison(compare_networks([str(folder / "net")], runtimes=[], memory=False), tmp_path / "b.png")


def test_what_is_wrong_is_said_first(folder, tmp_path, capsys):
    with pytest.raises(RuntimeChoiceError, match="runtime 'onnxrutime' is not known; did you mean 'onnxruntime'"):
        compare_networks(["nothing"], runtimes=["onnxrutime"])
    with pytest.raises(KnapsackError, match="at least one network"):
        compare_networks([])
    (tmp_path / "a.onnx").write_bytes(b"no")
    for name, reason in (("a.onnx", "can't be read as ONNX"), ("b.onnx", "no ONNX file")):
        with pytest.raises(SystemExit) as end:
            main(["compare", str(tmp_path / name)])
        assert end.value.code == 2 and reason in capsys.readouterr().err
    arguments = ["--runtimes", "torch", "--seconds", "0", "--no-memory", "--json"]
    with pytest.raises(SystemExit):
        main(["compare", str(folder / "net"), *arguments])
    assert json.loads(capsys.readouterr().out)["networks"][0]["name"] == "net"
