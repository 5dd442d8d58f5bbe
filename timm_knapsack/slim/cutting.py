"""The only file that cuts weights: slice_model (weights and all) and resize_model (architecture only)."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ChannelConfigError, KeepError
from .attributes import apply_attributes, sync_layer
from .channel_config import ChannelConfig
from .channel_groups import ChannelGroups
from .copying import copy_with, named_tensors
from .kept_channels import of_layers, shared_too
from .removed_blocks import without_modules
from .wrappers import bare

MOST_CHANNELS = 2**16  # of a layer: a longer dim holds whole kernels, one after the other (CondConv of EfficientNet-CC)


def slice_model(model: nn.Module, groups: ChannelGroups, keep: Mapping[str, Tensor]) -> nn.Module:
    """A physically smaller copy of the model that keeps the chosen units; the model itself is left untouched.

    Args:
        keep: for each group name the indices of the units that stay; a group that is not named keeps all.

    Example:
        >>> import timm
        >>> model = timm.create_model("resnet18")
        >>> groups = find_channel_groups(model)
        >>> slim = slice_model(model, groups, {"layer1.0.conv1": range(0, 64, 2)})
        >>> slim.layer1[0].conv1.out_channels
        32
    """
    model = bare(model)
    tensors = _tensors_that_fit(model, groups)
    kept = kept_indices(groups, groups.check_keep(keep))

    def cut(name: str, tensor: Tensor) -> Tensor:
        if tensor is not tensors.get(name):
            return tensor.detach().clone()  # a plain tensor attribute
        new = tensor.detach()
        for dim, index in kept.get(name, {}).items():
            new = new.index_select(dim, index.to(new.device))
        new = new.clone() if name not in kept else new
        return _like_memory(new, tensor)

    slim = copy_with(model, cut)
    sizes = [len(kept_units) for kept_units in groups.check_keep(keep).values()]
    changed = {}
    for attribute in groups.attributes:
        value = attribute.at(sizes)
        changed.setdefault(attribute.module, {})[attribute.path] = value
    apply_attributes(slim, changed)
    _sync(slim, kept)
    return slim


def mask_model(model: nn.Module, groups: ChannelGroups, keep: Mapping[str, Tensor]) -> nn.Module:
    """A copy of full size in which every slice of every removed unit is zero.

    Its outputs equal those of `slice_model` with the same ``keep``, unless a norm or softmax runs across the removed
    channels (``group.crosses_norm``): the oracle of the tests.
    """
    tensors = _tensors_that_fit(model, groups)
    gone: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for (name, dim), index in _gone(groups, groups.check_keep(keep)).items():
        if not name.endswith(("running_mean", "running_var")):
            gone[name].append((dim, torch.from_numpy(np.concatenate(index))))

    def masked(name: str, tensor: Tensor) -> Tensor:
        new = tensor.detach().clone()
        for dim, index in gone.get(name, ()) if tensor is tensors.get(name) else ():  # else a plain tensor attribute
            new.index_fill_(dim, index.to(new.device), 0)
        return new

    return copy_with(model, masked)


def _tensors_that_fit(model: nn.Module, groups: ChannelGroups) -> dict[str, Tensor]:
    tensors = dict(named_tensors(model))
    if {name: tuple(t.shape) for name, t in tensors.items()} != dict(groups.shapes):
        changed = next(
            (n for n in groups.shapes if n not in tensors or tuple(tensors[n].shape) != groups.shapes[n]), None
        )
        raise KeepError(
            f"these groups belong to another model: {changed or 'a tensor'} differs; "
            "call find_channel_groups(model) again"
        )
    return tensors


def kept_indices(groups: ChannelGroups, keep: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
    """``{parameter: {dim: indices that stay}}`` for every dim that shrinks."""
    result: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for (param, dim), removed in _gone(groups, keep).items():
        stays = np.ones(groups.shapes[param][dim], dtype=bool)
        for index in removed:
            stays[index] = False
        result[param][dim] = torch.from_numpy(np.flatnonzero(stays))
    return dict(result)


def _gone(groups: ChannelGroups, keep: Mapping[str, Tensor]) -> dict[tuple[str, int], list[np.ndarray]]:
    """The indices that go, those of each slice by themselves; by numpy, which is faster at many short arrays."""
    gone: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
    for group in groups:
        mask = np.ones(group.size, dtype=bool)
        mask[keep[group.name].numpy()] = False
        units = np.flatnonzero(mask)
        if units.size:
            for s in (*group.slices, *group.hidden_slices):
                gone[s.param, s.dim].append(s.index.numpy()[units].reshape(-1))
    return gone


def channel_config_of(
    groups: ChannelGroups, keep: Mapping[str, Tensor], base: str, base_args=None, features=None, turned=()
) -> ChannelConfig:
    """What resize_model needs to rebuild ``slice_model(model, groups, keep)`` from the base architecture."""
    keep = groups.check_keep(keep)
    indices = kept_indices(groups, keep)
    widths = {param: {dim: len(index) for dim, index in dims.items()} for param, dims in indices.items()}
    sizes = [len(units) for units in keep.values()]
    attributes: dict[str, dict[str, int]] = defaultdict(dict)
    for attribute in groups.attributes:
        if attribute.at(sizes) != attribute.at(groups.sizes):
            attributes[attribute.module][attribute.path] = attribute.at(sizes)
    kept = _outputs(groups, indices)
    return ChannelConfig(
        base=base,
        widths=widths,
        attributes=dict(attributes),
        base_args=base_args or {},
        kept={name: {dim: index.tolist() for dim, index in dims.items()} for name, dims in kept.items()},
        features=features or {},
        turned=tuple(turned),
    )


def kept_outputs(groups: ChannelGroups, keep: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """``{layer: indices of its output channels that stay}`` for the layers that lose some.

    Args:
        model: that was cut, or the slim one: it says which layers a parameter belongs to.
    """
    kept = _outputs(groups, kept_indices(groups, groups.check_keep(keep)))
    return shared_too(of_layers(kept, model), model)


def _outputs(groups: ChannelGroups, kept: Mapping[str, dict[int, Tensor]]) -> dict[str, dict[int, Tensor]]:
    """`kept_indices`, of the dims only along which a conv or linear makes its channels; not of flattened kernels."""
    made = {(s.param, s.dim) for group in groups for s in group.slices if s.role == "out"}
    made = {(name, dim) for name, dim in made if groups.shapes[name][dim] <= MOST_CHANNELS}
    outputs = {n: {d: i for d, i in dims.items() if (n, d) in made} for n, dims in kept.items()}
    return {name: dims for name, dims in outputs.items() if dims}


def resize_model(model: nn.Module, config: ChannelConfig) -> nn.Module:
    """The slim architecture, rebuilt from its base model: no tracing, no data; new tensors are left uninitialised.

    Args:
        model: the base model, best on the meta device.

    Example:
        >>> import timm
        >>> with torch.device("meta"):
        ...     base = timm.create_model("resnet18")
        >>> config = ChannelConfig("resnet18", {"layer1.0.conv1.weight": {0: 8}, "layer1.0.bn1.weight": {0: 8},
        ...     "layer1.0.bn1.bias": {0: 8}, "layer1.0.bn1.running_mean": {0: 8}, "layer1.0.bn1.running_var": {0: 8},
        ...     "layer1.0.conv2.weight": {1: 8}})
        >>> resize_model(base, config).layer1[0].conv1
        Conv2d(64, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    if config.removed:
        model = without_modules(model, config.removed)
    tensors = dict(named_tensors(model))
    for name, dims in config.widths.items():
        if name not in tensors:
            raise ChannelConfigError(
                f"widths: the base model {config.base!r} has no parameter {name!r}; is this a config for another model?"
            )
        shape = tensors[name].shape
        for dim, size in dims.items():
            if dim >= len(shape):
                raise ChannelConfigError(
                    f"widths[{name!r}]: there is no dim {dim}; the parameter has {len(shape)} dims"
                )
            if size > shape[dim]:
                raise ChannelConfigError(
                    f"widths[{name!r}]['{dim}'] is {size}, more than the base model's {shape[dim]}"
                )
            kept = config.kept.get(name, {}).get(dim, (0,))
            if kept[-1] >= shape[dim]:
                raise ChannelConfigError(
                    f"kept[{name!r}]['{dim}'] names channel {kept[-1]}, the base model has {shape[dim]}"
                )

    def resized(name: str, tensor: Tensor) -> Tensor:
        if tensor is not tensors.get(name):
            return tensor.detach().clone()
        if name not in config.widths:
            return tensor.detach().clone()
        shape = [config.widths[name].get(dim, size) for dim, size in enumerate(tensor.shape)]
        return _like_memory(torch.empty(shape, dtype=tensor.dtype, device=tensor.device), tensor)

    slim = copy_with(model, resized)
    apply_attributes(slim, {module: dict(values) for module, values in config.attributes.items()})
    _sync(slim, config.widths)
    return slim


def _sync(slim: nn.Module, changed) -> None:
    owners = {name.rsplit(".", 1)[0] if "." in name else "" for name in changed}
    for name, module in slim.named_modules():
        if name in owners:
            sync_layer(module)


def _like_memory(new: Tensor, old: Tensor) -> Tensor:
    for memory_format, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if old.dim() == dims and old.is_contiguous(memory_format=memory_format) and not old.is_contiguous():
            return new.contiguous(memory_format=memory_format)
    return new.contiguous()
