"""A slim network from its ChannelConfig, in the way timm's own builder makes a model.

timm's ``build_model_with_cfg`` takes a callable that returns the network. Given one that builds the base model and
resizes it, timm does the rest as for its own models: pretrained config, weights, ``num_classes``, ``in_chans``,
``features_only``. No tracing, no data, no solver.

A config may come from a stranger. So the base is always built on the meta device first, where nothing is allocated,
under a limit on what its arguments may make of it (``effort``); only a config that fits gets real memory.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from timm.layers import set_layer_config
from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    get_pretrained_cfg,
    load_pretrained,
    model_entrypoint,
    resolve_pretrained_cfg,
)
from timm.models._builder import pretrained_cfg_for_features
from torch import Tensor, nn

from ..errors import ChannelConfigError, CheckpointError
from ..slim.attributes import get_attribute
from ..slim.channel_config import ChannelConfig
from ..slim.copying import named_tensors
from ..slim.cutting import resize_model
from ..slim.example_inputs import image_channels
from .effort import build_within_limits
from .foreign_config import as_tuple, check_arguments, check_base, check_pretrained_cfg

WRAPPERS = {
    "FeatureListNet": "list",
    "FeatureDictNet": "dict",
    "FeatureHookNet": "hook",
    "FeatureGraphNet": "fx",
    "FeatureGetterNet": "getter",
}


def build_pruned(
    variant: str, config: ChannelConfig, pretrained: bool = False, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """The pruned model, as ``timm.create_model`` would return it for a model of its own.

    Args:
        variant: the name it is created under.
        arguments: those of ``timm.create_model`` and of the base model, which win over the config's ``base_args``. They
            may stand in a config.json, as ``model_args``: so they are one mapping, and can't reach a parameter here.
    """
    check_timm_base(config)
    kwargs = {**config.base_args, **(arguments or {})}
    pretrained_cfg, overlay = kwargs.pop("pretrained_cfg", None), kwargs.pop("pretrained_cfg_overlay", None)
    cache_dir = kwargs.pop("cache_dir", None)
    check_arguments(kwargs)
    if isinstance(pretrained_cfg, Mapping):
        check_pretrained_cfg(pretrained_cfg)
        pretrained_cfg = {k: tuple(v) if isinstance(v, list) else v for k, v in pretrained_cfg.items()}  # from JSON
    elif not pretrained_cfg and get_pretrained_cfg(variant) is None:
        pretrained_cfg = weightless_cfg(config.base)
    cfg = resolve_pretrained_cfg(variant, pretrained_cfg, overlay)

    first_conv = cfg.first_conv
    in_chans = kwargs.get("in_chans", cfg.input_size[0])
    if in_chans != 3 and in_chans == cfg.input_size[0]:
        cfg = dataclasses.replace(cfg, first_conv=None)  # the weights have these channels: timm must not adapt them

    if config.features:
        return _features(config, cfg, pretrained, kwargs, in_chans, cache_dir)
    features_only = kwargs.pop("features_only", False)
    wrapper = _feature_wrapper(config.base, kwargs) if features_only else None
    by_class = features_only and wrapper is None
    if by_class:  # timm has a class of its own for these features; its parameters bear the same names
        kwargs.pop("num_classes", None)
    elif features_only:
        kwargs["features_only"] = True
    model = build_model_with_cfg(
        _network(config, by_class, inferred={"img_size"} - set(kwargs)),
        variant,
        pretrained,
        pretrained_cfg=cfg,
        feature_cfg=wrapper,
        pretrained_strict=not by_class,
        pretrained_filter_fn=_filter(config.base, cfg, adapted=in_chans != 3, partial=by_class),
        cache_dir=cache_dir,
        **kwargs,
    )
    if by_class:
        model.pretrained_cfg = model.default_cfg = pretrained_cfg_for_features(model.pretrained_cfg)
    model.pretrained_cfg["first_conv"] = first_conv
    if not features_only:
        model.channel_config = config
    return model


# ---- the network ------------------------------------------------------------------------------------------------


def _network(config: ChannelConfig, by_class: bool, inferred: set[str]) -> Callable[..., nn.Module]:
    """What timm's builder calls; ``inferred`` are arguments that it made up from the pretrained config.

    The base's own entrypoint sets these in its own form: some want an image size as a number, timm infers a pair.
    """

    def build(**kwargs) -> nn.Module:
        kwargs = _without(kwargs, inferred)
        if by_class:
            kwargs = {**_without(kwargs, {"num_classes"}), "features_only": True}
        slim = resized(base_on_meta(config, kwargs), config, by_class)
        if torch.get_default_device().type == "meta" or str(kwargs.get("device")) == "meta":
            return slim
        base = model_entrypoint(config.base)(pretrained=False, **kwargs)
        return _initialised(resized(base, config, by_class), base, config)

    return build


def resized(base: nn.Module, config: ChannelConfig, features: bool = False) -> nn.Module:
    """``resize_model``, also for a base that was built without its head.

    Example:
        >>> config = ChannelConfig("resnet18", {"fc.weight": {1: 500}}, {"": {"num_features": 500}})
        >>> resized(base_on_meta(config, {"num_classes": 0}), config).num_features
        500
    """
    if features or getattr(base, "num_classes", None) == 0:
        config = _without_head(config, base)
    return resize_model(base, config)


def _without_head(config: ChannelConfig, base: nn.Module) -> ChannelConfig:
    """The part of the config that applies to a base without its head; the rest must belong to the whole base."""
    names, modules = {name for name, _ in named_tensors(base)}, dict(base.named_modules())

    def has(module: str, path: str) -> bool:
        try:
            return type(get_attribute(modules[module], path)) is int
        except (KeyError, TypeError, AttributeError, IndexError):
            return False

    if not set(config.widths) <= names:
        whole = base_on_meta(config, _without(config.base_args, {"num_classes"}))
        unknown = set(config.widths) - names - {name for name, _ in named_tensors(whole)}
        if unknown:
            raise ChannelConfigError(f"widths: the base model {config.base!r} has no parameter {min(unknown)!r}")
    if not set(config.removed) <= set(modules):
        whole = base_on_meta(config, _without(config.base_args, {"num_classes"}))
        unknown = set(config.removed) - {name for name, _ in whole.named_modules()}
        if unknown:
            raise ChannelConfigError(f"removed: the base model {config.base!r} has no module {min(unknown)!r}")
    attributes = {m: {p: v for p, v in paths.items() if has(m, p)} for m, paths in config.attributes.items()}
    return dataclasses.replace(
        config,
        widths={name: dims for name, dims in config.widths.items() if name in names},
        attributes={module: paths for module, paths in attributes.items() if paths},
        kept={name: dims for name, dims in config.kept.items() if name in names},
        removed={name: how for name, how in config.removed.items() if name in modules},
    )


def _initialised(slim: nn.Module, base: nn.Module, config: ChannelConfig) -> nn.Module:
    """Each new tensor starts as the leading part of the base's: initialised as timm initialises that base.

    Norms stay 1 and 0, a zero-initialised residual stays zero, tables that are computed keep their values.
    """
    source, target = dict(named_tensors(base)), dict(named_tensors(slim))
    with torch.no_grad():
        for name in config.widths.keys() & target.keys():
            if not target[name].is_meta:
                target[name].copy_(source[name][tuple(slice(size) for size in target[name].shape)])
    return slim


def base_on_meta(config: ChannelConfig, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """The base model on the meta device; an error if its arguments make it far too large.

    Example:
        >>> base = base_on_meta(ChannelConfig("resnet18", {}))
        >>> next(base.parameters()).is_meta
        True
    """
    check_timm_base(config)
    kwargs = config.base_args if kwargs is None else kwargs
    return build_within_limits(config.base, {**kwargs, **_feature_args(config)})


def check_timm_base(config: ChannelConfig) -> None:
    """An error if the base is not one of timm's: with near names, or with how to load what another function builds."""
    if config.builder is not None:
        raise ChannelConfigError(
            f"{config.base} is not timm's: it was built by {config.builder}. If you trust that code, load it with "
            f"timm_knapsack.load_pretrained(folder, builder={config.builder!r})"
        )
    check_base(config.base)


