"""Numbers baked into modules (``num_heads``, ``groups``, ``split_sizes`` …): which of them follow which axes.

While tracing, each size that a module's code passes to an op is noted with the axes it counts (`labels.Use`). A module
attribute that holds this very number is taken for its source and follows the axes when they shrink. The dry run of
``dry_run`` catches what this can't see.
"""

import re
from collections.abc import Iterator, MutableMapping, MutableSequence
from typing import Any

from torch import nn

from ..errors import ChannelConfigError

# Attributes that count something other than channels and heads, even where the numbers happen to agree.
NOT_CHANNELS = re.compile(
    r"window|patch|kernel|stride|dilat|img|image|grid|ratio|scale|depth|block|pool|radix|level|layers|drop|eps|seq|"
    r"resolution|token|prefix|shift|area|axis|ndim|num_classes|in_chans|training|momentum|padding|reduction|expansion|"
    r"reg_|cls|len|iter|step|temperature|base|freq|theta|num_paths|num_parallel|cardinality_?$|"
    r"^out_indices|^ws$|^sr_|^input_size$|^output_size$|halo|^rank$|^q_stride"
)

# Attributes that count attention heads, and nothing else.
COUNTS_HEADS = re.compile(r"^(?!.*(dim|width|channels|features|size)).*head|^nh$|^n_?h(ead)?s?$|^bias_shape$")

# Layers whose numbers are read off their weights: class → {attribute: (parameter, dim)}.
LAYER_SHAPES: dict[type, dict[str, tuple[str, int]]] = {
    nn.Linear: {"in_features": ("weight", 1), "out_features": ("weight", 0)},
    nn.modules.batchnorm._NormBase: {"num_features": ("running_mean", 0)},
    nn.modules.instancenorm._InstanceNorm: {"num_features": ("weight", 0)},  # most keep no statistics
    nn.GroupNorm: {"num_channels": ("weight", 0)},
    nn.Embedding: {"num_embeddings": ("weight", 0), "embedding_dim": ("weight", 1)},
    nn.PReLU: {"num_parameters": ("weight", 0)},
    nn.Bilinear: {"in1_features": ("weight", 1), "in2_features": ("weight", 2), "out_features": ("weight", 0)},
    nn.RNNBase: {"hidden_size": ("weight_hh_l0", 1), "input_size": ("weight_ih_l0", 1)},
}


def holders(
    module: nn.Module,
    size: int,
    names: tuple[str, ...] = (),
    heads: bool = False,
    part: tuple[int, int] | None = None,
) -> Iterator[str]:
    """Paths of the module's attributes that hold this number: ``num_heads``, ``split_sizes.0``.

    ``heads`` says that the number counts attention heads: only an attribute named so can hold it, and no other; where
    there is none, ``groups`` does.
    ``part`` says that it was the i-th of n numbers: of a list of n only the i-th can be it.
    """
    found = False
    for name, value in vars(module).items():
        if name.startswith("_") or (names and name not in names):
            continue
        if not names and (NOT_CHANNELS.search(name) or bool(COUNTS_HEADS.search(name)) != heads):
            continue
        for path in _paths(name, value, size):
            in_list = part is not None and isinstance(value, (list, tuple)) and len(value) == part[1]
            if not in_list or path == f"{name}.{part[0]}":
                found = True
                yield path
    if heads and not names and not found:
        yield from _paths("groups", vars(module).get("groups"), size)


def channel_numbers(module: nn.Module) -> set[int]:
    """The numbers above 1 that a module holds in attributes which may count channels or heads."""
    return {
        value
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and not name.startswith("_") and not NOT_CHANNELS.search(name)
    }


def _paths(path: str, value: Any, size: int) -> Iterator[str]:
    if type(value) is int and value == size:
        yield path
    elif isinstance(value, (list, tuple)) and len(value) <= 16:
        for i, item in enumerate(value):
            if type(item) is int and item == size:
                yield f"{path}.{i}"


