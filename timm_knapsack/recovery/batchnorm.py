"""New BatchNorm statistics: the simplest recovery."""

from collections.abc import Iterable

import torch
from torch import nn

from ..maps.batches import image_batches
from ..maps.channels_last import side_by_side
from ..slim.modes import eval_mode


def reestimate_batchnorm(model: nn.Module, loader: Iterable, *, images: int | None = None) -> nn.Module:
    """Set every BatchNorm's running statistics to the mean over these images, in place: the simplest recovery."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    batches = side_by_side(image_batches(loader, images, next(model.parameters()).device), model)
    momenta = [norm.momentum for norm in norms]
    try:
        with eval_mode(model), torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain average over the batches
                norm.train()
            for batch in batches:
                model(batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model
