"""Functions that stand in for modules of a network for a while."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def standing_in(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Modules run these functions instead of their own ``forward``, for a while."""
    earlier = {module: vars(module).get("forward") for module in forwards}
    for module, function in forwards.items():
        module.forward = function
    try:
        yield
    finally:
        for module, own in earlier.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


def sliced_points(model: nn.Module) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Stand-ins for strided 1×1 convs: the same numbers from the pixels that they look at, with stride 1.

    For passes that gradients are wanted of. torch 2.13's gradient of such a conv's weights, in bfloat16 on a CPU, on
    channels-last maps with few channels (FastViT's and MobileOne's stems), writes out of bounds and ends the process.

    Example:
        >>> conv, x = nn.Conv2d(3, 4, 1, stride=2), torch.randn(1, 3, 8, 8)
        >>> with standing_in(sliced_points(conv)):
        ...     y = conv(x)
        >>> torch.allclose(y, conv(x), atol=1e-6)
        True
    """
    return {
        module: partial(_on_its_pixels, module)
        for module in model.modules()
        if type(module) is nn.Conv2d
        and (module.kernel_size, module.padding) == ((1, 1), (0, 0))
        and module.stride != (1, 1)
    }


def _on_its_pixels(conv: nn.Conv2d, x: Tensor) -> Tensor:
    rows, columns = conv.stride
    return F.conv2d(x[..., ::rows, ::columns], conv.weight, conv.bias, groups=conv.groups)


def folded_norms(
    model: nn.Module, norm_after: Mapping[str, str], leave: Collection[str] = ()
) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Stand-ins for convs with the BatchNorm behind each: one conv that does both. In eval mode, with fixed weights.

    Whether nothing else reads the conv's output is for the caller to see: compare what the network returns.

    Args:
        norm_after: ``{conv: the BatchNorm that its output goes to}``, as `watch_execution` finds it.
        leave: convs that stay as they are.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
        >>> x = torch.randn(2, 3, 8, 8)
        >>> with standing_in(folded_norms(net, {"0": "1"})):
        ...     y = net(x)
        >>> torch.allclose(y, net(x), atol=1e-6)
        True
    """
    forwards: dict[nn.Module, Callable] = {}
    norms = list(norm_after.values())
    for name, norm_name in norm_after.items():
        conv, norm = model.get_submodule(name), model.get_submodule(norm_name)
        plain = type(conv) is nn.Conv2d and type(norm) in (nn.BatchNorm2d, BatchNormAct2d)
        if not plain or name in leave or norms.count(norm_name) > 1:
            continue
        with torch.no_grad():
            scale = (norm.running_var.double() + norm.eps).rsqrt()
            scale = scale if norm.weight is None else scale * norm.weight.double()
            shift = (0.0 if conv.bias is None else conv.bias.double()) - norm.running_mean.double()
            bias = shift * scale + (0.0 if norm.bias is None else norm.bias.double())
            weight = (conv.weight.double() * scale.reshape(-1, 1, 1, 1)).to(conv.weight)
        forwards[conv] = partial(conv._conv_forward, weight=weight, bias=bias.to(conv.weight))
        forwards[norm] = partial(_activated, norm) if isinstance(norm, BatchNormAct2d) else _unchanged
    return forwards


def _unchanged(x: Tensor) -> Tensor:
    return x


def _activated(norm: BatchNormAct2d, x: Tensor) -> Tensor:
    return norm.act(norm.drop(x))
