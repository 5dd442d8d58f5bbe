"""timm's own pruned networks (``timm/models/_pruned/*.txt``) as ChannelConfigs.

Such a file lists the shape of every weight, ``conv1.weight:[32, 3, 3, 3]***bn1.weight:[32]***…``. What else follows
from it (biases, running statistics, ``groups`` of depthwise convs, ``num_features``, ``feature_info``) is derived here.
"""

import re
from collections import defaultdict
from pathlib import Path

import timm.models
import torch
from torch import nn

from ..errors import ChannelConfigError
from ..slim.attributes import feature_entries
from ..slim.channel_config import ChannelConfig
from ..slim.cutting import resize_model
from ..slim.example_inputs import example_input
from .rebuild import base_on_meta

_ENTRY = re.compile(r"([A-Za-z0-9_.]+):\[([0-9, ]*)\]")


def config_from_timm_txt(text: str, base: str, name: str | None = None) -> ChannelConfig:
    """Read the contents of one of timm's ``_pruned/*.txt``.

    Args:
        base: the unpruned timm model that the shapes belong to.

    Example:
        >>> config = config_from_timm_txt("layer1.0.conv1.weight:[9, 64, 3, 3]***layer1.0.bn1.weight:[9]***"
        ...     "layer1.0.conv2.weight:[64, 9, 3, 3]", "resnet18")
        >>> dict(config.widths["layer1.0.bn1.running_mean"])
        {0: 9}
    """
    model = base_on_meta(ChannelConfig(base, {})).eval()
    modules = dict(model.named_modules())
    widths: dict[str, dict[int, int]] = defaultdict(dict)
    attributes: dict[str, dict[str, int]] = defaultdict(dict)
    for entry in text.strip().split("***"):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ChannelConfigError(f"{entry[:80]!r} is not an entry such as 'conv1.weight:[64, 3, 7, 7]'")
        param, shape = match[1], [int(n) for n in match[2].split(",") if n.strip()]
        owner, _, kind = param.rpartition(".")
        if owner.endswith("_M"):  # the matrices M_l of inner distillation, left over from training
            continue
        layer = modules.get(owner)
        if layer is None or not isinstance(getattr(layer, kind, None), torch.Tensor):
            raise ChannelConfigError(f"the base model {base!r} has no parameter {param!r}")
        old = getattr(layer, kind).shape
        if len(old) != len(shape):
            raise ChannelConfigError(f"{param} has {len(shape)} dims, in {base!r} it has {len(old)}")
        for dim, (before, now) in enumerate(zip(old, shape, strict=True)):
            if now != before:
                widths[param][dim] = now
        if shape and shape[0] != old[0]:
            for other in ("bias", "running_mean", "running_var"):
                if isinstance(getattr(layer, other, None), torch.Tensor):
                    widths[f"{owner}.{other}"][0] = shape[0]
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                if layer.groups != layer.out_channels:
                    raise ChannelConfigError(f"{owner} has {layer.groups} groups; timm's format knows depthwise only")
                attributes[owner]["groups"] = shape[0]
    config = ChannelConfig(base, dict(widths), dict(attributes))
    attributes[""] = _model_attributes(resize_model(model, config))
    return ChannelConfig(base, dict(widths), {m: a for m, a in attributes.items() if a}, name=name)


def load_timm_txt(variant: str, base: str, name: str | None = None) -> ChannelConfig:
    """The same for one of the files inside the installed timm, such as ``ecaresnet50d_pruned``."""
    path = Path(timm.models.__file__).parent / "_pruned" / f"{variant}.txt"
    try:
        return config_from_timm_txt(path.read_text(encoding="utf-8"), base, name)
    except OSError as error:
        raise ChannelConfigError(f"{path} can't be read: {error.strerror}") from None


def _model_attributes(slim: nn.Module) -> dict[str, int]:
    """timm's numbers about the whole model, read off a forward pass of the resized network."""
    seen: dict[str, torch.Size] = {}
    entries = list(feature_entries(slim))
    modules = dict(slim.named_modules())
    handles = []
    for _, module, side in entries:
        if side == "in":
            hook = modules[module].register_forward_pre_hook(lambda m, x, n=module: seen.update({n: x[0].shape}))
        else:
            hook = modules[module].register_forward_hook(lambda m, x, y, n=module: seen.update({n: y.shape}))
        handles.append(hook)
    try:
        with torch.no_grad():
            features = slim.forward_features(torch.empty(example_input(slim), device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    info = getattr(slim.feature_info, "info", slim.feature_info)
    numbers = {
        f"feature_info.{i}.num_chs": seen[module][1]
        for i, module, _ in entries
        if seen[module][1] != info[i]["num_chs"]
    }
    if features.shape[1] != slim.num_features:
        numbers["num_features"] = features.shape[1]
    hidden = slim.get_classifier().in_features
    if hidden != slim.head_hidden_size:
        numbers["head_hidden_size"] = hidden
    return numbers
