"""How far a network's outputs are from another's, image by image: no labels needed.

Class logits are compared by the Kullback-Leibler divergence of their softmax, in nats, also where they are the only
tensor of a dict (``{"logits": …}``); any other outputs (feature maps, dicts of them, pooled features) by their squared
distance relative to the reference's own mean square.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


def gives_logits(model: nn.Module, output: Any) -> bool:
    """Is this output one score for each of several classes?

    Example:
        >>> gives_logits(nn.Linear(2, 3), torch.zeros(5, 3)), gives_logits(nn.Conv2d(2, 3, 1), torch.zeros(5, 3, 4, 4))
        (True, False)
    """
    maps = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
    output = class_scores(output)
    if not isinstance(output, Tensor) or len(maps) != 1:  # what else a dict holds must count, too
        return False
    return output.dim() == 2 and output.shape[1] > 1 and model_classes(model) != 0


def class_scores(output: Any) -> Any:
    """The logits of an output that is a dict, as transformers' models give it; any other output as it is.

    Example:
        >>> class_scores({"loss": None, "logits": torch.ones(1, 2)})
        tensor([[1., 1.]])
    """
    return output["logits"] if isinstance(output, Mapping) and "logits" in output else output


def model_classes(model: nn.Module) -> int | None:
    return getattr(model, "num_classes", None)


def output_distance(reference: Any, output: Any, logits: bool) -> Tensor:
    """The distance of each image's output from the reference, [images], float32.

    Example:
        >>> uniform, sure = torch.zeros(1, 2), torch.tensor([[0.0, 100.0]])
        >>> output_distance(sure, uniform, logits=True)     # log 2
        tensor([0.6931])
    """
    if logits:
        log_p, log_q = (class_scores(each).float().log_softmax(1) for each in (reference, output))
        return (log_p.exp() * (log_p - log_q)).sum(1).clamp_min(0)
    distance = torch.zeros(())
    pairs = [
        (a.float(), b.float())
        for a, b in zip(tree_flatten(reference)[0], tree_flatten(output)[0], strict=True)
        if isinstance(a, Tensor) and a.is_floating_point()
    ]
    for a, b in pairs:
        scale = a.square().mean().clamp_min(1e-30)
        distance = distance + (a - b).square().flatten(1).mean(1) / (scale * len(pairs))
    return distance
