"""Bases that timm does not know: made by a function of the caller's, which a saved folder names but never calls."""

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ChannelConfigError, first_line
from ..slim.channel_config import ChannelConfig, check_builder_name
from ..slim.copying import named_tensors
from ..slim.cutting import resize_model

Builder = str | Callable[..., nn.Module]


def import_builder(builder: Builder) -> Callable[..., nn.Module]:
    """The function behind ``"package.module:function"``; a function as it is.

    Example:
        >>> import_builder("torchvision.models:resnet18").__name__
        'resnet18'
    """
    if callable(builder):
        return builder
    check_builder_name(builder)
    try:
        found = pkgutil.resolve_name(builder)
    except Exception as error:  # whatever the import of a foreign module raises
        raise ChannelConfigError(
            f"builder {builder!r} can't be had: {first_line(error)}; is its package installed, or its folder on "
            "PYTHONPATH?"
        ) from error
    if not callable(found):
        raise ChannelConfigError(f"builder {builder!r} is a {type(found).__name__}, expected a function")
    return found


def builder_name(builder: Builder) -> str:
    """How a builder is written down, for a config: it must be found again under this name.

    Example:
        >>> import torchvision
        >>> builder_name(torchvision.models.resnet18)
        'torchvision.models.resnet:resnet18'
    """
    if isinstance(builder, str):
        check_builder_name(builder)
        return builder
    module, name = getattr(builder, "__module__", None), getattr(builder, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        raise ChannelConfigError(
            f"builder {name or builder!r} of {module} can't be found again by whoever loads the network; put it at the "
            "top of a module and name it: builder='package.module:function'"
        )
    return f"{module}:{name}"


def build_base(builder: Builder, config: ChannelConfig) -> nn.Module:
    """The base model, whole, with whatever weights its builder gives it.

    Example:
        >>> type(build_base("torchvision.models:resnet18", ChannelConfig("ResNet", {}))).__name__
        'ResNet'
    """
    function = import_builder(builder)
    try:
        base = function(**config.base_args)
    except Exception as error:  # whatever foreign code raises
        called = f"{_shown(function)}({', '.join(f'{k}={v!r}' for k, v in config.base_args.items())})"
        raise ChannelConfigError(
            f"{called} fails: {first_line(error)}. Arguments that it needs belong into prune(…, base_args={{…}})"
        ) from error
    if not isinstance(base, nn.Module):
        raise ChannelConfigError(f"{_shown(function)} returned a {type(base).__name__}, expected an nn.Module")
    return base


def rebuild_with(builder: Builder, config: ChannelConfig) -> nn.Module:
    """The pruned network on its builder's base; its resized weights are the leading parts of the base's."""
    base = build_base(builder, config)
    slim = resize_model(base, config)
    source = dict(named_tensors(base))
    with torch.no_grad():
        for name, tensor in named_tensors(slim):
            if name in config.widths:
                tensor.copy_(source[name][tuple(slice(size) for size in tensor.shape)])
    slim.channel_config = config
    return slim


def _shown(function: Any) -> str:
    module = inspect.getmodule(function)
    return f"{module.__name__ + ':' if module else ''}{getattr(function, '__name__', function)}"
