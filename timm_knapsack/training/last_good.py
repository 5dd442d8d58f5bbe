"""The buffers of a network (BatchNorm's statistics) as they were before an update, for when it goes wrong."""

import torch
from torch import nn


class LastGoodBuffers:
    """Remembers a network's buffers and puts them back: a forward pass changes them before the loss is known.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> buffers = LastGoodBuffers(norm)
        >>> buffers.keep()
        >>> _ = norm(torch.tensor([[float("nan")], [1.0]]))
        >>> buffers.put_back()
        >>> norm.running_mean
        tensor([0.])
    """

    def __init__(self, network: nn.Module):
        self.network = network
        self.kept: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        now = list(self.network.buffers())
        if len(self.kept) != len(now):
            self.kept = [buffer.clone() for buffer in now]
        for kept, buffer in zip(self.kept, now, strict=True):
            kept.copy_(buffer)

    @torch.no_grad()
    def put_back(self) -> None:
        for buffer, kept in zip(self.network.buffers(), self.kept, strict=True):
            buffer.copy_(kept)
