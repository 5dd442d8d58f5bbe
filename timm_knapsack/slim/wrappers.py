"""What users put around a network: wrappers that are taken off here, and those that their owner has to take off.

DataParallel, DistributedDataParallel, torch.compile and transformers' TimmWrapper hold the network under another name
and change nothing in it. Weights in half precision are worked on in float32, and written back as they were.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import KnapsackError
from .copying import copy_with, named_tensors

NARROW = (torch.float16, torch.bfloat16)


def bare(model: nn.Module) -> nn.Module:
    """The network inside of its wrappers; the model itself where there are none.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> bare(nn.DataParallel(net)) is net, bare(torch.compile(net)) is net, bare(net) is net
        (True, True, True)
    """
    while (inner := _inside(model)) is not None:
        model = inner
    for name, module in model.named_modules():
        if hasattr(module, "merge_and_unload") or type(module).__module__.startswith("peft."):
            raise KnapsackError(
                f"{name or type(model).__name__} is an adapter of PEFT beside the network's layers; merge it first, "
                "with model = model.merge_and_unload()"
            )
    if type(model).__name__.startswith("FullyShardedDataParallel"):
        raise KnapsackError(
            "the weights of this FullyShardedDataParallel are spread over processes; gather them into an ordinary "
            "model first (FSDP.state_dict_type with FULL_STATE_DICT), and prune that"
        )
    if model._compiled_call_impl is not None:  # model.compile(): the same tensors in modules that are not compiled
        return copy_with(model, lambda _, tensor: tensor)
    return model


def _inside(model: nn.Module) -> nn.Module | None:
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        return model.module
    if type(model).__name__.startswith("TimmWrapper"):  # of transformers
        return model._modules.get("timm_model")
    return model._modules.get("_orig_mod")  # torch.compile(model)


def in_full_precision(model: nn.Module) -> nn.Module:
    """A copy in float32 of a network in half precision; the model itself where it is not.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> in_full_precision(net) is net, in_full_precision(nn.Linear(2, 2).bfloat16()).weight.dtype
        (True, torch.float32)
    """
    if not any(tensor.dtype in NARROW for _, tensor in named_tensors(model)):
        return model
    return copy_with(model, lambda _, tensor: tensor.detach().float() if tensor.dtype in NARROW else tensor)


def like_precision(model: nn.Module, original: nn.Module) -> nn.Module:
    """A copy of a network with each tensor in the precision that it has in the original.

    Example:
        >>> like_precision(nn.Linear(2, 1), nn.Linear(2, 2).half()).weight.dtype
        torch.float16
    """
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(original)}
    return copy_with(model, lambda name, tensor: tensor.detach().to(dtypes.get(name, tensor.dtype)))


def for_images(model: nn.Module) -> nn.Module:
    """The network to run on images in the model's place: bare, in full precision, and called with one tensor.

    Example:
        >>> for_images(nn.Bilinear(2, 2, 1))
        Traceback (most recent call last):
        timm_knapsack.errors.KnapsackError: Bilinear takes 2 inputs (input1, input2), and images are one; ...
    """
    model = bare(model)
    needed = inputs_of(model)
    if len(needed) > 1:
        raise KnapsackError(
            f"{type(model).__name__} takes {len(needed)} inputs ({', '.join(needed)}), and images are one; put it into "
            "a module whose forward makes them of one tensor, or prune it by scores alone: "
            "prune(model, scores=taylor_scores(model, groups, loader, loss_fn=…), groups=groups, budget=…)"
        )
    return in_full_precision(model)


def inputs_of(model: nn.Module) -> list[str]:
    """Arguments of ``forward`` that have no default.

    Example:
        >>> inputs_of(nn.Linear(2, 2)), inputs_of(nn.Bilinear(2, 2, 1))
        (['input'], ['input1', 'input2'])
    """
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # compiled code does not say
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in free]


@contextmanager
def worked_on(model: nn.Module) -> Iterator[nn.Module]:
    """The network to change in the model's place; what is written to it is the model's own afterwards.

    Example:
        >>> net = nn.Linear(1, 1).half()
        >>> with worked_on(nn.DataParallel(net)) as inner, torch.no_grad():
        ...     _ = inner.weight.fill_(0.1)
        >>> inner.weight.dtype, net.weight
        (torch.float32, Parameter containing:
        tensor([[0.1000]], dtype=torch.float16, requires_grad=True))
    """
    own, work = bare(model), for_images(model)
    yield work
    if work is not own and any(tensor.dtype in NARROW for _, tensor in named_tensors(own)):
        made: dict[str, Tensor] = dict(named_tensors(work))
        with torch.no_grad():
            for name, tensor in named_tensors(own):
                tensor.copy_(made[name])
