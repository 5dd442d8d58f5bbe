"""A network as an ONNX graph: the way into ONNX Runtime, OpenVINO and TensorRT, and a file by itself."""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RuntimeChoiceError, first_line
from .runtime import require

OPSET = 20
INPUT, OUTPUT = "images", "logits"
PACKAGES = ("onnx", "onnxscript")
PIP = "timm-knapsack[onnx]"


def to_onnx(module: nn.Module, inputs: Tensor, *, dynamic_batch: bool = False) -> Any:
    """The network as an ``onnx.ModelProto`` of opset 20, input ``images``, output ``logits``; norms are in the convs.

    Args:
        inputs: an example; two images at least for a dynamic batch.
        dynamic_batch: any number of images; otherwise as many as ``inputs``.

    Example:
        >>> graph = to_onnx(model, torch.zeros(2, 3, 32, 32)).graph
        >>> graph.input[0].name, graph.node[0].op_type, graph.output[0].name
        ('images', 'Conv', 'logits')
    """
    require(PACKAGES, PIP, "ONNX")
    shapes = ({0: torch.export.Dim("batch")},) if dynamic_batch else None
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module, (inputs,), dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, optimize=True,
                input_names=[INPUT], output_names=[OUTPUT], verbose=False,
            )  # fmt: skip
    except Exception as error:  # whatever the exporter stumbles over
        cause = error.__cause__ or error
        batch = " with a dynamic batch" if dynamic_batch else ""
        reason = f"{type(module).__name__} can't be made an ONNX graph{batch}: {first_line(cause)}"
        raise RuntimeChoiceError(reason) from error
    return program.model_proto


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks about its progress and about torch's own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# ---- files --------------------------------------------------------------------------------------------------------


def read_onnx(path: str | Path) -> Any:
    """An ONNX file as an ``onnx.ModelProto``; one that can't be read is an error in one line."""
    require(PACKAGES[:1], PIP, f"{path}")
    import onnx

    try:
        return onnx.load(str(path))
    except FileNotFoundError:
        raise RuntimeChoiceError(f"there is no ONNX file {path}") from None
    except Exception as error:  # protobuf's own kinds
        raise RuntimeChoiceError(f"{path} can't be read as ONNX: {first_line(error)}") from error


def metadata_of(proto: Any) -> dict[str, str]:
    """What the file says about itself, as texts."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def input_shape(proto: Any) -> tuple[str, tuple[int | None, ...]]:
    """Name and shape of the first input; None for a dimension that is open."""
    own = {tensor.name for tensor in proto.graph.initializer}
    first = next(value for value in proto.graph.input if value.name not in own)
    dims = first.type.tensor_type.shape.dim
    return first.name, tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)


def count_onnx(proto: Any, batch_size: int = 1) -> dict[str, int]:
    """Multiply-accumulates of one image and parameters, by the shapes in the graph.

    MACs are of convs, matrix products and attention, whatever the numbers' type; parameters are the elements of
    constants that convs, products, norms and sums take, and a norm that was folded into a conv is not there any more.

    Example:
        >>> count_onnx(to_onnx(model, torch.zeros(1, 3, 32, 32)))["macs"] == count_macs(model)
        True
    """
    import onnx

    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    own = {tensor.name: tuple(tensor.dims) for tensor in fixed.graph.initializer}
    for value in fixed.graph.input:
        if value.name not in own and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = batch_size
    del fixed.graph.value_info[:]  # may speak of another batch
    inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    shapes = {v.name: _dims(v) for v in (*inferred.value_info, *inferred.input, *inferred.output)} | own
    macs = sum(_macs(node, shapes) for node in fixed.graph.node)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    weights = [tensor for tensor in fixed.graph.initializer if tensor.data_type in floats and tensor.dims]
    params = sum(math.prod(tensor.dims) for tensor in weights)
    return {"macs": macs // batch_size, "params": params}


def _dims(value: Any) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _macs(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of one node: elements of its output × what is summed for each."""
    if node.op_type not in ("Conv", "ConvInteger", "QLinearConv", "MatMul", "Gemm", "QLinearMatMul", "MatMulInteger"):
        return 0
    quantised = node.op_type.startswith("QLinear")
    weight = shapes.get(node.input[3 if quantised else 1], ())
    made = shapes.get(node.output[0], ())
    if not made or not weight or 0 in made:
        raise RuntimeChoiceError(f"the graph does not say the shape of {node.output[0]!r}: its MACs can't be counted")
    total = math.prod(made)
    if "Conv" in node.op_type:
        return total * math.prod(weight[1:])
    transposed = node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
    return total * (weight[-1] if transposed else weight[-2] if len(weight) > 1 else weight[0])
