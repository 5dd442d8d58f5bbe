"""Which channels of the original model a pruned one still has.

A `ChannelConfig` holds them as ``kept``, counted in the base model's channels however often the model was pruned, so
that they are saved with it. Recovery and inner distillation want them counted in the teacher's: `kept_of`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import KeepError
from .channel_config import ChannelConfig


def composed(earlier: ChannelConfig, kept: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[int, tuple[int, ...]]]:
    """What is left after a second cut, counted in the base of the first.

    A dim that the first cut made narrower without a record of what it kept stays unknown, and is left out.

    Args:
        earlier: of the model that was cut a second time.
        kept: what the second cut kept, counted in that model's channels.

    Example:
        >>> weight = "layer1.0.conv1.weight"
        >>> first = ChannelConfig("resnet18", {weight: {0: 3}}, kept={weight: {0: (4, 8, 9)}})
        >>> composed(first, {weight: {0: (0, 2)}, "conv1.weight": {0: (5, 6)}})
        {'layer1.0.conv1.weight': {0: (4, 9)}, 'conv1.weight': {0: (5, 6)}}
    """
    result = {name: dict(dims) for name, dims in earlier.kept.items()}
    for name, dims in kept.items():
        for dim, index in dims.items():
            before = result.get(name, {}).get(dim)
            if before is not None:
                result[name][dim] = tuple(before[i] for i in index)
            elif dim not in earlier.widths.get(name, {}):
                result.setdefault(name, {})[dim] = tuple(index)
    return result


def kept_of(student: nn.Module, teacher: nn.Module | None) -> dict[str, Tensor]:
    """``{layer: which of the teacher's output channels the student still has}``, as far as their configs say.

    The teacher is the base model, or a model that was pruned from it less far.

    Example:
        >>> weight = "layer1.0.conv1.weight"
        >>> student, teacher = nn.Module(), nn.Module()
        >>> student.channel_config = ChannelConfig("resnet18", {weight: {0: 2}}, kept={weight: {0: (4, 9)}})
        >>> kept_of(student, teacher)
        {'layer1.0.conv1': tensor([4, 9])}
        >>> teacher.channel_config = ChannelConfig("resnet18", {weight: {0: 3}}, kept={weight: {0: (4, 8, 9)}})
        >>> kept_of(student, teacher)
        {'layer1.0.conv1': tensor([0, 2])}
    """
    ours, theirs = (getattr(model, "channel_config", None) for model in (student, teacher))
    result: dict[str, dict[int, Tensor]] = {}
    for name, dims in ours.kept.items() if isinstance(ours, ChannelConfig) else ():
        for dim, index in dims.items():
            if isinstance(theirs, ChannelConfig) and dim in theirs.widths.get(name, {}):
                if dim not in theirs.kept.get(name, {}):
                    continue  # the teacher is narrower than the base, too, and nothing says which channels it has
                place = {channel: i for i, channel in enumerate(theirs.kept[name][dim])}
                missing = [channel for channel in index if channel not in place]
                if missing:
                    raise KeepError(
                        f"the student kept channel {missing[0]} of {ours.base}'s {name}, which the teacher has not; "
                        "is it the model that was pruned?"
                    )
                index = [place[channel] for channel in index]
            result.setdefault(name, {})[dim] = torch.tensor(index)
    return shared_too(of_layers(result, student), student)


def of_layers(kept: Mapping[str, Mapping[int, Tensor]], model: nn.Module) -> dict[str, Tensor]:
    """``{layer: its output channels that stay}`` of ``{parameter: {dim: …}}``.

    A weight that is used backwards, too, makes channels along both dims; a layer's own are along one of them.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(4, 4, 1))
        >>> of_layers({"0.weight": {0: torch.tensor([1]), 1: torch.tensor([2, 3])}}, net)
        {'0': tensor([1])}
    """
    modules = dict(model.named_modules())
    result = {}
    for name, dims in kept.items():
        layer = layer_of(name)
        backwards = isinstance(modules.get(layer), nn.modules.conv._ConvTransposeNd)
        if layer not in modules:  # a parameter that is used without a layer
            result[layer] = list(dims.values())[-1]
        elif int(backwards) in dims:
            result[layer] = dims[int(backwards)]
    return result


def shared_too(kept: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """What was kept, also under the names of other layers with the same weights: a config names the first of them.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[1].weight = net[0].weight
        >>> list(shared_too({"0": torch.tensor([1])}, net))
        ['0', '1']
    """
    weights = {name: module._parameters.get("weight") for name, module in model.named_modules()}
    owners = {weights[name]: name for name in kept if weights.get(name) is not None}
    aliases = {name: owners.get(weight) for name, weight in weights.items()}
    return {**kept, **{name: kept[owner] for name, owner in aliases.items() if owner and name not in kept}}


def layer_of(parameter: str) -> str:
    """The module that owns a parameter.

    Example:
        >>> layer_of("layer1.0.conv1.weight")
        'layer1.0.conv1'
        >>> layer_of("conv1.parametrizations.weight.original0")     # torch's weight norm
        'conv1'
    """
    owner, parametrized, _ = parameter.partition(".parametrizations.")
    return owner if parametrized else parameter.rpartition(".")[0] or parameter
