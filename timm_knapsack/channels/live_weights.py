"""Weights for which every channel matters, as after training: a zero or a symmetry would hide a mistake."""

import torch
from torch import Tensor, nn

from ..slim.copying import copy_with, named_tensors


def live_copy(model: nn.Module, per_channel: frozenset[str], dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A copy on the CPU, in eval mode, with random weights and statistics; the model may be on the meta device.

    Args:
        per_channel: names of buffers that hold something for each channel: they are drawn too. Other buffers (tables of
            positions, masks, filters) stay what they are, and are drawn only where they have no values.
    """
    draw = torch.Generator().manual_seed(seed)
    own = {id(tensor): name for name, tensor in named_tensors(model)}

    def live(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu().clone()
        drawn = isinstance(tensor, nn.Parameter) or (id(tensor) in own and name in per_channel) or tensor.is_meta
        return live_values(name, tensor.shape, draw).to(dtype) if drawn else tensor.detach().to("cpu", dtype, copy=True)

    return copy_with(model, live).eval().requires_grad_(False)


def live_values(name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Random numbers for a tensor of this name and shape, of a size that keeps signals alive through many layers."""
    if name.endswith("running_mean"):
        return torch.empty(shape).normal_(0, 0.1, generator=draw)
    if name.endswith("running_var"):
        return torch.empty(shape).uniform_(0.5, 1.5, generator=draw)
    inputs = shape[1:].numel()
    if len(shape) >= 2 and shape[0] > 1 and inputs > 1:
        return torch.empty(shape).normal_(0, inputs**-0.5, generator=draw)
    return torch.empty(shape).uniform_(0.5, 1.0, generator=draw)