def model_args_of(model: nn.Module) -> dict[str, int]:
    """``num_classes`` and ``in_chans`` as the model has them now, for ``timm.create_model`` of its base."""
    args = {}
    if isinstance(getattr(model, "num_classes", None), int):
        args["num_classes"] = model.num_classes
    cfg = getattr(model, "pretrained_cfg", None) or {}
    usual, now = (cfg.get("input_size") or (3,))[0], image_channels(model)
    if now is not None and now != usual:
        args["in_chans"] = now
    return args


# ---- features_only ----------------------------------------------------------------------------------------------


def _features(config: ChannelConfig, cfg: PretrainedCfg, pretrained, kwargs, in_chans, cache_dir) -> nn.Module:
    """A network that was pruned as ``features_only``: it has the maps that it was pruned with, and no others."""
    own = config.features["out_indices"]
    wanted = kwargs.pop("out_indices", own)
    if not kwargs.pop("features_only", True) or tuple(wanted) != own:
        raise ChannelConfigError(
            f"this {config.base} was pruned as features_only with out_indices={own}; it has these maps alone"
        )
    kwargs = _without(kwargs, {"num_classes", "feature_cls"})
    slim = resized(base_on_meta(config, kwargs), config)
    if torch.get_default_device().type != "meta" and str(kwargs.get("device")) != "meta":
        base = model_entrypoint(config.base)(pretrained=False, **kwargs, **_feature_args(config))
        slim = _initialised(resized(base, config), base, config)
    slim.pretrained_cfg = slim.default_cfg = pretrained_cfg_for_features(cfg.to_dict())
    slim.channel_config = config
    if pretrained:
        fit = _filter(config.base, cfg, adapted=in_chans != 3, partial=False)
        load_pretrained(slim, slim.pretrained_cfg, 0, in_chans, fit, strict=True, cache_dir=cache_dir)
    return slim


