"""The built-in kinds of files: ONNX, OpenVINO's, torch.export's, ExecuTorch's."""

import json
from pathlib import Path
from typing import Any

import torch

from ..errors import RuntimeChoiceError, first_line
from ..runtimes import onnx_runtime, open_vino
from ..runtimes.kinds import open_runtime
from ..runtimes.onnx_graph import OPSET, to_onnx
from .exporter import Exporter, Order

PREPROCESSING = "preprocessing"  # prefix or name of what files say about themselves


def _onnx(order: Order) -> Any:
    return to_onnx(order.module, order.inputs, dynamic_batch=order.dynamic_batch)


def write_onnx(order: Order, path: Path) -> dict[str, Any]:
    import onnx

    proto = _onnx(order)
    if order.calibration is not None:
        proto = onnx.load_from_string(onnx_runtime.quantised(proto, order.calibration))
    onnx.helper.set_model_props(proto, dict(order.about))
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString())
    return {"opset": OPSET}


def read_onnx_file(path: Path):
    return open_runtime("onnxruntime").start(path.read_bytes(), torch.empty(0))


def write_openvino(order: Order, path: Path) -> dict[str, Any]:
    import openvino

    network = open_vino.read_network(_onnx(order).SerializeToString())
    if order.calibration is not None:
        network = open_vino.quantised(network, order.calibration)
    for key, value in order.about.items():
        network.set_rt_info(value, [PREPROCESSING, key])
    openvino.serialize(network, str(path), str(path.with_suffix(".bin")))
    return {"opset": OPSET, "files": [path.name, path.with_suffix(".bin").name]}


def read_openvino(path: Path):
    return open_runtime("openvino").start(open_vino.pack_files(path), torch.empty(0))


def _exported_program(order: Order) -> Any:
    shapes = ({0: torch.export.Dim("batch")},) if order.dynamic_batch else None
    try:
        with torch.no_grad():
            return torch.export.export(order.module, (order.inputs,), dynamic_shapes=shapes)
    except Exception as error:  # whatever the tracer stumbles over
        name = type(order.module).__name__
        raise RuntimeChoiceError(f"{name} can't be exported by torch.export: {first_line(error)}") from error


def write_torch_export(order: Order, path: Path) -> dict[str, Any]:
    extra = {f"{PREPROCESSING}.json": json.dumps(dict(order.about))}
    torch.export.save(_exported_program(order), path, extra_files=extra)
    return {}


def read_torch_export(path: Path):
    return torch.export.load(path).module()


def write_executorch(order: Order, path: Path) -> dict[str, Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(_exported_program(order), partitioner=[XnnpackPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    return {"backend": "xnnpack"}


def read_executorch(path: Path):
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path.read_bytes()).load_method("forward")
    return lambda images: method.execute([images])[0]


KINDS = (
    Exporter(
        "onnx", f"an ONNX file of opset {OPSET}", "model.onnx", write_onnx, read_onnx_file,
        packages=("onnx", "onnxscript", "onnxruntime"), pip="timm-knapsack[onnxruntime]", takes_int8=True,
    ),
    Exporter(
        "openvino", "OpenVINO's .xml and .bin", "model.xml", write_openvino, read_openvino,
        packages=("onnx", "onnxscript", "openvino", "nncf"), pip="timm-knapsack[openvino]", takes_int8=True,
    ),
    Exporter("torch_export", "a .pt2 file of torch.export", "model.pt2", write_torch_export, read_torch_export),
    Exporter(
        "executorch", "a .pte file for phones, XNNPACK; one image at a time", "model.pte", write_executorch,
        read_executorch, packages=("executorch",), pip="executorch", dynamic_batch=False,
    ),
)  # fmt: skip
