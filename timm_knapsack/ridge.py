"""Ridge regression of a conv or linear layer's weights, from Gram matrices that are added up batch by batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What each output position of the layer sees: [groups, positions, inputs]."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    if type(layer).__name__ == "Conv2dSame":  # timm pads these while they run
        from timm.layers import pad_same

        x = pad_same(x, layer.weight.shape[-2:], layer.stride, layer.dilation)
        padding = (0, 0)
    else:
        padding = layer.padding if not isinstance(layer.padding, str) else None
    kernel = tuple(layer.weight.shape[2:])
    if padding is None:
        raise ValueError("padding given in words")
    if layer.padding_mode != "zeros":
        raise ValueError(f"padding mode {layer.padding_mode}")
    if kernel == (1, 1) and padding == (0, 0):
        columns = x[:, :, :: layer.stride[0], :: layer.stride[1]].flatten(2)
    else:
        columns = F.unfold(x, kernel, layer.dilation, padding, layer.stride)
    batch, inputs, positions = columns.shape
    columns = columns.reshape(batch, layer.groups, inputs // layer.groups, positions)
    return columns.permute(1, 0, 3, 2).reshape(layer.groups, batch * positions, inputs // layer.groups)


def outputs(layer: nn.Module, y: Tensor) -> Tensor:
    """The layer's output in the order of `patches`: [groups, positions, outputs]."""
    if isinstance(layer, nn.Linear):
        return y.reshape(1, -1, y.shape[-1])
    batch, channels = y.shape[:2]
    y = y.reshape(batch, layer.groups, channels // layer.groups, -1)
    return y.permute(1, 0, 3, 2).reshape(layer.groups, -1, channels // layer.groups)


def flat_weight(layer: nn.Module) -> Tensor:
    """The layer's weight as [groups, inputs, outputs]."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    weight = layer.weight.detach()
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2)


@dataclass(frozen=True)
class Fit:
    weight: Tensor  # in the layer's own shape
    intercept: Tensor  # one number for each output channel
    error_before: float  # share of the target's variance that is missed
    error_after: float


class RidgeSums:
    """Sums over positions of inputs × inputs and inputs × residuals, centred at the end; float64.

    The regression is of the residual (target − what the layer gives now) on the inputs, and the penalty is on the
    change of the weights: with little data the layer stays as it is.
    """

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.now = flat_weight(layer).double()
        groups, inputs, outs = self.now.shape
        self.count = 0
        self.gram = torch.zeros(groups, inputs, inputs, dtype=torch.float64)
        self.cross = torch.zeros(groups, inputs, outs, dtype=torch.float64)
        self.input_sum = torch.zeros(groups, inputs, dtype=torch.float64)
        self.residual_sum = torch.zeros(groups, outs, dtype=torch.float64)
        self.residual_square = 0.0
        self.target_sum = torch.zeros(groups, outs, dtype=torch.float64)
        self.target_square = 0.0

    def add(self, x: Tensor, residual: Tensor, target: Tensor) -> None:
        """All [groups, positions, …]; products in float32, sums in float64."""
        self.count += x.shape[1]
        self.gram += (x.transpose(1, 2) @ x).double()
        self.cross += (x.transpose(1, 2) @ residual).double()
        self.input_sum += x.sum(1).double()
        self.residual_sum += residual.sum(1).double()
        self.residual_square += residual.double().square().sum().item()
        self.target_sum += target.sum(1).double()
        self.target_square += target.double().square().sum().item()

    def fit(self, ridge: float, intercept: bool) -> Fit:
        n = max(self.count, 1)
        gram, cross = self.gram, self.cross
        mean_x, mean_r = self.input_sum / n, self.residual_sum / n
        if intercept:
            gram = gram - n * mean_x.unsqueeze(2) * mean_x.unsqueeze(1)
            cross = cross - n * mean_x.unsqueeze(2) * mean_r.unsqueeze(1)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        penalty = ridge * diagonal.mean(1, keepdim=True).clamp_min(1e-12)
        system = gram + torch.diag_embed(penalty.expand_as(diagonal))
        change = torch.linalg.solve(system, cross)
        shift = mean_r - (mean_x.unsqueeze(1) @ change).squeeze(1) if intercept else torch.zeros_like(mean_r)
        left = self.residual_square - 2 * (change * self.cross).sum().item()
        left += (change * (self.gram @ change)).sum().item()
        if intercept:
            left += (n * shift.square()).sum().item() - 2 * (shift * self.residual_sum).sum().item()
            left += 2 * (shift.unsqueeze(1) * (self.input_sum.unsqueeze(1) @ change)).sum().item()
        total = max(self.target_square - (self.target_sum.square() / n).sum().item(), 1e-30)
        weight = (self.now + change).transpose(1, 2).reshape(self.layer.weight.shape)
        return Fit(
            weight.to(self.layer.weight.dtype), shift.reshape(-1), self.residual_square / total, max(left, 0.0) / total
        )
