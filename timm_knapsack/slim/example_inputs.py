"""What a model's input looks like: its size, dtype and channels, as its timm config and its first conv say."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import TraceError
from .copying import named_tensors


def example_input(model: nn.Module, input_size=None, batch_size: int = 1) -> tuple[int, ...]:
    """The shape to run a model with: as asked, or as its timm config says."""
    if input_size is None:
        config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
        input_size = config.get("input_size") if isinstance(config, Mapping) else getattr(config, "input_size", None)
        grid = own_image_size(model)
        if input_size is not None and grid is not None:
            input_size = (input_size[0], *grid)
    if input_size is None:
        raise TraceError(
            f"{type(model).__name__} does not say its input size; pass example_inputs=torch.zeros(1, 3, 224, 224) "
            "(or input_size=(3, 224, 224)) with the size it expects"
        )
    size = tuple(int(n) for n in input_size)
    channels = image_channels(model)
    if channels is not None and size[0] != channels:
        size = (channels, *size[1:])
    return (batch_size, *size)


def own_image_size(model: nn.Module) -> tuple[int, int] | None:
    """``(height, width)`` that a timm model was created for (``img_size=…``) where its config says another.

    Example:
        >>> own_image_size(timm.create_model("test_vit", img_size=96)), own_image_size(timm.create_model("test_vit"))
        ((96, 96), None)
    """
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    usual = config.get("input_size") if isinstance(config, Mapping) else getattr(config, "input_size", None)
    inside = model if hasattr(model, "patch_embed") else getattr(model, "model", None)  # timm's FeatureGetterNet
    grid = getattr(getattr(inside, "patch_embed", None), "img_size", None)
    if usual is None or grid is None or tuple(grid) == tuple(usual[1:]):
        return None
    return tuple(int(n) for n in grid)


def example_dtype(model: nn.Module) -> torch.dtype:
    """Images come in the dtype of the model's first weight."""
    return next((tensor.dtype for _, tensor in named_tensors(model) if tensor.is_floating_point()), torch.float32)


def image_channels(model: nn.Module) -> int | None:
    """Channels of the images that a timm model takes, for models created with another ``in_chans``: by its first conv.

    A stem that folds blocks of pixels into channels (TResNet) has its first conv behind that.
    """
    config = getattr(model, "pretrained_cfg", None)
    name = config.get("first_conv") if isinstance(config, Mapping) else None
    if not name:
        return None
    name = name if isinstance(name, str) else name[0]
    modules = dict(model.named_modules())
    layer = modules.get(name, modules.get(f"model.{name}"))  # inside of timm's FeatureGetterNet
    if not isinstance(layer, nn.Conv2d):
        return None
    folds = [getattr(module, "bs", 1) ** 2 for module in model.modules() if type(module).__name__ == "SpaceToDepth"]
    return layer.in_channels // max(folds, default=1)


def inputs_like(example_inputs, device) -> tuple:
    """Positional inputs on a device; floating tensors only."""
    inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    return tuple(
        torch.empty_like(x, device=device) if isinstance(x, Tensor) and device == "meta" else x for x in inputs
    )
