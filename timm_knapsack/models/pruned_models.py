"""Pruned architectures as timm models: one entrypoint for each ChannelConfig, and one that takes any.

Importing this module (``import timm_knapsack`` does) registers

- a name for each file in ``channel_configs/``: the paper's ResNet-50 and the five pruned networks that timm carries;
- a name for each file in the folders that the environment variable ``TIMM_KNAPSACK_CONFIGS`` lists;
- ``knapsack_pruned``, which rebuilds any pruned architecture from its ``channels``: what a config.json refers to. It
  can't be built without them, so ``timm.list_models()`` does not name it.

The networks themselves are built in ``rebuild``, on first use.
"""

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from timm.models import (
    PretrainedCfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    is_model,
    register_model,
    register_model_deprecations,
)
from torch import nn

from ..errors import ChannelConfigError
from ..slim.channel_config import ChannelConfig
from .rebuild import build_pruned, check_timm_base, weightless_cfg

__all__ = ["register_pruned_model"]  # a list: register_model appends every entrypoint

GENERIC = "knapsack_pruned"
CONFIG_FOLDER = Path(__file__).parent / "channel_configs"
CONFIGS_VARIABLE = "TIMM_KNAPSACK_CONFIGS"

# Named model → timm's own weights for exactly this architecture, under the same parameter names.
TIMM_WEIGHTS = {
    "ecaresnet50d_knapsack_pruned": "ecaresnet50d_pruned.miil_in1k",
    "ecaresnet101d_knapsack_pruned": "ecaresnet101d_pruned.miil_in1k",
    "efficientnet_b1_knapsack_pruned": "efficientnet_b1_pruned.in1k",
    "efficientnet_b2_knapsack_pruned": "efficientnet_b2_pruned.in1k",
    "efficientnet_b3_knapsack_pruned": "efficientnet_b3_pruned.in1k",
}

default_cfgs: dict[str, Any] = {}  # timm's register_model looks here

_configs: dict[str, ChannelConfig] = {}


