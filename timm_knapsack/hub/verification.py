"""Is what was written what was saved? It is loaded again and compared, weights bit for bit and outputs on one image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import CheckpointError, TraceError
from ..models.builders import Builder
from ..slim.copying import copy_with
from ..slim.example_inputs import example_input
from ..slim.wrappers import inputs_of
from .loading import load_pretrained


def example_for(model: nn.Module, report: Any, example_inputs: Any) -> tuple | None:
    """What to call the network with; None where nothing says it."""
    if example_inputs is not None:
        return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    if len(inputs_of(model)) > 1:
        return None
    try:
        return (torch.zeros(example_input(model)),)
    except TraceError:
        return None if report is None else (torch.zeros(1, *report.input_size),)


def verify_saved(
    model: nn.Module, state: Mapping[str, Tensor], folder: Path, builder: Builder | None, example: tuple | None
) -> None:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # a run in progress must not notice
        if builder is None:
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        else:
            loaded = load_pretrained(folder, builder)
        for name, tensor in loaded.state_dict().items():
            if not torch.equal(tensor, state[name].to(tensor.dtype)):
                raise CheckpointError(f"{name} is not the same after loading; please report this")

        def on_cpu(_, tensor):
            tensor = tensor.detach().to("cpu")
            return tensor.float().contiguous() if tensor.is_floating_point() else tensor

        if example is None:
            return
        try:
            example = [torch.randn_like(x, device="cpu", dtype=torch.float32) for x in example]
            reference = copy_with(model, on_cpu).eval()
            with torch.no_grad():
                expected = reference(*example)
        except (RuntimeError, NotImplementedError, ValueError):  # it does not run on an image of its default size
            return
        with torch.no_grad():
            output = copy_with(loaded, on_cpu).eval()(*example)
    if not _close(output, expected):
        base = f"timm's {model.channel_config.base}" if builder is None else f"what {builder} builds"
        raise CheckpointError(
            f"rebuilt from {base}, this model gives other outputs: "
            f"{_difference(model, loaded)}. Arguments of create_model belong into prune(…, base_args=…); a model that "
            "was changed by hand must be registered in timm under a name of its own before it is pruned"
        )


def _close(a: Any, b: Any) -> bool:
    pairs = [(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=False) if isinstance(x, Tensor)]
    return all(
        x.shape == y.shape
        and torch.allclose(x, y, rtol=1e-3, atol=1e-3 * max(1.0, float(y.abs().max())), equal_nan=True)
        for x, y in pairs
    )


def _difference(model: nn.Module, loaded: nn.Module) -> str:
    """The first layer that describes itself otherwise: ``layer2.0.conv1 is Conv2d(…, stride=(2, 2)) …``."""
    others = dict(loaded.named_modules())
    for name, module in model.named_modules():
        other = others.get(name)
        if other is None:
            return f"there is no {name}"
        here, there = (f"{type(m).__name__}({m.extra_repr()})" for m in (module, other))
        if here != there and "drop" not in type(module).__name__.lower() and "drop" not in type(other).__name__.lower():
            return f"{name} is {here} here and {there} there"
        for key, value in vars(module).items():
            if isinstance(value, (str, int, tuple)) and key != "training" and not key.startswith("_"):
                if vars(other).get(key) != value and "checkpoint" not in key:
                    return f"{name or 'the model'}.{key} is {value!r} here and {vars(other).get(key)!r} there"
    return "its code or its buffers differ"
