"""Copies of a model with other tensors in it: on the meta device, cut, or with fresh memory.

Forward hooks come along, since they may change what a module returns; shared tensors stay shared, and plain tensor
attributes follow the parameters.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from .modes import modes_kept
from .open_widths import open_widths


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, each tensor once under its first name."""
    seen, result = set(), []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            result.append((name, tensor))
    return result


def copy_with(model: nn.Module, replace: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A deep copy in which each parameter and buffer is what ``replace(name, tensor)`` returns.

    Forward hooks come along as with `copy.deepcopy`; hooks of the backward pass and of the state dict stay behind.
    Modules of timm whose code takes a width for granted leave it open in the copy (`open_widths`).
    """
    memo = {}
    for name, tensor in named_tensors(model):
        new = replace(name, tensor)
        if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = new
    for module in model.modules():
        for name, value in vars(module).items():
            if name in _FORWARD_HOOKS:
                memo[id(value)] = OrderedDict()  # filled below, when all modules have their copies
            elif name in _OTHER_HOOKS:
                if value:
                    memo[id(value)] = _lasting_hooks(value)  # not copied at all: they may hold anything
            elif name[:1] != "_" and not _is_plain(value):
                # plain tensor attributes, and caches of them, go where the parameters go
                found = tree_flatten(value)[0] if isinstance(value, (dict, list, tuple)) else (value,)
                for tensor in found:
                    if isinstance(tensor, Tensor) and id(tensor) not in memo:
                        memo[id(tensor)] = replace(name, tensor)
    for handle in _handles(model):
        memo[id(handle)] = handle  # it removes a hook of the original; of the copy's hooks there is none
    result = _copied(model, memo)
    for module in model.modules():
        for name in _FORWARD_HOOKS:
            hooks = vars(module).get(name, {})
            for key, hook in hooks.items():
                memo[id(hooks)][key] = _copied_hook(hook, memo)
    open_widths(result)
    with modes_kept(result):
        result.train()  # modules that cache something for inference (attention biases) drop it here
    return result


def _copied(module: nn.Module, memo: dict) -> nn.Module:
    """copy.deepcopy of a module, several times faster: most attributes are plain values that need no copy."""
    if id(module) in memo:
        return memo[id(module)]
    kind = type(module)
    if _copies_itself(kind):
        return copy.deepcopy(module, memo)
    new = memo[id(module)] = kind.__new__(kind)
    state = new.__dict__
    for name, value in vars(module).items():
        if _is_plain(value):
            if name != "_compiled_call_impl":  # as nn.Module leaves it behind itself
                state[name] = value
        elif name == "_modules":
            state[name] = {n: None if child is None else _copied(child, memo) for n, child in value.items()}
        elif id(value) in memo:
            state[name] = memo[id(value)]
        elif type(value) in _CONTAINERS and not value:
            state[name] = memo[id(value)] = type(value)()
        elif name in ("_parameters", "_buffers") and all(t is None or id(t) in memo for t in value.values()):
            copies = ((n, None if t is None else memo[id(t)]) for n, t in value.items())
            state[name] = memo[id(value)] = type(value)(copies)
        elif name != "_compiled_call_impl":
            state[name] = copy.deepcopy(value, memo)
    return new


@cache
def _copies_itself(kind: type) -> bool:
    """Whether a class of modules defines its own copying."""
    standard = kind.__setstate__ is nn.Module.__setstate__ and kind.__getstate__ is nn.Module.__getstate__
    return not standard or hasattr(kind, "__deepcopy__")


_PLAIN = frozenset((int, float, str, bool, type(None), torch.dtype))
_CONTAINERS = frozenset((dict, set, list, OrderedDict))


def _is_plain(value) -> bool:
    """Whether a copy may share the value: a number, a name, a class, or a tuple of such."""
    kind = type(value)
    return kind in _PLAIN or isinstance(value, type) or (kind is tuple and all(type(each) in _PLAIN for each in value))


_FORWARD_HOOKS = frozenset(("_forward_hooks", "_forward_pre_hooks"))
_OTHER_HOOKS = frozenset(("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"))


def _handles(model: nn.Module) -> list[RemovableHandle]:
    """Handles of hooks that a module, or a helper that it holds (timm's FeatureHooks), keeps: they can't be copied."""
    values = [value for module in model.modules() for name, value in vars(module).items() if not name.startswith("_")]
    values += [inner for value in values for inner in getattr(value, "__dict__", {}).values()]
    found = [each for value in values for each in (value if isinstance(value, (list, tuple)) else (value,))]
    return [each for each in found if isinstance(each, RemovableHandle)]


def _copied_hook(hook: Callable, memo: dict) -> Callable:
    """A method is bound to the copy of its module; a function, or what can't be copied, stays what it is."""
    try:
        return copy.deepcopy(hook, memo)
    except Exception:  # a hook may hold anything: files, locks, data
        return hook


def _lasting_hooks(hooks: Mapping) -> OrderedDict:
    """weight_norm and spectral_norm are hooks that belong to the layer: they stay."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils"))


def on_meta(model: nn.Module) -> nn.Module:
    """A copy on the meta device, in eval mode."""
    return copy_with(model, lambda _, tensor: torch.empty_like(tensor, device="meta")).eval()
