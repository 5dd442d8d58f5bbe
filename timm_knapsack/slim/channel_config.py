"""ChannelConfig: the JSON that rebuilds a pruned architecture from its base timm model, without data or tracing.

It stores what changed and nothing else: the new size of each parameter dim, each number that a module has baked in
(``num_heads``, ``groups``, ``feature_info`` …), and each module that is gone with its block. A dim that is not named
keeps the base model's size, so ``num_classes`` and ``in_chans`` stay free. This module knows no torch: a config can be
read, checked and written without importing it. Whether a config fits a model is checked where it is applied, in
``slim.resize_model``.
"""

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..errors import ChannelConfigError
from ..files.atomic import write_text
from ..files.plain_json import parse_json, read_limited, shortened, to_json
from .index_ranges import MAX_INDEX, ranges_text, read_ranges

FORMAT = "timm-knapsack/channel-config"
VERSION = 4  # 2 added ``kept``, 3 ``features``, ``builder``, 4 ``removed``, ``turned``; written is the oldest that does
MAX_BYTES = 4 * 2**20  # the largest timm model's config is below 1 MB
MAX_SIZE = 2**24  # no dim of a real model is larger; the base model sets the true limit
MAX_BASE_ARG = 2**16  # image sizes, depths, widths: an untrusted file must not make timm build a huge model
MAX_CLASSES = 2**20
MAX_MODULES = 4096  # that a list of names may hold
MAX_KEPT = 2**22  # channels of all layers together; the largest timm models have some 10⁵

# Arguments of timm's builder and factory that choose weights, files or another kind of model, not an architecture.
_NOT_ARCHITECTURE = re.compile(
    r"(pretrained|checkpoint|cache|script|export|feature|out_indices|kwargs|model_|pruned|device|dtype|no_jit)"
)

_MODEL_NAME = re.compile(r"[A-Za-z0-9_]{1,200}")
_DOTTED = re.compile(r"[A-Za-z0-9_]{1,120}(\.[A-Za-z0-9_]{1,120}){0,40}")
_BUILDER = re.compile(r"[A-Za-z_]\w{0,120}(\.[A-Za-z_]\w{0,120}){0,20}:[A-Za-z_]\w{0,120}", re.ASCII)
_REQUIRED = ("format", "version", "base", "widths")
_OPTIONAL = ("attributes", "base_args", "name", "kept", "features", "builder", "removed", "turned")

IDENTITY, ZERO = "identity", "zero"  # what a module that is gone returns


