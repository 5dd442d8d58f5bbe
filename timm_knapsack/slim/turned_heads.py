"""Attention heads turned so that their widths come in order of weight: then a head can become narrower, not only go.

Queries and keys meet in products alone, and values reach the output through one matrix. So each head's queries may be
multiplied by any invertible matrix if its keys are by the inverse's transpose, and its values if the projection behind
them is by the inverse: the network computes the same. Here these matrices come from two singular value decompositions
for each head, of what is seen on images: width 0 then carries the most of a head's logits (q · k) and of its output,
the last one the least, and the best head of k widths is, by these measures, the first k of them. A network of few
heads, such as DeiT-Tiny with three, loses far less so than by whole heads.

Which modules can be turned is found out by values: one whose output changes (rotary embeddings, a norm of the queries,
gates) is left as it is, and loses whole heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from .channel_config import ChannelConfig
from .copying import copy_with
from .modes import eval_mode

LEAST = 1e-6  # of the largest variance: directions with less are not blown up any further
TOLERANCE = 1e-3  # of a module's largest output; float32 gives 1e-5
COMPARED = 2  # images on which the outputs of modules are compared


def turned_copy(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy whose attention heads can become narrower, and that computes the same; the model itself where none can.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> turned_copy(net, [torch.zeros(1, 2)]) is net
        True
    """
    done = turned_of(model)
    wanted = [name for name, module in model.named_modules() if _has_heads(module) and name not in done]
    if not wanted or any(tensor.is_meta for tensor in model.parameters()):
        return model
    turned, batches = copy_with(model, lambda _, tensor: tensor.detach().clone()), list(batches)
    names = {*done, *_turned(model, turned, wanted, batches)}
    with torch.no_grad(), eval_mode(model, turned):
        same = names != done and _agree(*(each(batches[0][:COMPARED]) for each in (model, turned)))
    if not same:  # weights that two modules share, say: turned for one of them, they are wrong for the other
        return model
    turned.turned_heads = tuple(sorted(names))
    return turned


def turned_of(model: nn.Module) -> frozenset[str]:
    """The modules of a network whose heads were turned, before it was pruned or after it was loaded.

    Example:
        >>> turned_of(nn.Linear(2, 2))
        frozenset()
    """
    config = getattr(model, "channel_config", None)
    saved = config.turned if isinstance(config, ChannelConfig) else ()
    return frozenset(getattr(model, "turned_heads", ()) or saved)


def _has_heads(module: nn.Module) -> bool:
    qkv, proj, heads = (getattr(module, name, None) for name in ("qkv", "proj", "num_heads"))
    linear = isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear)
    if not linear or not isinstance(heads, int) or heads < 1:
        return False
    return qkv.out_features == 3 * proj.in_features and proj.in_features % heads == 0 and proj.in_features > heads


