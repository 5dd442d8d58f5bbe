"""PyTorch as it is, and as torch.compile makes it."""

import torch

from .runtime import Runtime


class TorchRuntime(Runtime):
    """PyTorch, op by op."""

    name, summary = "torch", "PyTorch as it is"
    devices = ("cpu", "cuda")

    def start(self, converted, inputs):
        return converted


class CompiledRuntime(Runtime):
    """torch.compile with its default back end."""

    name, summary = "compile", "PyTorch as torch.compile makes it"
    devices = ("cpu", "cuda")

    def start(self, converted, inputs):
        # Networks of the same code and other widths count as variants of it: torch.compile would make the widths
        # variable from the second on, and after a few give up and run the rest as they are, without a word. So each
        # is compiled for its own widths, and here, where the limit is ours.
        run = torch.compile(converted, dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000), torch.inference_mode():
            run(inputs)
        return run

    def forget(self):
        torch.compiler.reset()