@dataclass(frozen=True)
class ChannelConfig:
    """How a pruned architecture differs from its base.

    Attributes:
        base: name of the base model in timm.
        widths: new size of each changed dim, ``{"layer1.0.conv1.weight": {0: 45}}``.
        attributes: new value of each changed number in a module, ``{"blocks.0.attn": {"num_heads": 2}}``; the empty
            module name is the model itself, a dotted attribute reaches into lists and dicts
            (``feature_info.0.num_chs``).
        base_args: arguments of ``timm.create_model`` that the base needs, such as ``{"img_size": 256}``.
        name: name to register the pruned architecture under.
        kept: which of the base's output channels are left, where that is known: ``{"layer1.0.conv1.weight": {0: (0, 3,
            4, …)}}``. Rebuilding does not need it; recovery and inner distillation of saved weights do.
        features: of a network that was pruned as ``features_only``: timm's class for it, and which maps it gives,
            ``{"class": "FeatureListNet", "out_indices": (1, 2, 3)}``. All names are then those of that class.
        builder: ``"package.module:function"`` that makes a base which timm does not know. It is a note: whoever loads
            the network names the function again, and only that one is called.
        removed: modules that are gone, and what stands in their place: ``{"layer1.1": "identity"}`` for a whole block,
            ``{"blocks.3.norm1": "identity", "blocks.3.attn": "zero"}`` for one of its branches.
        turned: attention modules whose heads were turned before they were cut (`slim.turned_heads`): what ``kept`` says
            of them counts in the turned base. Rebuilding does not need it either.

    Example:
        >>> config = ChannelConfig("resnet18", {"layer1.0.conv1.weight": {0: 45}, "layer1.0.conv2.weight": {1: 45}})
        >>> ChannelConfig.from_json(config.to_json()) == config
        True
    """

    base: str
    widths: Mapping[str, Mapping[int, int]]
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    base_args: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    kept: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    builder: str | None = None
    removed: Mapping[str, str] = field(default_factory=dict)
    turned: tuple[str, ...] = ()

    def __post_init__(self):
        _check_name(self.base, "base")
        if self.name is not None:
            _check_name(self.name, "name")
        object.__setattr__(self, "widths", _frozen_table(self.widths, "widths", _read_dim))
        object.__setattr__(self, "attributes", _frozen_table(self.attributes, "attributes", _read_attribute))
        object.__setattr__(self, "base_args", _frozen_base_args(self.base_args))
        object.__setattr__(self, "kept", _frozen_kept(self.kept, self.widths))
        object.__setattr__(self, "features", _frozen_features(self.features))
        if self.builder is not None:
            check_builder_name(self.builder)
        object.__setattr__(self, "removed", _frozen_removed(self.removed))
        object.__setattr__(self, "turned", _frozen_names(self.turned, "turned"))

    def __repr__(self):
        name = "" if self.name is None else f", name={self.name!r}"
        removed = f", {len(self.removed)} modules removed" if self.removed else ""
        return f"ChannelConfig({self.base!r}, {len(self.widths)} tensors resized{removed}{name})"

    def __hash__(self):
        return hash(self.to_json())

    def __reduce__(self):  # mapping proxies don't pickle or deep-copy; plain dicts do
        widths, attributes, kept = (_thawed(table) for table in (self.widths, self.attributes, self.kept))
        features, removed = dict(self.features), dict(self.removed)
        return ChannelConfig, (
            self.base, widths, attributes, dict(self.base_args), self.name, kept, features, self.builder, removed,
            self.turned,
        )  # fmt: skip

    def renamed(self, name: str) -> "ChannelConfig":
        """The same architecture under another name."""
        return replace(self, name=name)

    def architecture(self) -> "ChannelConfig":
        """The same without ``kept`` and ``turned``, which speak of weights."""
        return replace(self, kept={}, turned=())

    def lacks(self, name: str) -> bool:
        """Is this module, or the module of this parameter, gone?

        Example:
            >>> config = ChannelConfig("resnet18", {}, removed={"layer1.1": "identity"})
            >>> config.lacks("layer1.1"), config.lacks("layer1.1.conv1.weight"), config.lacks("layer1.10")
            (True, True, False)
        """
        return any(f"{name}.".startswith(f"{gone}.") for gone in self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Plain sorted dicts, as written to JSON."""
        data = {
            "format": FORMAT,
            "version": self._version,
            "base": self.base,
            "widths": {
                param: {str(dim): size for dim, size in sorted(dims.items())}
                for param, dims in sorted(self.widths.items())
            },
        }
        if self.attributes:
            data["attributes"] = {m: dict(sorted(a.items())) for m, a in sorted(self.attributes.items())}
        if self.base_args:
            data["base_args"] = dict(sorted(self.base_args.items()))
        if self.name is not None:
            data["name"] = self.name
        if self.kept:
            data["kept"] = {
                param: {str(dim): ranges_text(index) for dim, index in sorted(dims.items())}
                for param, dims in sorted(self.kept.items())
            }
        if self.features:
            data["features"] = dict(sorted(self.features.items()))
        if self.builder is not None:
            data["builder"] = self.builder
        if self.removed:
            data["removed"] = dict(sorted(self.removed.items()))
        if self.turned:
            data["turned"] = list(self.turned)
        return data

    @property
    def _version(self) -> int:
        """The oldest that has all that this config says."""
        return 4 if self.removed or self.turned else 3 if self.features or self.builder else 2 if self.kept else 1

    def to_json(self) -> str:
        return to_json(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, data: Any, source: str = "channel config") -> "ChannelConfig":
        """Read strictly: an unknown, missing or malformed key is an error that names it."""
        try:
            return cls._from_dict(data)
        except ChannelConfigError as error:
            raise ChannelConfigError(f"{source}: {error}") from None

    @classmethod
    def _from_dict(cls, data: Any) -> "ChannelConfig":
        if not isinstance(data, Mapping):
            raise ChannelConfigError(f"expected a JSON object, got {shortened(data)}")
        for key in _REQUIRED:
            if key not in data:
                raise ChannelConfigError(f"key {key!r} is missing; a channel config has {', '.join(_REQUIRED)}")
        unknown = sorted(str(key) for key in data if key not in _REQUIRED + _OPTIONAL)
        if unknown:
            allowed = ", ".join(_REQUIRED + _OPTIONAL)
            raise ChannelConfigError(f"unknown key {shortened(unknown[0])}; the keys are {allowed}")
        if data["format"] != FORMAT:
            raise ChannelConfigError(f"format is {shortened(data['format'])}, expected {FORMAT!r}")
        version = data["version"]
        if type(version) is not int or version < 1:
            raise ChannelConfigError(f"version is {shortened(version)}, expected a whole number from 1 to {VERSION}")
        if version > VERSION:
            raise ChannelConfigError(
                f"version {version} is newer than the {VERSION} that this timm_knapsack reads; upgrade timm-knapsack"
            )
        return cls(
            base=data["base"],
            widths=data["widths"],
            attributes=data.get("attributes", {}),
            base_args=data.get("base_args", {}),
            name=data.get("name"),
            kept=data.get("kept", {}),
            features=data.get("features", {}),
            builder=data.get("builder"),
            removed=data.get("removed", {}),
            turned=data.get("turned", ()),
        )

    @classmethod
    def from_json(cls, text: str, source: str = "channel config") -> "ChannelConfig":
        if len(text) > MAX_BYTES:
            raise ChannelConfigError(f"{source}: {len(text)} characters; a channel config has at most {MAX_BYTES}")
        data = parse_json(text, source, ChannelConfigError)
        return cls.from_dict(data, source)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ChannelConfig":
        """Read a file written by ``save``."""
        text = read_limited(path, MAX_BYTES, ChannelConfigError)
        return cls.from_json(text, str(path))

    def save(self, path: str | os.PathLike) -> None:
        """Write sorted JSON; the file appears whole or not at all."""
        write_text(path, self.to_json())


def model_name(model: Any) -> str:
    """The name a timm model was created under (what a config calls its ``base``), or its class.

    Example:
        >>> model_name(object())
        'object'
    """
    config = getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, Mapping) else None
    return name or type(model).__name__


def features_of(model: Any) -> dict[str, Any]:
    """What a config notes of a network that timm made with ``features_only=True``; empty for any other.

    Example:
        >>> import timm
        >>> features_of(timm.create_model("resnet10t", features_only=True, out_indices=(1, 2)))
        {'class': 'FeatureListNet', 'out_indices': (1, 2)}
        >>> features_of(timm.create_model("resnet10t"))
        {}
    """
    indices = getattr(getattr(model, "feature_info", None), "out_indices", None)
    if indices is None:
        return {}
    return {"class": type(model).__name__, "out_indices": tuple(int(i) for i in indices)}


def check_builder_name(name: Any) -> None:
    """An error if this is not ``"package.module:function"``."""
    if not isinstance(name, str) or not _BUILDER.fullmatch(name):
        raise ChannelConfigError(f"builder is {shortened(name)}, expected 'package.module:function'")


def _thawed(table):
    return {outer: dict(inner) for outer, inner in table.items()}


def _check_name(name: Any, key: str) -> None:
    if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
        expected = "expected a model name of letters, digits and underscores"
        raise ChannelConfigError(f"{key} is {shortened(name)}, {expected}")


def _read_size(value: Any, place: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise ChannelConfigError(f"{place} is {shortened(value)}, expected a whole number from 1 to {MAX_SIZE}")
    return value


def _read_dim(key: Any, place: str) -> int:
    if type(key) is int and 0 <= key < 10:
        return key
    if isinstance(key, str) and re.fullmatch(r"[0-9]", key):
        return int(key)
    raise ChannelConfigError(f"{place}: {shortened(key)} is not a dim, expected 0 to 9")


def _read_attribute(key: Any, place: str) -> str:
    if isinstance(key, str) and _DOTTED.fullmatch(key) and not key.startswith("_") and "._" not in key:
        return key
    raise ChannelConfigError(f"{place}: {shortened(key)} is not a public attribute name")


def _frozen_table(table: Any, key: str, read_inner) -> Mapping[str, Mapping[Any, int]]:
    if not isinstance(table, Mapping):
        raise ChannelConfigError(f"{key} is {shortened(table)}, expected an object")
    result = {}
    for outer, inner in table.items():
        if not isinstance(outer, str) or not (_DOTTED.fullmatch(outer) or (outer == "" and key == "attributes")):
            raise ChannelConfigError(f"{key}: {shortened(outer)} is not a dotted name")
        place = f"{key}[{outer!r}]"
        if not isinstance(inner, Mapping) or not inner:
            raise ChannelConfigError(f"{place} is {shortened(inner)}, expected an object that is not empty")
        result[outer] = MappingProxyType(
            {read_inner(k, place): _read_size(v, f"{place}[{str(k)!r}]") for k, v in inner.items()}
        )
    return MappingProxyType(result)


def _frozen_kept(kept: Any, widths: Mapping[str, Mapping[int, int]]) -> Mapping[str, Mapping[int, tuple[int, ...]]]:
    """As many sorted channels as the width says, for each dim that is named; text of ranges as it stands in JSON."""
    if not isinstance(kept, Mapping):
        raise ChannelConfigError(f"kept is {shortened(kept)}, expected an object")
    result, total = {}, 0
    for name, dims in kept.items():
        if not isinstance(dims, Mapping) or not dims or name not in widths:
            what = f"kept[{shortened(name)}] is {shortened(dims)}"
            raise ChannelConfigError(f"{what}, expected dims that widths name too")
        result[name] = {}
        for key, index in dims.items():
            place = f"kept[{name!r}][{str(key)[:20]!r}]"
            dim = _read_dim(key, f"kept[{name!r}]")
            if dim not in widths[name]:
                raise ChannelConfigError(f"{place}: widths has no such dim")
            width = widths[name][dim]
            total += width
            if total > MAX_KEPT:
                raise ChannelConfigError(f"kept names more than {MAX_KEPT} channels; no model has as many")
            read = read_ranges if isinstance(index, str) else _read_channels
            result[name][dim] = read(index, place, width)
    return MappingProxyType({name: MappingProxyType(dims) for name, dims in result.items()})


def _frozen_features(features: Any) -> Mapping[str, Any]:
    if not isinstance(features, Mapping) or set(features) not in (set(), {"class", "out_indices"}):
        raise ChannelConfigError(f"features is {shortened(features)}, expected an object with class and out_indices")
    if not features:
        return MappingProxyType({})
    _check_name(features["class"], "features['class']")
    indices = features["out_indices"]
    whole = isinstance(indices, (list, tuple)) and all(type(i) is int and -100 <= i <= 1000 for i in indices)
    if not whole or not 1 <= len(indices) <= 100:
        raise ChannelConfigError(f"features['out_indices'] is {shortened(indices)}, expected a few numbers of maps")
    return MappingProxyType({"class": features["class"], "out_indices": tuple(indices)})


def _frozen_names(names: Any, key: str) -> tuple[str, ...]:
    """A short list of modules' names."""
    if not isinstance(names, (list, tuple)) or len(names) > MAX_MODULES:
        raise ChannelConfigError(f"{key} is {shortened(names)}, expected a list of at most {MAX_MODULES} names")
    for name in names:
        if not isinstance(name, str) or not _DOTTED.fullmatch(name):
            raise ChannelConfigError(f"{key}: {shortened(name)} is not a dotted name")
    return tuple(sorted(set(names)))


def _frozen_removed(removed: Any) -> Mapping[str, str]:
    if not isinstance(removed, Mapping):
        raise ChannelConfigError(f"removed is {shortened(removed)}, expected an object")
    for name, how in removed.items():
        if not isinstance(name, str) or not _DOTTED.fullmatch(name):
            raise ChannelConfigError(f"removed: {shortened(name)} is not a dotted name")
        if how not in (IDENTITY, ZERO):
            raise ChannelConfigError(f"removed[{name!r}] is {shortened(how)}, expected {IDENTITY!r} or {ZERO!r}")
        parts = name.split(".")
        around = next((outer for end in range(1, len(parts)) if (outer := ".".join(parts[:end])) in removed), None)
        if around is not None:
            raise ChannelConfigError(f"removed names {name!r}, which is gone with {around!r}")
    return MappingProxyType(dict(removed))


def _read_channels(index: Any, place: str, count: int) -> tuple[int, ...]:
    """Channel numbers under the same conditions as text of ranges."""
    try:
        channels = tuple(map(operator.index, index))
    except TypeError:
        raise ChannelConfigError(f"{place} is {shortened(index)}, expected channel numbers") from None
    ascending = all(map(operator.lt, channels, channels[1:]))
    if ascending and len(channels) == count > 0 and channels[0] >= 0 and channels[-1] < MAX_INDEX:
        return channels
    return read_ranges(ranges_text(channels), place, count)  # it says what is wrong


def _frozen_base_args(args: Any) -> Mapping[str, Any]:
    """Only plain values that shape an architecture: no nesting, nothing that reaches the disk or the network."""
    if not isinstance(args, Mapping):
        raise ChannelConfigError(f"base_args is {shortened(args)}, expected an object")
    result = {}
    for key, value in args.items():
        place = f"base_args[{shortened(key)}]"
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,60}", key):
            raise ChannelConfigError(f"{place}: not an argument name")
        if _NOT_ARCHITECTURE.match(key):
            raise ChannelConfigError(f"{place}: a channel config does not choose weights or files")
        if isinstance(value, (list, tuple)):
            value = tuple(value)
            values = value
        else:
            values = (value,)
        for item in values:
            plain = item is None or isinstance(item, (bool, int, str)) or (isinstance(item, float) and item - item == 0)
            if not plain or len(values) > 100 or (isinstance(item, str) and len(item) > 200):
                raise ChannelConfigError(
                    f"{place} is {shortened(value)}, expected a plain number, text, or a short list of them"
                )
            if isinstance(item, (int, float)) and abs(item) > (MAX_CLASSES if key == "num_classes" else MAX_BASE_ARG):
                raise ChannelConfigError(f"{place} is {shortened(value)}, larger than any model uses")
        result[key] = value
    return MappingProxyType(result)
