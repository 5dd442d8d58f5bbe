"""ONNX Runtime on the CPU, fp32 and int8 by its own static quantisation."""

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RuntimeChoiceError, first_line
from .layer_marks import by_layer, mark_layers
from .onnx_graph import INPUT, PACKAGES, to_onnx
from .runtime import Runtime


class OnnxRuntime(Runtime):
    """ONNX Runtime's CPU provider; converted networks are ONNX files as bytes."""

    name, summary = "onnxruntime", "ONNX Runtime on the CPU"
    packages, pip = (*PACKAGES, "onnxruntime"), "timm-knapsack[onnxruntime]"
    takes_int8 = own_layout = profiles = reads_onnx = True

    def convert(self, module, inputs, calibration=None):
        proto = mark_layers(to_onnx(module, inputs), module)
        return quantised(proto, calibration or [inputs]) if self.int8 else proto.SerializeToString()

    def start(self, converted, inputs):
        session = self._session(converted)
        name = session.get_inputs()[0].name

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {name: images.detach().cpu().numpy()})[0])

        return run

    def load_library(self):
        import onnxruntime  # noqa: F401

    def layer_seconds(self, converted, inputs, layers, passes):
        with tempfile.TemporaryDirectory() as folder:
            session = self._session(converted, profile=str(Path(folder) / "profile"))
            feed = {session.get_inputs()[0].name: inputs.detach().cpu().numpy()}
            for _ in range(passes):
                session.run(None, feed)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        return [by_layer(nodes, layers) for nodes in _passes(events)]

    def _session(self, converted: bytes, profile: str | None = None) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.log_severity_level = 3  # errors
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, profile
        try:
            return onnxruntime.InferenceSession(converted, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own kinds, one for each reason
            raise RuntimeChoiceError(f"ONNX Runtime can't load the network: {first_line(error)}") from error


def _passes(events: Sequence[dict[str, Any]]) -> Iterator[list[tuple[list[str], float]]]:
    """The nodes of each pass in the order in which they ran, with their seconds.

    The profile is a list of events with a start and a duration in microseconds; a pass's event ``model_run`` contains
    those of its nodes.
    """
    events = sorted(events, key=lambda event: event["ts"])
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    for run in (event for event in events if event["name"] == "model_run"):
        inside = [node for node in kernels if run["ts"] <= node["ts"] <= run["ts"] + run["dur"]]
        yield [([node["name"]], node["dur"] * 1e-6) for node in inside]


def quantised(proto: Any, calibration: Iterable[Tensor]) -> bytes:
    """The graph in int8, as ONNX Runtime quantises it: weights by channel, maps by the range seen in calibration.

    Args:
        calibration: batches of images.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Batches(CalibrationDataReader):
        def __init__(self):
            self._rest = iter(calibration)

        def get_next(self):
            batch = next(self._rest, None)
            return None if batch is None else {INPUT: np.ascontiguousarray(batch.detach().cpu().numpy())}

    with tempfile.TemporaryDirectory() as folder:
        plain, ready, small = (str(Path(folder) / f"{name}.onnx") for name in ("plain", "ready", "int8"))
        Path(plain).write_bytes(proto.SerializeToString())
        logging.disable(logging.WARNING)  # norms have no channels to quantise by, and each would say so
        try:
            quant_pre_process(plain, ready, skip_symbolic_shape=True)
            quantize_static(
                ready, small, Batches(), quant_format=QuantFormat.QDQ, per_channel=True,
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip
        finally:
            logging.disable(logging.NOTSET)
        return Path(small).read_bytes()
