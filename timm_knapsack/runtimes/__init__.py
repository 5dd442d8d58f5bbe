"""Room runtimes: what runs a network where it is deployed.

In: a network and an example of its input.
Out: a callable that runs it in PyTorch, ONNX Runtime, OpenVINO …, and where the runtime tells, the time of each layer.
"""