@dataclass
class _Seen:
    """What the heads of one module see, as sums over images: [heads, width, width]."""

    heads: int
    query: Tensor | float = 0.0
    key: Tensor | float = 0.0
    value: Tensor | float = 0.0

    def add_qkv(self, output: Tensor) -> None:
        q, k, _ = output.double().reshape(len(output), -1, 3, self.heads, output.shape[-1] // 3 // self.heads).unbind(2)
        k = k - k.mean(1, keepdim=True)  # a key's mean adds the same to all logits of a query
        self.query = self.query + torch.einsum("bnhi,bnhj->hij", q, q)
        self.key = self.key + torch.einsum("bnhi,bnhj->hij", k, k)

    def add_attended(self, z: Tensor) -> None:
        z = z.double().reshape(-1, self.heads, z.shape[-1] // self.heads)
        z = z - z.mean(0)  # a bias takes the mean up
        self.value = self.value + torch.einsum("nhi,nhj->hij", z, z)


def _turned(model: nn.Module, turned: nn.Module, names: Iterable[str], batches: list[Tensor]) -> list[str]:
    """Turn these modules of the copy; those that then compute something else are put back and left out."""
    seen = _look(model, names, batches)
    calls = _calls(model, seen, batches[0][:COMPARED])
    ours, theirs = dict(turned.named_modules()), dict(model.named_modules())
    done = []
    with torch.no_grad(), eval_mode(turned):
        for name, found in calls.items():
            if len(found) != 1:  # it runs several times
                continue
            module, (args, kwargs, output) = ours[name], found[0]
            _turn(module, seen[name])
            now = module(*tree_map(_cloned, args), **tree_map(_cloned, kwargs))
            if _agree(output, now):
                done.append(name)
                continue
            for layer, own in ((module.qkv, theirs[name].qkv), (module.proj, theirs[name].proj)):
                layer.load_state_dict(own.state_dict())
    return done


def _look(model: nn.Module, names: Iterable[str], batches: list[Tensor]) -> dict[str, _Seen]:
    """What the heads of each module see on the images; modules of which that can't be told are left out."""
    modules = dict(model.named_modules())
    seen = {name: _Seen(modules[name].num_heads) for name in names}
    handles = []
    for name, sums in seen.items():
        handles += [
            modules[name].qkv.register_forward_hook(lambda _, args, output, s=sums: s.add_qkv(output)),
            modules[name].proj.register_forward_pre_hook(
                lambda _, args, kwargs, s=sums: s.add_attended(*args, *kwargs.values()), with_kwargs=True
            ),
        ]
    _run(model, batches, handles)
    whole = {n: s for n, s in seen.items() if all(isinstance(x, Tensor) for x in (s.query, s.key, s.value))}
    return {n: s for n, s in whole.items() if all(bool(x.isfinite().all()) for x in (s.query, s.key, s.value))}


def _calls(model: nn.Module, names: Iterable[str], images: Tensor) -> dict[str, list]:
    """Each module's arguments and output."""
    modules = dict(model.named_modules())
    calls: dict[str, list] = {name: [] for name in names}

    def entered(name):
        return lambda _, args, kwargs: calls[name].append([tree_map(_cloned, args), tree_map(_cloned, kwargs)])

    def left(name):
        return lambda _, args, output: calls[name][-1].append(tree_map(_cloned, output))

    handles = []
    for name in calls:
        handles.append(modules[name].register_forward_pre_hook(entered(name), with_kwargs=True))
        handles.append(modules[name].register_forward_hook(left(name)))
    _run(model, [images], handles)
    return calls


def _run(model: nn.Module, batches: list[Tensor], handles: list) -> None:
    try:
        with torch.no_grad(), eval_mode(model):
            for images in batches:
                model(images)
    finally:
        for handle in handles:
            handle.remove()


def _turn(module: nn.Module, seen: _Seen) -> None:
    """Other weights of qkv and proj for the same function, in place."""
    qkv, proj, heads = module.qkv, module.proj, module.num_heads
    width = proj.in_features // heads
    weight = qkv.weight.detach().double().reshape(3, heads, width, -1)
    bias = None if qkv.bias is None else qkv.bias.detach().double().reshape(3, heads, width)
    out = proj.weight.detach().double().reshape(-1, heads, width)
    for head in range(heads):
        q, q_inverse = _root(seen.query[head])
        k, _ = _root(seen.key[head])
        left, size, _ = torch.linalg.svd(q @ k)
        size = size.clamp_min(max(LEAST * float(size[0]), 1e-30)).sqrt()
        query = (size[:, None] * left.T) @ q_inverse
        z, z_inverse = _root(seen.value[head])
        _, _, right = torch.linalg.svd(out[:, head] @ z, full_matrices=True)
        value = right @ z_inverse
        out[:, head] = out[:, head] @ torch.linalg.inv(value)
        for part, matrix in enumerate((query, torch.linalg.inv(query).T, value)):
            weight[part, head] = matrix @ weight[part, head]
            if bias is not None:
                bias[part, head] = matrix @ bias[part, head]
    qkv.weight.copy_(weight.reshape(qkv.weight.shape))
    proj.weight.copy_(out.reshape(proj.weight.shape))
    if bias is not None:
        qkv.bias.copy_(bias.reshape(-1))


def _root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a covariance, and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(max(LEAST * float(values[-1]), 1e-30)).sqrt()
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def _cloned(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _agree(a: Any, b: Any) -> bool:
    pairs = list(zip(tree_flatten(a)[0], tree_flatten(b)[0], strict=True))
    for x, y in pairs:
        if isinstance(x, Tensor) and x.is_floating_point():
            if x.shape != y.shape or not (x - y).abs().max() <= TOLERANCE * x.abs().max().clamp_min(1e-12):
                return False
    return bool(pairs)
