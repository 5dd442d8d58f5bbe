"""Exported files give what the network gives, on any number of images, say how images are prepared, and are checked.

A test is skipped only where the package that a format needs is missing; the dev extra brings ONNX Runtime and OpenVINO.
"""

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest
import timm
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack.cli.app import main
from timm_knapsack.errors import RuntimeChoiceError
from timm_knapsack.export.kinds import EXPORTERS, Exporter, register_exporter
from timm_knapsack.export.preprocessing import data_config
from timm_knapsack.runtimes import runtime as runtime_module
from timm_knapsack.runtimes.onnx_graph import OPSET, metadata_of, read_onnx


def target(name: str):
    missing = [package for package in EXPORTERS[name.replace("-", "_")].packages if find_spec(package) is None]
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"{missing} not installed"))


TARGETS = [target(name) for name in ("onnx", "openvino", "torch-export")]
ONNX = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="onnxruntime is not installed")


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A small pruned network, and the folder where it is saved."""
    torch.manual_seed(0)
    widths = {"channels": (16, 32, 64)}
    model = timm.create_model("cifar_resnet8x2", **widths).eval()
    result = tk.prune(model, budget=tk.Budget(macs=0.3), criterion="magnitude", base_args=widths)
    return result.model.eval(), tk.save_pretrained(result, tmp_path_factory.mktemp("export") / "net", verify=False)


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 10) for n in (5, 3)]


@pytest.mark.parametrize("to", TARGETS)
def test_a_file_gives_what_the_network_gives(to, pruned, images, tmp_path):
    model, folder = pruned
    exported = tk.export_model(folder, to, tmp_path / "out", images=images)
    assert exported.error <= exported.tolerance == 1e-4 and exported.same_top1 == 1
    assert exported.images == 8 and exported.source == "images"
    top1 = 100 * np.mean([float((model(x).argmax(1) == y).float().sum()) for x, y in images]) / 4
    assert exported.top1 == (pytest.approx(top1), pytest.approx(top1))
    exporter = EXPORTERS[to.replace("-", "_")]
    run = exporter.read(tmp_path / "out" / exporter.file)
    for x, _ in [*images, (torch.randn(1, 3, 32, 32), None)]:  # any batch
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-4)
    about = json.loads((tmp_path / "out" / "preprocessing.json").read_text())
    assert about["shape"] == [None, 3, 32, 32] and about["mean"] == list(model.pretrained_cfg["mean"])
    assert exported.bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) - (
        tmp_path / "out" / "preprocessing.json"
    ).stat().st_size


@ONNX
def test_an_onnx_file_says_how_images_are_prepared(pruned, tmp_path):
    model, _ = pruned
    exported = tk.export_model(model, "onnx", tmp_path / "out", batch_size=2)
    assert exported.source == "images of noise" and exported.facts == {"opset": OPSET}
    proto = read_onnx(tmp_path / "out" / "model.onnx")
    assert proto.opset_import[0].version == OPSET
    config = data_config(metadata_of(proto))
    assert config["mean"] == list(model.pretrained_cfg["mean"]) and config["input_size"] == [3, 32, 32]
    assert config["num_classes"] == 10
    assert not any("⟨" in node.name for node in proto.graph.node)


@pytest.mark.parametrize("to", TARGETS[:2])
def test_int8_is_smaller_and_says_what_it_lost(to, pruned, images, tmp_path):
    model, _ = pruned
    whole = tk.export_model(model, to, tmp_path / "fp32", images=images)
    small = tk.export_model(model, to, tmp_path / "int8", images=images, int8=True, calibration=images)
    assert small.bytes < whole.bytes and small.tolerance is None
    assert 1e-4 < small.error < 0.3
    assert small.top1[0] == whole.top1[0]
    assert " → " in str(small)


def constant(name: str, outputs: torch.Tensor) -> Exporter:
    """A file that gives the same outputs whatever it sees."""

    def write(order, path):
        path.write_text("x")
        return {}

    return Exporter(name, "", "a.txt", write, read=lambda path: lambda x: outputs.expand(len(x), -1))


def test_a_file_that_is_not_the_network_is_not_written(pruned, images, tmp_path):
    """The checker can fail: an exporter that writes another network's numbers."""
    register_exporter(constant("wrong", torch.ones(1, 10)))
    try:
        with pytest.raises(RuntimeChoiceError, match="the wrong file is not the network: on 8 images outputs differ"):
            tk.export_model(pruned[0], "wrong", tmp_path / "out", images=images)
    finally:
        EXPORTERS.remove("wrong")
    assert list(tmp_path.iterdir()) == []


def test_a_tie_between_classes_is_no_difference(tmp_path):
    class Tie(nn.Module):
        pretrained_cfg = {"input_size": (3, 4, 4)}  # noqa: RUF012

        def forward(self, x):
            return torch.tensor([[1.0, 1.0]]).expand(len(x), 2)

    register_exporter(constant("other", torch.tensor([[1.0, 1.000001]])))
    try:
        assert tk.export_model(Tie(), "other", tmp_path / "out").same_top1 == 1
    finally:
        EXPORTERS.remove("other")


def test_what_is_missing_is_one_line_with_the_command(pruned, monkeypatch, capsys):
    monkeypatch.setattr(runtime_module, "find_spec", lambda name: None)
    needed = {"onnx": "timm-knapsack[onnxruntime]", "openvino": "timm-knapsack[openvino]", "executorch": "executorch"}
    for to, pip in needed.items():
        with pytest.raises(SystemExit) as end:
            main(["export", str(pruned[1]), "--to", to])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert re.fullmatch(rf"error: export to {to} needs .*: pip install '{re.escape(pip)}'\n", said)


def test_wrong_wishes_are_refused(pruned, tmp_path):
    with pytest.raises(RuntimeChoiceError, match="export target 'onxx' is not known; did you mean 'onnx'"):
        tk.export_model(pruned[0], "onxx", tmp_path / "out")
    with pytest.raises(RuntimeChoiceError, match="torch-export can't be written in int8; choose one of onnx, openvino"):
        tk.export_model(pruned[0], "torch-export", tmp_path / "out", int8=True, calibration=[])
    with pytest.raises(RuntimeChoiceError, match="takes an Exporter"):
        register_exporter("onnx")


@ONNX
def test_the_command_line_exports_a_folder(pruned, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["export", str(pruned[1]), "--to", "torch-export", "--json"])
    assert end.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["same_top1"] == 1 and (tmp_path / "net-torch-export" / "model.pt2").exists()
    with pytest.raises(SystemExit) as end:
        main(["export", str(pruned[1]), "--to", "onnx", "--int8"])
    assert end.value.code == 2 and "--int8 needs images" in capsys.readouterr().err
