"""find_channel_groups: one trace → coupled channel groups, verified, and what is frozen, with why."""

import torch
from torch import Tensor, nn

from ..errors import TraceError, first_line
from ..slim.channel_groups import ChannelGroups
from ..slim.copying import copy_with, named_tensors, on_meta
from ..slim.example_inputs import example_dtype, example_input, inputs_like
from ..slim.turned_heads import turned_of
from ..slim.wrappers import bare
from .grouping import groups_of
from .tracing import Assumptions, Trace, run_trace
from .verification import WAYS, verified


def find_channel_groups(model: nn.Module, example_inputs=None, *, verify: str | bool = "auto") -> ChannelGroups:
    """Find which channels of a model must be removed together, and which can't be removed.

    The model itself is not touched and not run: a copy runs on the meta device, and one with random weights on the CPU.
    Forward hooks are copied with it, and called. Wrappers (DataParallel, torch.compile …) are taken off: the groups are
    those of the network inside.

    Args:
        example_inputs: a tensor (or tuple of them) the model can be called with; by default one image of the size in
            the model's timm config. Only shapes matter, and of a batch of images only the first one's.
        verify: how every group is tried; one that fails is frozen, with the reason.
            "shapes" removes units on the meta device: shapes, ties and MACs must fit.
            "values" also runs copies with random weights, with units removed and with zeros in their place: the
            outputs must agree. It takes eight forward passes of one image in float64; valuing channels takes hundreds.
            "auto" (the default, or True) compares values where that takes at most a tenth of scoring 256 images,
            counted in MACs, or seconds, and up to 200 M parameters; shapes alone beyond. ``groups.verified`` says
            which, ``groups.verified_note`` why. "none" (or False) trusts the trace.

    Example:
        >>> import timm
        >>> groups = find_channel_groups(timm.create_model("resnet18"))
        >>> groups["layer1.0.conv1"].size
        64
        >>> groups.frozen["fc"]
        "the model's output"
        >>> groups.verified
        'values'
    """
    model = bare(model)
    way = {True: "auto", False: "none"}.get(verify, verify)
    if way not in WAYS:
        raise TraceError(f"verify must be one of {', '.join(map(repr, WAYS))}, got {verify!r}")
    devices = {str(tensor.device) for _, tensor in named_tensors(model)}
    if len(devices) > 1:
        raise TraceError(
            f"the model is spread over {', '.join(sorted(devices))}; move it to one device first: model.to(…)"
        )
    if example_inputs is None:
        example_inputs = torch.empty(example_input(model), device="meta", dtype=example_dtype(model))
    shadow, inputs, trace = _shadow(model, _one_image(example_inputs))
    try:
        groups = groups_of(model, shadow, trace, inputs)
        return groups if way == "none" else verified(groups, model, shadow, inputs, trace, way)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"the channels of {type(model).__name__} can't be grouped: {first_line(error)}") from error


def _one_image(example_inputs):
    """MACs are those of one image, whatever batch was given."""
    if isinstance(example_inputs, (tuple, list)):
        return tuple(_one_image(x) for x in example_inputs)
    return example_inputs[:1] if isinstance(example_inputs, Tensor) and example_inputs.dim() == 4 else example_inputs


def _shadow(model: nn.Module, example_inputs) -> tuple[nn.Module, tuple, Trace]:
    """A copy to run in the model's place: on the meta device, or with real tensors where the model asks for values."""
    try:
        shadow = on_meta(model)
        inputs = inputs_like(example_inputs, "meta")
        return shadow, inputs, run_trace(shadow, inputs, Assumptions(narrower_heads=turned_of(model)))
    except Exception as error:
        if isinstance(error, TraceError):
            raise
        on_meta_error = error
    try:
        device = next((tensor.device for _, tensor in named_tensors(model)), torch.device("cpu"))
        device = torch.device("cpu") if device.type == "meta" else device
        shadow = copy_with(model, lambda _, t: torch.zeros_like(t, device=device) if t.is_meta else t).eval()
        inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        inputs = tuple(torch.zeros_like(x, device=device) if x.is_meta else x.to(device) for x in inputs)
        return shadow, inputs, run_trace(shadow, inputs, Assumptions(narrower_heads=turned_of(model)))
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} can't be run on {_shapes(inputs_like(example_inputs, 'meta'))}: "
            f"{first_line(error)} (on the meta device: {first_line(on_meta_error)})"
        ) from error


def _shapes(inputs) -> str:
    return ", ".join(str(list(x.shape)) for x in inputs if isinstance(x, Tensor))
