"""Functions that stand in for modules of a network for a while."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

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
