"""OpenVINO on the CPU, fp32 and int8 by NNCF, its own post-training quantisation."""

import contextlib
import io
import logging
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import RuntimeChoiceError, first_line
from .layer_marks import by_layer, mark_layers
from .onnx_graph import PACKAGES, to_onnx
from .runtime import Runtime, require

FILES = ("model.xml", "model.bin")


class OpenVinoRuntime(Runtime):
    """OpenVINO's CPU plugin; converted networks are ONNX files as bytes, or in int8 a zip of OpenVINO's two files."""

    name, summary = "openvino", "OpenVINO on the CPU"
    packages, pip = (*PACKAGES, "openvino"), "timm-knapsack[openvino]"
    takes_int8 = own_layout = own_threads = profiles = reads_onnx = True

    def __init__(self, **options: Any):
        super().__init__(**options)
        if self.int8:
            require(("nncf",), self.pip, "int8 in OpenVINO")

    def convert(self, module, inputs, calibration=None):
        onnx_file = mark_layers(to_onnx(module, inputs), module).SerializeToString()
        return packed(quantised(read_network(onnx_file), calibration or [inputs])) if self.int8 else onnx_file

    def start(self, converted, inputs):
        request = self._compiled(converted).create_infer_request()

        def run(images: Tensor) -> Tensor:
            found = request.infer({0: images.detach().cpu().contiguous().numpy()})
            return torch.from_numpy(found[0].copy())  # the next call writes into the same memory

        return run

    def load_library(self):
        import openvino  # noqa: F401

    def layer_seconds(self, converted, inputs, layers, passes):
        compiled = self._compiled(converted, PERF_COUNT="YES")
        request = compiled.create_infer_request()
        # What was fused into a node of the plan that runs is written beside it.
        fused = {
            node.get_friendly_name(): str(node.get_rt_info()["originalLayersNames"].astype(str)).split(",")
            for node in compiled.get_runtime_model().get_ordered_ops()
        }
        images, times = inputs.detach().cpu().contiguous().numpy(), []
        for _ in range(passes):
            request.infer({0: images})
            nodes = ((n.node_name, n.real_time.total_seconds()) for n in request.profiling_info)
            times.append(by_layer(((fused.get(name, [name]), seconds) for name, seconds in nodes), layers))
        return times

    def _compiled(self, converted: bytes, **options: str) -> Any:
        import openvino

        settings = {"INFERENCE_NUM_THREADS": str(self.threads), "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY"}
        settings["INFERENCE_PRECISION_HINT"] = "f32"  # a CPU with bf16 would else take that
        try:
            return openvino.Core().compile_model(read_network(converted), "CPU", {**settings, **options})
        except RuntimeError as error:
            raise RuntimeChoiceError(f"OpenVINO can't load the network: {first_line(error)}") from error


def read_network(converted: bytes) -> Any:
    """An ``openvino.Model`` of an ONNX file, or of what `packed` gave."""
    import openvino

    if not zipfile.is_zipfile(io.BytesIO(converted)):
        return openvino.Core().read_model(converted)
    with zipfile.ZipFile(io.BytesIO(converted)) as both:
        return openvino.Core().read_model(*(both.read(name) for name in FILES))


def packed(network: Any) -> bytes:
    """An ``openvino.Model`` as bytes: its two files, one after the other."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in FILES]
        openvino.serialize(network, *map(str, files))
        return pack_files(*files)


def pack_files(graph: Path, weights: Path | None = None) -> bytes:
    """OpenVINO's two files as `OpenVinoRuntime.start` takes them; the weights lie beside the graph by default."""
    store = io.BytesIO()
    with zipfile.ZipFile(store, "w") as both:
        both.write(graph, FILES[0])
        both.write(weights or graph.with_suffix(".bin"), FILES[1])
    return store.getvalue()


def quantised(network: Any, calibration: Iterable[Tensor]) -> Any:
    """The network in int8, as NNCF quantises it for OpenVINO.

    Args:
        calibration: batches of images.
    """
    logging.getLogger("nncf").setLevel(logging.ERROR)
    import nncf

    batches = [batch.detach().cpu().contiguous().numpy() for batch in calibration]
    options = {"subset_size": len(batches), "preset": nncf.QuantizationPreset.MIXED}
    with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
        return nncf.quantize(network, nncf.Dataset(batches), **options)
