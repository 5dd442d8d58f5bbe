"""What an untrusted config.json or channels.json may say: checks that come before anything is built."""

import dataclasses
import inspect
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from timm import list_models
from timm.models import PretrainedCfg, build_model_with_cfg, is_model

from ..errors import ChannelConfigError
from ..files.plain_json import parse_json, read_limited, shortened
from ..slim.channel_config import MAX_BASE_ARG, MAX_BYTES, MAX_CLASSES
from .effort import build_within_limits

_BUILDER_ARGS = {*inspect.signature(build_model_with_cfg).parameters, "pruned"} - {"kwargs"}
# What timm.create_model takes for itself: weights, files and switches, none of them for a file to choose.
_CREATION_ARGS = {"model_name", "pretrained", "checkpoint_path", "cache_dir", "scriptable", "exportable", "no_jit"}
_CREATION_ARGS |= {"pretrained_cfg", "pretrained_cfg_overlay", "device", "dtype"}
_CREATION_ARGS |= {"features_only", "feature_cls", "out_indices"}  # another kind of network than was asked for
_SIZES = ("input_size", "test_input_size", "min_input_size")
_NUMBERS = ("crop_pct", "test_crop_pct")


def check_base(base: str) -> None:
    """An error with near names if timm has no such model."""
    if is_model(base):
        return
    near = get_close_matches(base, list_models(), n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else "; a newer timm, or the package that registers it, may"
    raise ChannelConfigError(f"timm has no model {base[:80]!r}{hint}")


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """``model_args`` of a config.json reach us as arguments: they must not choose files, weights or timm's builder."""
    for key, value in kwargs.items():
        if key in _BUILDER_ARGS or key.startswith(("checkpoint", "pretrained")):
            raise ChannelConfigError(f"the argument {key!r} does not belong to a pruned model")
        if key == "dtype" and not isinstance(value, torch.dtype | None):
            raise ChannelConfigError(f"the argument dtype={str(value)[:80]} is no torch.dtype")
        if key == "device" and not isinstance(value, torch.device | int | None) and not _is_device(value):
            raise ChannelConfigError(f"the argument device={str(value)[:80]} is no device of torch")
        limit = MAX_CLASSES if key == "num_classes" else MAX_BASE_ARG
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, (int, float)) and not abs(item) <= limit:
                raise ChannelConfigError(f"the argument {key}={str(value)[:80]} is larger than any model uses")
            if isinstance(item, (dict, list)) and len(str(item)) > 10_000:
                raise ChannelConfigError(f"the argument {key!r} is larger than any model uses")


def read_saved_config(path: str | os.PathLike) -> dict[str, Any]:
    """A config.json, checked before timm reads it: plausible, and of a model that is not several times its own size.

    Example:
        >>> from timm_knapsack.files.atomic import write_text
        >>> path = write_text("config.json", '{"architecture": "resnet18", "num_classes": 10}')
        >>> read_saved_config(path)["num_classes"]
        10
    """
    config = parse_json(read_limited(path, MAX_BYTES, ChannelConfigError), str(path), ChannelConfigError)
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise ChannelConfigError(f"{path} names no architecture, so it is not the config.json of a timm model")
    cfg, args = config.get("pretrained_cfg", {}), config.get("model_args") or {}
    for key, part in (("pretrained_cfg", cfg), ("model_args", args)):
        if not isinstance(part, dict):
            raise ChannelConfigError(f"{path}: {key} is {shortened(part)}, expected an object")
    for key in args:
        if key in _CREATION_ARGS:
            raise ChannelConfigError(f"{path}: model_args can't set {key!r}: that is the caller's to say")
    check_base(config["architecture"])
    if "channels" in args:
        return config  # a pruned network: its entrypoint checks what the rest would make of its base
    classes = config.get("num_classes", cfg.get("num_classes"))
    args = args if classes is None else {"num_classes": classes, **args}
    check_arguments(args)
    build_within_limits(config["architecture"], args)
    return config


def check_pretrained_cfg(cfg: Mapping[str, Any]) -> None:
    """The ``pretrained_cfg`` of a config.json: known keys and plausible values only, and no pickle."""
    known = {f.name for f in dataclasses.fields(PretrainedCfg)} - {"state_dict"}
    for key, value in cfg.items():
        place = f"config.json: pretrained_cfg[{str(key)[:40]!r}]"
        if key not in known:
            raise ChannelConfigError(f"{place}: timm knows no such key")
        if value is None:
            continue
        wrong = ChannelConfigError(f"{place} is {str(value)[:80]}, which is not possible")
        if key in _SIZES and not (_is_list(value, int, 1, MAX_BASE_ARG) and len(value) == 3):
            raise wrong
        if key in ("mean", "std") and not _is_list(value, (int, float), -1e6, 1e6):
            raise wrong
        if key in _NUMBERS and not _is_list([value], (int, float), 0, 100):
            raise wrong
        if key == "num_classes" and not _is_list([value], int, 0, MAX_CLASSES):
            raise wrong
        if key in ("first_conv", "classifier") and not all(isinstance(name, str) for name in as_tuple(value)):
            raise wrong
        if key == "custom_load" and value:
            raise ChannelConfigError(f"{place}: a pruned model's weights are plain safetensors")
        if key == "hf_hub_filename" and not str(value).endswith(".safetensors"):
            raise ChannelConfigError(f"{place} is {str(value)[:80]!r}, expected a .safetensors file")


def _is_device(name: Any) -> bool:
    try:
        return isinstance(name, str) and bool(torch.device(name))
    except RuntimeError:
        return False


def _is_list(values: Any, kind: Any, low: float, high: float) -> bool:
    return isinstance(values, (list, tuple)) and all(
        isinstance(v, kind) and not isinstance(v, bool) and low <= v <= high for v in values
    )


def as_tuple(names: Any) -> tuple[str, ...]:
    """timm's ``first_conv`` and ``classifier``: a name, several, or None."""
    return (names,) if isinstance(names, str) else tuple(names or ())
