"""What a network loses without each of its residual branches, measured: that branch alone gone, nothing refitted."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..maps.branches import Branch
from ..maps.distance import gives_logits, output_distance
from ..maps.precision import passes_gain
from ..maps.walk import Walk, find_segments, watch_execution
from ..slim.modes import eval_mode
from ..slim.removed_blocks import without_modules


def branch_losses(model: nn.Module, branches: Sequence[Branch], batches: Sequence[Tensor]) -> dict[str, float]:
    """``{branch: mean distance of the outputs without it from the model's}``; what lies before a block runs once.

    Args:
        batches: images; labels are not needed.

    Example:
        >>> from timm_knapsack.maps.branches import find_branches
        >>> batches = [torch.randn(4, 3, 32, 32)]
        >>> losses = branch_losses(model, find_branches(model, batches[0])[0], batches)
        >>> losses["layer1.1"] > 0
        True
    """
    losses: dict[str, float] = {}
    with eval_mode(model), torch.no_grad():
        probe = batches[0][:2]
        segments = find_segments(model, watch_execution(model, probe).order)
        walk = Walk(model, batches, segments, fast=passes_gain(model, probe))
        references = [walk.rest(number) for number in range(len(batches))]
        logits = gives_logits(model, references[0])
        for number, segment in enumerate(segments):
            for branch in (b for b in branches if b.block == segment.name):
                shorter = without_modules(model, branch.removed).eval()
                distances = [
                    output_distance(reference, walk.rest(batch, shorter), logits)
                    for batch, reference in enumerate(references)
                ]
                losses[branch.name] = float(torch.cat(distances).double().mean())
            if len(losses) == len(branches):
                break
            if number < len(segments) - 1:
                walk.advance()
    return {branch.name: losses[branch.name] for branch in branches}
