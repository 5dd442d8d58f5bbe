"""Targets that an activation makes one-sided: where ReLU cuts off both, teacher and student need not agree.

Least squares to the teacher's pre-activation map spends capacity on values that ReLU sets to zero anyway. So the fit is
made again with other targets: where the teacher's value is cut off, whatever the student gives beyond the bound is
right. Each round lowers the squared distance from what is right, which is at least the squared error behind the
activation; still in closed form.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BOUNDS = (0.0, 6.0)  # of ReLU and ReLU6: the values that an activation may cut off


@dataclass(frozen=True)
class Rectifier:
    """How a layer's output y (without its bias) becomes the activation's input z = slope · y + offset, and its bounds.

    Attributes:
        slope: [outputs], of the norm behind the layer, or of the block's sum.
        offset: [outputs].
        low, high: values of z below and above which nothing matters; infinite where there is no such bound.
    """

    slope: Tensor
    offset: Tensor
    low: float
    high: float

    def target(self, wanted: Tensor, made: Tensor, extra: Tensor | float = 0.0) -> Tensor:
        """What the layer should give, where ``wanted`` is the teacher's value and ``made`` what the last fit gives.

        Args:
            extra: added to z as well: a block's shortcut.

        Example:
            >>> relu = Rectifier(torch.ones(1), torch.zeros(1), 0.0, float("inf"))
            >>> relu.target(torch.tensor([-1.0, -1.0, 2.0]), torch.tensor([-3.0, 1.0, 1.0]))
            tensor([-3.,  0.,  2.])
        """
        usable = self.slope.abs() > 1e-6 * self.slope.abs().max().clamp_min(1e-30)
        slope = torch.where(usable, self.slope, torch.ones_like(self.slope))
        offset = self.offset + extra
        goal, now = slope * wanted + offset, (slope * made).add_(offset)  # large: few new tensors, much in place
        if not math.isinf(self.low):
            goal = torch.where(goal <= self.low, now.clamp_max(self.low), goal)
        if not math.isinf(self.high):
            goal = torch.where(goal >= self.high, now.clamp_min(self.high), goal)
        goal = goal.sub_(offset).div_(slope)
        return goal if usable.all() else torch.where(usable, goal, wanted)
