"""TensorRT on an NVIDIA GPU, as an adapter of the same interface.

UNTESTED: written after TensorRT 10's documentation, on machines without a GPU; no test runs it. What it does is what an
adapter needs: make an ONNX graph, build an engine from it, run that on torch's own memory and stream.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import RuntimeChoiceError
from .onnx_graph import PACKAGES, to_onnx
from .runtime import Runtime


class TensorRtRuntime(Runtime):
    """TensorRT 10, fp32; converted networks are serialised engines. Untested."""

    name, summary = "tensorrt", "TensorRT on an NVIDIA GPU (written, not tested: no GPU at hand)"
    packages, pip = (*PACKAGES, "tensorrt"), "timm-knapsack[onnx]' 'tensorrt>=10"
    devices = ("cuda",)
    own_layout = True

    def convert(self, module, inputs, calibration=None):
        import tensorrt

        logger = tensorrt.Logger(tensorrt.Logger.ERROR)
        builder = tensorrt.Builder(logger)
        network = builder.create_network(0)
        parser = tensorrt.OnnxParser(network, logger)
        if not parser.parse(to_onnx(module, inputs).SerializeToString()):
            raise RuntimeChoiceError(f"TensorRT can't read the network: {parser.get_error(0)}")
        engine = builder.build_serialized_network(network, builder.create_builder_config())
        if engine is None:
            raise RuntimeChoiceError("TensorRT can't build an engine of this network")
        return bytes(engine)

    def start(self, converted, inputs):
        import tensorrt

        engine = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR)).deserialize_cuda_engine(converted)
        context = engine.create_execution_context()
        taken, made = (engine.get_tensor_name(index) for index in (0, 1))
        outputs = torch.empty(tuple(engine.get_tensor_shape(made)), device=inputs.device)
        context.set_tensor_address(made, outputs.data_ptr())

        def run(images: Tensor) -> Tensor:
            held: Any = images.contiguous()
            context.set_tensor_address(taken, held.data_ptr())
            context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
            return outputs

        return run
