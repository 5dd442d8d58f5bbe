"""Where inner distillation listens: which maps of a network, and how to read them without leaving a trace.

A **tap** is a place in the network where a pre-activation map can be read: the output of a module, or the input of
the activation that ends it. ResNet-18's block ``layer1.0`` ends in ``act2``; its tap is the input of
``layer1.0.act2``, the sum of the residual branch and the shortcut.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import TrainingError
from ..slim.modes import eval_mode

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WEIGHTED = (nn.Conv2d, nn.Linear)
# Activations by the module that defines their class; softmax and attention live there too but end no block.
_ACTIVATION_HOMES = ("torch.nn.modules.activation", "timm.layers.activations", "timm.layers.activations_me")
_NOT_ACTIVATIONS = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d)


@dataclass(frozen=True)
class Tap:
    """One place to read a map.

    Attributes:
        name: the conv, block or stage that the map belongs to.
        module: the module that is listened to.
        side: ``"output"`` of that module, or its ``"input"`` where the module is the activation that ends the block.

    Example:
        >>> Tap("layer1.0", "layer1.0.act2", "input").side
        'input'
    """

    name: str
    module: str
    side: str


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the building blocks: what a list of modules repeats, such as a ResNet's residual blocks.

    A block is a member of an ``nn.Sequential``, ``ModuleList`` or ``ModuleDict`` that holds at least two convs or
    linears and no further block. Where there is none, the children of the stages in timm's ``feature_info`` are
    searched in the same way (RegNet), then members that are plain ``nn.Sequential``.

    Example:
        >>> import timm_knapsack, timm
        >>> find_blocks(timm.create_model("resnet10t"))
        ['layer1.0', 'layer2.0', 'layer3.0', 'layer4.0']
    """
    stages = {info["module"] for info in _feature_info(model)}
    in_containers, in_stages = {}, {}
    for name, parent in model.named_modules():
        is_container = isinstance(parent, _CONTAINERS)
        if is_container or name in stages:
            for child, member in parent.named_children():
                if _is_composite(member):
                    (in_containers if is_container else in_stages)[f"{name}.{child}" if name else child] = member
    own_class = {name: member for name, member in in_containers.items() if type(member) is not nn.Sequential}
    return _innermost(own_class) or _innermost(in_stages) or _innermost(in_containers)