def _feature_args(config: ChannelConfig) -> dict[str, Any]:
    """Arguments of the base's entrypoint that make it the features network which the config speaks of."""
    if not config.features:
        return {}
    kind, args = config.features["class"], {"features_only": True, "out_indices": config.features["out_indices"]}
    if kind == _feature_kind(config.base):
        return args
    if kind not in WRAPPERS:
        raise ChannelConfigError(f"features['class'] is {kind!r}; timm gives {_feature_kind(config.base)} here")
    return {**args, "feature_cls": WRAPPERS[kind]}


def _feature_wrapper(base: str, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``feature_cfg`` that the base's own code uses; None if it has a features class of its own."""
    if kwargs.get("feature_cls") is None:
        kind = _feature_kind(base)
        if kind not in WRAPPERS:
            return None
    else:
        kind = "given by the caller"
    cfg = dict(_feature_cfg(base))
    if kind in WRAPPERS:
        cfg["feature_cls"] = WRAPPERS[kind]
    return cfg


@lru_cache(maxsize=64)
def _feature_kind(base: str) -> str:
    with torch.device("meta"), set_layer_config(no_jit=True):
        return type(model_entrypoint(base)(pretrained=False, features_only=True)).__name__


@lru_cache(maxsize=64)
def _feature_cfg(base: str) -> tuple[tuple[str, Any], ...]:
    """timm hands its feature settings to ``feature_cls``: a function in its place learns them."""
    seen = {}

    def listen(model, **cfg):
        seen.update(cfg)
        return model

    try:
        with torch.device("meta"):
            model_entrypoint(base)(pretrained=False, features_only=True, feature_cls=listen)
    except TypeError:  # a few models of timm don't pass feature_cls on: then they have no settings either
        pass
    seen.pop("output_fmt", None)  # the builder sets it from the model, and only where the wrapper wants it
    return tuple(seen.items())


# ---- weights ----------------------------------------------------------------------------------------------------


def _filter(base: str, cfg: PretrainedCfg, adapted: bool, partial: bool) -> Callable:
    """Weights as they are if they fit; else through the base's own filter (another image size); else a clear error.

    The classifier and the first conv are left to timm where it adapts them to other classes and input channels.
    """

    def fit(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        free = as_tuple(cfg.classifier) if getattr(model, "num_classes", None) != cfg.num_classes else ()
        free += as_tuple(cfg.first_conv) if adapted else ()
        wrong = mismatches(state_dict, model, free, partial)
        if not wrong:
            return state_dict
        own = getattr(sys.modules[model_entrypoint(base).__module__], "checkpoint_filter_fn", None)
        try:
            filtered = own(dict(state_dict), model) if own else state_dict
        except Exception:  # it was written for other weights; the error below is about these
            filtered = state_dict
        if mismatches(filtered, model, free, partial):
            raise CheckpointError(f"the weights do not fit this pruned {base}: {'; '.join(wrong[:3])}{_more(wrong)}")
        return filtered

    return fit


def mismatches(
    state_dict: Mapping[str, Tensor], model: nn.Module, free: tuple = (), partial: bool = False
) -> list[str]:
    """Where weights and model differ, in words, in the model's order; modules in ``free`` may differ in shape.

    Example:
        >>> mismatches({"weight": torch.ones(2, 3)}, nn.Linear(3, 4))
        ['weight is [2, 3], expected [4, 3]', 'bias is missing']
    """
    wrong = []
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name.rpartition(".")[0] in free:
            continue
        if name not in state_dict:
            wrong.append(f"{name} is missing")
        elif tuple(state_dict[name].shape) != tuple(tensor.shape):
            wrong.append(f"{name} is {list(state_dict[name].shape)}, expected {list(tensor.shape)}")
    if not partial:
        wrong += [
            f"{name} is not in the model" for name in state_dict if name not in expected and _owner(name) not in free
        ]
    return wrong


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _more(wrong: list[str]) -> str:
    return f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""


def _without(kwargs: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in names}


def weightless_cfg(base: str) -> PretrainedCfg:
    """The base's pretrained config (input size, mean, std …) without a claim to its weights."""
    cfg = get_pretrained_cfg(base) or PretrainedCfg()
    nothing = dict.fromkeys(
        ("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "label_offset")
    )
    return dataclasses.replace(cfg, **nothing, custom_load=False)