def is_standard_layer(module: nn.Module) -> bool:
    """Layers of torch.nn (and their subclasses) know their own sizes: see sync_layer."""
    return isinstance(module, (*LAYER_SHAPES, nn.modules.conv._ConvNd, nn.LayerNorm))


def sync_layer(module: nn.Module) -> None:
    """Make a torch.nn layer's numbers agree with its weights; ``groups`` is set before."""
    if isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.weight.shape[:2]
        if module.transposed:
            module.in_channels, module.out_channels = first, second * module.groups
        else:
            module.in_channels, module.out_channels = second * module.groups, first
    elif isinstance(module, nn.LayerNorm) or type(module).__name__ in ("RMSNorm", "RmsNorm", "SimpleNorm"):
        weight = getattr(module, "weight", None)
        if weight is not None:
            module.normalized_shape = type(module.normalized_shape)(weight.shape)
    for layer, attributes in LAYER_SHAPES.items():
        if isinstance(module, layer):
            for attribute, (parameter, dim) in attributes.items():
                tensor = getattr(module, parameter, None)
                if tensor is not None and hasattr(module, attribute):
                    setattr(module, attribute, tensor.shape[dim])


def get_attribute(module: nn.Module, path: str) -> Any:
    """Follow a dotted path through attributes, lists and dicts."""
    value: Any = module
    for part in path.split("."):
        value = _step(value, part)
    return value


def _step(value: Any, part: str) -> Any:
    if isinstance(value, (list, tuple)):
        if not part.isdigit() or int(part) >= len(value):
            raise KeyError(part)
        return value[int(part)]
    if isinstance(value, MutableMapping):
        return value[part]
    if part.isdigit() and hasattr(value, "info"):  # timm's FeatureInfo
        return value.info[int(part)]
    if part not in vars(value):
        raise KeyError(part)
    return vars(value)[part]


def set_attribute(module: nn.Module, path: str, value: int) -> None:
    """Set a number at a dotted path; tuples on the way are rebuilt."""
    *before, last = path.split(".")
    owners = [module]
    for part in before:
        owners.append(_step(owners[-1], part))
    new: Any = value
    for owner, part in zip(reversed(owners), [last, *reversed(before)], strict=True):
        if isinstance(owner, tuple):
            new = type(owner)(new if i == int(part) else item for i, item in enumerate(owner))
            continue
        if isinstance(owner, MutableSequence):
            owner[int(part)] = new
        elif isinstance(owner, MutableMapping):
            owner[part] = new
        else:
            setattr(owner, part, new)
        return


def apply_attributes(model: nn.Module, attributes: dict[str, dict[str, int]]) -> None:
    """Set ``{module: {path: value}}``, strictly: each must be a number that is there already and does not grow."""
    for name, values in attributes.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise ChannelConfigError(f"attributes: the model has no module {name!r}") from None
        for path, value in values.items():
            place = f"attributes[{name!r}][{path!r}]"
            try:
                old = get_attribute(module, path)
            except (KeyError, TypeError, AttributeError):
                raise ChannelConfigError(f"{place}: {type(module).__name__} has no such number") from None
            if type(old) is not int:
                raise ChannelConfigError(f"{place}: holds {old!r}, which is not a number of channels")
            if value > old or (value < 1 and not path.startswith("pad_")):
                raise ChannelConfigError(f"{place} is {value}, expected 1 to {old} as in the base model")
            set_attribute(module, path, value)


def feature_entries(model: nn.Module) -> Iterator[tuple[int, str, str]]:
    """(position, module, hook side) of each entry of a timm model's feature_info."""
    info = getattr(model, "feature_info", None)
    entries = getattr(info, "info", info)
    if isinstance(entries, (list, tuple)):
        for i, entry in enumerate(entries):
            if isinstance(entry, dict) and type(entry.get("num_chs")) is int and entry.get("module"):
                yield i, entry["module"], "in" if entry.get("hook_type") == "forward_pre" else "out"
