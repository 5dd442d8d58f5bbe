"""Loading what `save_pretrained` wrote, also where timm does not know the network.

A folder of a timm network needs no more than ``timm.create_model``. One of another network says which function built
it, and that is imported and called only where the caller names the function again: a folder may come from a stranger.
"""

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models._hub import download_from_hf
from torch import nn

from ..errors import ChannelConfigError, CheckpointError, first_line
from ..files.paths import check_readable
from ..models.builders import Builder, rebuild_with
from ..models.model_source import ModelSource, saved_folder
from ..models.rebuild import check_timm_base, mismatches
from ..slim.channel_config import ChannelConfig


def load_pretrained(source: str | os.PathLike, builder: Builder | None = None, **arguments: Any) -> nn.Module:
    """A network that `save_pretrained` wrote, with its weights, in ``eval()`` mode.

    Args:
        source: a folder, or ``"hf-hub:me/my-net"``.
        builder: of a network that is not timm's: the function that makes the unpruned one, or
            ``"package.module:function"``. It is called with the ``base_args`` that the folder notes. The folder says
            which function it was, too, and that alone is never called.
        arguments: of ``timm.create_model``, for a network of timm's.

    Example:
        >>> import torchvision
        >>> net, image = torchvision.models.resnet18(), torch.zeros(1, 3, 32, 32)
        >>> result = prune(net, budget=Budget(macs=0.5), criterion="magnitude", example_inputs=image)
        >>> folder = save_pretrained(result, "tv-half", builder="torchvision.models:resnet18")
        >>> smaller = load_pretrained("tv-half", builder="torchvision.models:resnet18")
        >>> load_pretrained("tv-half")
        Traceback (most recent call last):
        timm_knapsack.errors.ChannelConfigError: ResNet is not timm's: it was built by torchvision.models:resnet18. ...
    """
    name = str(source)
    on_hub = name.startswith("hf-hub:")
    folder = None if on_hub else saved_folder(name.removeprefix("local-dir:"))
    channels = Path(download_from_hf(name[7:], "channels.json")) if on_hub else folder / "channels.json"
    config = ChannelConfig.load(channels)
    if config.builder is None:
        if builder is not None:
            raise ChannelConfigError(f"{name} holds timm's {config.base}, which needs no builder; leave it out")
        return ModelSource(name if on_hub else f"local-dir:{folder.resolve()}", args=arguments).load()
    if builder is None:
        check_timm_base(config)
    if arguments:
        raise ChannelConfigError(f"{name} is not timm's: {min(arguments)}=… has no meaning here")
    weights = Path(download_from_hf(name[7:], "model.safetensors")) if on_hub else folder / "model.safetensors"
    check_readable(weights, CheckpointError)
    try:
        state = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{weights} can't be read as weights: {first_line(error)}") from error
    model = rebuild_with(builder, config)
    wrong = mismatches(state, model)
    if wrong:
        raise CheckpointError(f"the weights of {name} do not fit what {builder} builds: {'; '.join(wrong[:3])}")
    model.load_state_dict(state)
    return model.eval()
