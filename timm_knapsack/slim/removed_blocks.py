"""Modules that are gone: what stands in the place of a residual block, or of one of its branches, that was removed.

A block with one branch becomes an identity: ``block(x) → x``. Where a block has several (a transformer's attention and
its MLP), the modules of one branch become identities, and the last of them returns a zero, which is added to the
stream in the branch's place. Weights, MACs and time of what was there are gone; names of all other modules stay.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ChannelConfigError
from .channel_config import IDENTITY, ZERO
from .copying import copy_with


class Passage(nn.Module):
    """Returns its first input and ignores the others: for modules that take more than one.

    Example:
        >>> import torch
        >>> Passage()(torch.ones(2), attn_mask=None)
        tensor([1., 1.])
    """

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class Zero(nn.Module):
    """Returns a zero in the shape of its input, which takes no memory.

    Example:
        >>> import torch
        >>> torch.ones(2) + Zero()(torch.ones(2))
        tensor([1., 1.])
    """

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x.new_zeros(()).expand_as(x)


def without_modules(model: nn.Module, removed: Mapping[str, str]) -> nn.Module:
    """A copy of a model that shares its tensors and lacks some modules; the model itself is left untouched.

    Args:
        removed: ``{module: "identity" or "zero"}``, as in a `ChannelConfig`.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> without_modules(net, {"1": "identity"})
        Sequential(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): Identity()
        )
    """
    shorter = copy_with(model, lambda _, tensor: tensor)
    for name, how in removed.items():
        parent, _, child = name.rpartition(".")
        try:
            owner, old = shorter.get_submodule(parent), shorter.get_submodule(name)
        except AttributeError:
            raise ChannelConfigError(f"removed: the model has no module {name!r}") from None
        owner._modules[child] = _stand_in(old, how).train(old.training)
    return shorter


def _stand_in(old: nn.Module, how: str) -> nn.Module:
    if how == ZERO:
        return Zero()
    if how != IDENTITY:
        raise ChannelConfigError(f"removed: {how!r} is neither {IDENTITY!r} nor {ZERO!r}")
    inputs = inspect.signature(old.forward).parameters.values()
    plain = len(inputs) == 1 and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in inputs)
    return nn.Identity() if plain else Passage()  # TorchScript reads the first alone
