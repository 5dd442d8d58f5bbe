"""Train and eval mode for a while: the one guard that gives every module its own mode back.

``model.train(was_training)`` would not do: a frozen BatchNorm inside a training model would come back unfrozen.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Whatever the block does to the modes of these models, every submodule gets its own back, after an error too.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
        >>> with modes_kept(net):
        ...     _ = net.train()
        >>> [module.training for module in net.modules()]
        [True, True, False]
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """``model.eval()`` for each of these models, for a while; every submodule gets its own mode back.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> with eval_mode(net):
        ...     net.training
        False
        >>> net.training
        True
    """
    with modes_kept(*models):
        for model in models:
            model.eval()
        yield
