"""The penalty of the last layer, which makes the class scores: chosen by what they are for.

It sees one position of each image, often fewer than it has inputs. There a fit that halves the squared error of the
scores may well name other classes: in squares the many scores that are far off count as much as the few that matter.
So a fit on one half of the images is judged by the KL divergence of its scores on the other half.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..maps.distance import output_distance
from .ridge import PENALTIES, RidgeSums

CANDIDATES = (*PENALTIES, 10.0, 100.0)


def penalty_of_scores(
    sums: RidgeSums,
    seen: Sequence[tuple[Tensor, Tensor]],
    bias: Tensor | float,
    shifts: bool,
    add_up: Callable[[Tensor], Tensor],
) -> float:
    """The penalty with the least divergence on the other half; infinite where the weights had better stay.

    Args:
        sums: of all images.
        seen: inputs and targets of each batch, [1, images, …], as they were added to the sums.
        bias: the layer's own, which targets lack.
        add_up: sums a tensor over all processes.
    """
    best, least = math.inf, math.inf
    for ridge in (math.inf, *CANDIDATES):
        lost = torch.zeros((), dtype=torch.float64, device=sums.now.device)
        for half in (0, 1):
            flat, shift = (part.float() for part in sums.fit_of_half(half, ridge, shifts))
            for x, target in seen:
                middle = (x.shape[1] + 1) // 2
                other = slice(middle, None) if half == 0 else slice(None, middle)
                made = x[0, other] @ flat[0] + shift + bias
                lost += output_distance(target[0, other] + bias, made, logits=True).double().sum()
        lost = float(add_up(lost))
        if lost < least:
            best, least = ridge, lost
    return best