def _register_unlisted(entrypoint: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Register an entrypoint that ``timm.create_model`` builds and ``timm.list_models()`` leaves out.

    timm's only names of that kind are deprecated ones. So the name is entered as deprecated first, and then the real
    entrypoint takes the place of timm's placeholder for it.
    """
    register_model_deprecations(__name__, {entrypoint.__name__: None})
    __all__.remove(entrypoint.__name__)  # register_model adds it again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the name is taken: by the placeholder
        return register_model(entrypoint)


@_register_unlisted
def knapsack_pruned(pretrained: bool = False, channels: Mapping[str, Any] | None = None, **kwargs) -> nn.Module:
    """Any pruned architecture, rebuilt from its channel config.

    Args:
        channels: a `ChannelConfig`, or what its ``to_dict()`` gives: the ``model_args`` of a config.json.

    Example:
        >>> import timm
        >>> config = ChannelConfig("resnet18", {"layer4.1.conv1.weight": {0: 9}, "layer4.1.bn1.weight": {0: 9},
        ...     "layer4.1.bn1.bias": {0: 9}, "layer4.1.bn1.running_mean": {0: 9}, "layer4.1.bn1.running_var": {0: 9},
        ...     "layer4.1.conv2.weight": {1: 9}})
        >>> timm.create_model("knapsack_pruned", channels=config.to_dict()).layer4[1].conv1.out_channels
        9
    """
    if channels is None:
        raise ChannelConfigError(
            f"{GENERIC} needs channels=<ChannelConfig>; the named models are timm.list_models('*_knapsack_*')"
        )
    if not isinstance(channels, ChannelConfig):
        channels = ChannelConfig.from_dict(channels, "channels")
    return build_pruned(GENERIC, channels, pretrained, kwargs)


def register_pruned_model(
    config: ChannelConfig | str | os.PathLike, *, weights: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Make ``timm.create_model`` know a pruned architecture; returns its name.

    The name is the config's own, or ``<base>_knapsack_<digest>``. Registering the same config again changes nothing.

    Args:
        config: a ChannelConfig, or the path of its JSON.
        weights: ``{tag: fields of timm's PretrainedCfg}`` for pretrained weights, such as
            ``{"in1k": {"hf_hub_id": "me/my-pruned-net"}}``; fields that are not given are those of the base model.

    Example:
        >>> import timm
        >>> name = register_pruned_model(ChannelConfig("resnet18", {}, name="resnet18_knapsack_all"))
        >>> timm.is_model(name), timm.create_model(name).num_features
        (True, 512)
    """
    if not isinstance(config, ChannelConfig):
        config = ChannelConfig.load(config)
    return _register(config, weights)


def pruned_model_config(name: str) -> ChannelConfig:
    """The channel config behind a registered name.

    Example:
        >>> pruned_model_config("resnet50_knapsack_2g").base
        'resnet50'
    """
    if name not in _configs:
        raise ChannelConfigError(
            f"{name!r} is no pruned model of timm_knapsack; there are {', '.join(sorted(_configs))}"
        )
    return _configs[name]


def _register(config: ChannelConfig, weights: Mapping[str, Mapping[str, Any]] | None) -> str:
    if config.builder is not None or not is_model(config.base):
        check_timm_base(config)
    config = config.architecture()
    if config.name is None:
        digest = hashlib.sha256(config.to_json().encode()).hexdigest()[:8]
        config = config.renamed(f"{config.base}_knapsack_{digest}")
    name = config.name
    if _configs.get(name) == config and not weights:
        return name
    if is_model(name) and _configs.get(name) != config:
        raise ChannelConfigError(f"timm has a model {name!r} already; take another name: config.renamed('…')")
    cfgs = {f"{name}.{tag}": _pretrained_cfg(config, fields) for tag, fields in (weights or {"untrained": {}}).items()}
    default_cfgs.update(generate_default_cfgs(cfgs))

    def entrypoint(pretrained: bool = False, **kwargs) -> nn.Module:
        return build_pruned(name, config, pretrained, kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f"A pruned {config.base}."
    globals()[name] = entrypoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the name is taken: by this very config, now with weights
        register_model(entrypoint)
    _configs[name] = config
    return name


def _pretrained_cfg(config: ChannelConfig, fields: Mapping[str, Any]) -> PretrainedCfg:
    known = {field.name for field in dataclasses.fields(PretrainedCfg)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ChannelConfigError(f"weights: timm's PretrainedCfg has no field {unknown[0]!r}")
    cfg = weightless_cfg(config.base)
    size = config.base_args.get("img_size")
    if size is not None:
        cfg = dataclasses.replace(
            cfg, input_size=(cfg.input_size[0], *(size if isinstance(size, tuple) else (size, size)))
        )
    if "num_classes" in config.base_args:
        cfg = dataclasses.replace(cfg, num_classes=config.base_args["num_classes"])
    return dataclasses.replace(cfg, **fields)


def _register_all() -> None:
    for path in sorted(CONFIG_FOLDER.glob("*.json")):
        config = ChannelConfig.load(path)
        source = TIMM_WEIGHTS.get(config.name)
        weights = None
        if source and is_model(source):
            weights = {source.partition(".")[2]: vars(get_pretrained_cfg(source))}
        _register(config, weights)
    for folder in filter(None, os.environ.get(CONFIGS_VARIABLE, "").split(os.pathsep)):
        if not Path(folder).is_dir():
            warnings.warn(f"{CONFIGS_VARIABLE} names {folder!r}, which is no folder", stacklevel=2)
        for path in sorted(Path(folder).glob("*.json")):
            try:
                register_pruned_model(path)
            except ChannelConfigError as error:  # one bad file must not make the package unusable
                warnings.warn(f"{CONFIGS_VARIABLE}: {error}", stacklevel=2)


_register_all()