def _is_composite(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # they have no forward, so no map
        return False
    return sum(isinstance(part, _WEIGHTED) for part in module.modules()) >= 2


def _innermost(named: dict[str, nn.Module]) -> list[str]:
    outer = {".".join(parts[:end]) for parts in (name.split(".") for name in named) for end in range(1, len(parts))}
    return [name for name in named if name not in outer]


def find_stages(model: nn.Module) -> list[str]:
    """Names of the last block of each stage.

    The stages are those of timm's ``feature_info``; without it, every container that directly holds blocks. The last
    block of the network always counts: ``feature_info`` often ends in a layer of the head instead.

    Example:
        >>> import timm_knapsack, timm
        >>> find_stages(timm.create_model("resnet18"))
        ['layer1.1', 'layer2.1', 'layer3.1', 'layer4.1']
    """
    blocks = find_blocks(model)
    stages = [info["module"] for info in _feature_info(model)] or [block.rpartition(".")[0] for block in blocks]
    last = dict.fromkeys(blocks[-1:])
    for stage in stages:
        # a stage holds blocks, is one, or (EfficientNet's expansion features) is a layer inside one
        inside = [b for b in blocks if _within(b, stage)] or [b for b in blocks if _within(stage, b)]
        if inside:
            last[inside[-1]] = None
    return [b for b in blocks if b in last]


def _feature_info(model: nn.Module) -> list[dict]:
    info = getattr(model, "feature_info", None) or []
    info = getattr(info, "info", info)  # timm's FeatureInfo keeps the list one level down
    return [entry for entry in info if isinstance(entry, dict) and entry.get("module")]


def _within(name: str, parent: str) -> bool:
    return not parent or name == parent or name.startswith(parent + ".")


def the_map(output: Any) -> Any:
    """The tensor among what a module returns: itself, or the only one of a tuple (MViTv2's blocks add its size).

    Example:
        >>> x = torch.zeros(1, 4, 8)
        >>> the_map(x) is x, the_map((x, [2, 2])) is x, the_map((x, x)) == (x, x)
        (True, True, True)
    """
    if isinstance(output, (tuple, list)):
        tensors = [part for part in output if isinstance(part, torch.Tensor)]
        return tensors[0] if len(tensors) == 1 else output
    return output


def find_convs(model: nn.Module) -> list[str]:
    """Names of every ``Conv2d``, and of every ``Linear`` inside a block (so without the classifier).

    Example:
        >>> find_convs(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)))
        ['0']
    """
    blocks = find_blocks(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
        or (isinstance(module, nn.Linear) and any(_within(name, block) for block in blocks))
    ]


def find_layers(model: nn.Module) -> list[str]:
    """Names of every ``Conv2d`` and ``Linear`` but the last, which gives the outputs.

    Example:
        >>> find_layers(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)))
        ['0', '3']
    """
    return [name for name, module in model.named_modules() if isinstance(module, _WEIGHTED)][:-1]


def alike_channels(
    teacher: nn.Module, name: str, kept: Mapping[str, torch.Tensor], wide: Any, slim: Any
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What takes a block's map of the teacher to the channels that the student has; None where nothing says which.

    Args:
        kept: ``{layer: which of the teacher's output channels the student has}``.
        wide, slim: the block's output for the same images in both networks.

    Example:
        >>> net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
        >>> wide, slim = torch.arange(4.0).reshape(1, 4, 1, 1), torch.zeros(1, 2, 1, 1)
        >>> alike_channels(net, "0", {"0.0": torch.tensor([1, 3])}, wide, slim)(wide).flatten()
        tensor([1., 3.])
    """
    tensors = isinstance(wide, torch.Tensor) and isinstance(slim, torch.Tensor)
    if not tensors or wide.dim() != slim.dim():
        return None
    differing = [dim for dim in range(wide.dim()) if wide.shape[dim] != slim.shape[dim]]
    if not differing:
        return lambda full: full
    dim = differing[0]
    makers = makers_at(teacher, name, wide.shape[dim])
    index = next((kept[key] for key in makers if key in kept and len(kept[key]) == slim.shape[dim]), None)
    if len(differing) > 1 or index is None:
        return None
    return lambda full: full.index_select(dim, index.to(full.device))


def makers_at(teacher: nn.Module, name: str, wide: int) -> list[str]:
    """A block and the layers inside it that have as many output channels, the last first: one of them makes its map.

    Example:
        >>> makers_at(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())), "0", wide=4)
        ['0', '0.0']
    """
    inside = [
        f"{name}.{child}"
        for child, module in teacher.get_submodule(name).named_modules()
        if child and getattr(module, "out_channels", getattr(module, "out_features", None)) == wide
    ]
    return [name, *reversed(inside)]


def find_taps(model: nn.Module, at: str | Sequence[str], example: torch.Tensor) -> list[Tap]:
    """The taps of ``at`` (``"convs"``, ``"blocks"``, ``"stages"`` or module names), from one forward of ``example``.

    A network without blocks (VGG, LeNet) has a tap at each conv and linear but the last instead.
    The activation that ends a block is found by running it: it is the one whose output *is* the block's output. An
    activation that is called as a function (``F.relu``) can't be seen, and the block's own output is taken then.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        >>> find_taps(net, ["1"], torch.zeros(1, 3, 2, 2))
        [Tap(name='1', module='1', side='input')]
    """
    finders = {"convs": find_convs, "blocks": find_blocks, "stages": find_stages}
    named_by_user = not isinstance(at, str)
    names = list(at) if named_by_user else finders[at](model)
    if not names and at == "blocks":
        names = find_layers(model)
    if not names:
        looked_for = {
            "convs": "an nn.Conv2d, or an nn.Linear inside a block",
            "blocks": "a member of an nn.Sequential, ModuleList or ModuleDict with two or more convs or linears, and "
            "for any conv or linear before the last",
            "stages": "blocks under the modules of model.feature_info",
        }
        raise TrainingError(
            f"ikd_at={at!r}: {type(model).__name__} has none; looked for {looked_for.get(at, 'module names')}. "
            "Give ikd_at a list of module names, or another level (convs, blocks, stages)"
        )
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise TrainingError(f"ikd_at names {name!r}, which is no module of {type(model).__name__}")
    found = _run_once(model, modules, names, example)
    missing = [name for name in names if name not in found]
    if missing and (named_by_user or not found):
        raise TrainingError(
            f"ikd_at={at!r}: {missing[0]} of {type(model).__name__} has no map to distil: forward does not call it, "
            "or it returns more than one tensor. Give ikd_at the names of modules that return one tensor"
        )
    return [found[name] for name in names if name in found]


def block_taps(model: nn.Module, example: torch.Tensor) -> list[Tap]:
    """The taps of those blocks that return a map; none where no block does.

    Example:
        >>> block_taps(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.zeros(1, 3, 2, 2))
        []
    """
    names = find_blocks(model)
    found = _run_once(model, dict(model.named_modules()), names, example) if names else {}
    return [found[name] for name in names if name in found]


def _run_once(
    model: nn.Module, modules: dict[str, nn.Module], names: list[str], example: torch.Tensor
) -> dict[str, Tap]:
    found, handles = {}, []
    last_activation = ["", None]  # name and output of the activation that ran last

    def after_activation(name):
        def hook(module, args, output):
            last_activation[:] = name, output

        return hook

    def after_tapped(name):
        def hook(module, args, output):
            activation, activated = last_activation
            if output is activated and _within(activation, name):
                found[name] = Tap(name, activation, "input")
            elif isinstance(the_map(output), torch.Tensor):
                found[name] = Tap(name, name, "output")

        return hook

    try:
        for name, module in modules.items():
            if _is_activation(module):
                handles.append(module.register_forward_hook(after_activation(name)))
        for name in names:
            handles.append(modules[name].register_forward_hook(after_tapped(name)))
        with eval_mode(model), torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in _ACTIVATION_HOMES and not isinstance(module, _NOT_ACTIVATIONS)


@contextmanager
def listen(model: nn.Module, taps: Sequence[Tap]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the maps of one forward: hooks live only inside the ``with``, so the model stays free of them.

    No map changes afterwards. An activation that would overwrite its input (``ReLU(inplace=True)``) computes beside it
    while it is listened to; what a module returns is copied: the next operation (``x += shortcut``) may change it.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True))
        >>> with listen(net, [Tap("conv", "0", "output")]) as maps:
        ...     _ = net(torch.ones(1, 3, 2, 2))
        >>> tuple(maps["conv"].shape), len(net[0]._forward_hooks)
        ((1, 4, 2, 2), 0)
    """
    maps, handles, overwriting = {}, [], []

    def keep_output(name):
        def hook(module, args, output):
            maps[name] = the_map(output).clone()

        return hook

    def keep_input(name):
        def hook(module, args):
            maps[name] = args[0] if hasattr(module, "inplace") else args[0].clone()

        return hook

    try:
        for tap in taps:
            module = model.get_submodule(tap.module)
            if tap.side == "input":
                handles.append(module.register_forward_pre_hook(keep_input(tap.name)))
                if getattr(module, "inplace", False):
                    module.inplace = False
                    overwriting.append(module)
            else:
                handles.append(module.register_forward_hook(keep_output(tap.name)))
        yield maps
    finally:
        for module in overwriting:
            module.inplace = True
        for handle in handles:
            handle.remove()
