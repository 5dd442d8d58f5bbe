"""Scores from one pass over the data: each criterion's measure of weights and gradients, summed unit by unit.

E_x is over batches, weighted by their number of samples; ``per_sample=True`` is over single images.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from ..errors import DataError, ScoreError
from ..maps.batches import labelled
from ..maps.distance import class_scores
from ..slim.channel_config import model_name
from ..slim.channel_groups import ChannelGroups
from ..slim.copying import named_tensors
from ..slim.modes import eval_mode
from ..slim.wrappers import NARROW, bare, in_full_precision
from .criteria import CRITERIA, Criterion, Piece
from .scores import Scores


def taylor_scores(
    model: nn.Module,
    groups: ChannelGroups,
    loader: Iterable | None = None,
    criterion: str = "abs",
    accelerator=None,
    *,
    per_sample: bool = False,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    data: str = "",
    seed: int = 0,
    progress: bool | None = None,
) -> Scores:
    """Score every unit of every group in one pass over the data.

    The model runs in eval mode; its gradients, flags and training state are as before afterwards. Several processes
    give the numbers of one: pass an unprepared loader and the accelerator, each process takes its share of the batches.

    Args:
        loader: yields ``(images, labels)``, dicts of them, or whatever ``loss_fn`` takes; labels are class indices or
            soft targets.
        criterion: abs, sum, taylor_bn, magnitude, random, or one that `register_criterion` added.
        per_sample: take the expectation over single images instead of batches: exact, and slower.
        loss_fn: ``loss_fn(model, batch) -> scalar``, instead of cross entropy.
        data: a description of the data, kept with the scores.
        progress: show a bar; by default on a terminal.

    Example:
        >>> groups = find_channel_groups(model)
        >>> scores = taylor_scores(model, groups, loader)
        >>> scores["layer1.0.conv1"].shape
        torch.Size([16])
    """
    rule = CRITERIA.find(criterion)
    if rule.curves is not None:
        raise ScoreError(f"criterion {criterion!r} gives no score for single channels: use value_curves")
    model = in_full_precision(bare(model))
    about = {"criterion": criterion, "model": model_name(model), "data": data}
    if rule.needs_data and loader is None:
        raise ScoreError(f"criterion {criterion!r} needs data: pass a loader of (images, labels) batches")
    if rule.compute is not None:
        return Scores(rule.compute(model, groups, loader, seed), **about).checked(groups)
    pieces = rule.pieces(model, groups)
    sums = _Sums(groups, pieces, rule)
    if not rule.needs_gradients:
        with torch.no_grad():
            return Scores(sums.of_weights(dict(named_tensors(model))), **about)
    loss_fn = loss_fn or _cross_entropy
    with _only(model, [piece.param for piece in pieces]) as parameters:
        samples = _accumulate(model, parameters, sums, loader, accelerator, per_sample, loss_fn, progress)
    if samples == 0:
        raise ScoreError("the loader gave no batch; scores need at least one image")
    values = {name: total / samples for name, total in sums.totals.items()}
    for name, total in values.items():
        if not torch.isfinite(total).all():
            raise ScoreError(f"the scores of {name!r} are not finite; is the loss finite on this data?")
    return Scores(values, **about, samples=samples)


class _Sums:
    """Adds up a criterion's measure over the slices of each unit, in float64."""

    def __init__(self, groups: ChannelGroups, pieces: list[Piece], criterion: Criterion):
        self.criterion = criterion
        self.by_param: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self.by_param[piece.param].append(piece)
        self.totals = {group.name: torch.zeros(group.size, dtype=torch.float64) for group in groups}

    def per_index(self, param: str, weight: Tensor, gradient: Tensor | None) -> dict[int, Tensor]:
        """The measure summed over all but one dim, for each dim that counts."""
        dims = {piece.dim for piece in self.by_param[param]}
        whole = self.criterion.measure(weight, gradient)
        return {d: whole.sum([i for i in range(whole.dim()) if i != d]) if whole.dim() > 1 else whole for d in dims}

    def of_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums without any data."""
        self.add({param: self.per_index(param, tensors[param].detach(), None) for param in self.by_param}, 1)
        return self.totals

    def add(self, values: Mapping[str, Mapping[int, Tensor]], samples: float) -> None:
        inside: dict[tuple[str, str], Tensor] = {}
        for param, pieces in self.by_param.items():
            for piece in pieces:
                units = values[param][piece.dim].to("cpu", torch.float64)[piece.index].sum(1)
                key = (piece.group, piece.key)
                inside[key] = inside[key] + units if key in inside else units
        for (group, _), units in inside.items():
            self.totals[group] += self.criterion.reduction(units) * samples


# ---- the pass -------------------------------------------------------------------------------------------------


def _cross_entropy(model: nn.Module, batch) -> Tensor:
    output = model(batch[0])
    return F.cross_entropy(output[0] if isinstance(output, (tuple, list)) else class_scores(output), batch[1])


def _labelled(batch) -> tuple[Tensor, Tensor]:
    try:
        images, labels = labelled(batch)
    except DataError as error:
        raise ScoreError(f"{error}; for others pass loss_fn=lambda model, batch: …") from None
    if not labels.is_floating_point() and labels.numel() and int(labels.min()) < 0:
        raise ScoreError("the data has no labels; scores need labelled images, or a loss_fn that needs none")
    return images, labels


@contextmanager
def _only(model: nn.Module, names: list[str]):
    """Eval mode and gradients for these parameters alone; everything is put back afterwards."""
    wanted = set(names)
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in wanted}
    try:
        for parameter, _ in required:
            parameter.requires_grad_(False)
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with eval_mode(model):
            yield parameters
    finally:
        for parameter, flag in required:
            parameter.requires_grad_(flag)


def _accumulate(model, parameters, sums, loader, accelerator, per_sample, loss_fn, progress) -> int:
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    device = next(iter(parameters.values())).device
    add = _add_each_sample if per_sample else _add_batch
    samples = 0
    for batch in _with_progress(_share(loader, rank, world), progress if rank == 0 else False):
        batch = _map_tensors(lambda x: x.to(device).float() if x.dtype in NARROW else x.to(device), batch)
        if loss_fn is _cross_entropy:
            batch = _labelled(batch)
        n = _batch_size(batch)
        try:
            add(model, parameters, sums, batch, n, loss_fn)
        except IndexError as error:  # what cross entropy raises for a label beyond the classes
            raise ScoreError(f"the labels do not fit the model's classes: {error}") from None
        samples += n
    if world > 1:
        device = accelerator.device
        counted = accelerator.reduce(torch.tensor([samples], dtype=torch.float64, device=device), reduction="sum")
        for name, total in sums.totals.items():
            sums.totals[name] = accelerator.reduce(total.to(device), reduction="sum").cpu()
        samples = round(counted.item())
    return samples


def _share(loader: Iterable, rank: int, world: int) -> Iterable:
    """Every world-th batch. Accelerate's own sharding would pad the last round and count some samples twice."""
    if getattr(loader, "_is_accelerate_prepared", False) and world > 1:
        raise ScoreError(
            "this loader was prepared by Accelerate, which may repeat samples to even out the processes; "
            "pass the loader as it was before accelerator.prepare"
        )
    sampler = getattr(loader, "batch_sampler", None)
    if world > 1 and sampler is not None and isinstance(loader, torch.utils.data.DataLoader):
        batches = [batch for i, batch in enumerate(sampler) if i % world == rank]
        return torch.utils.data.DataLoader(
            loader.dataset, batch_sampler=batches, num_workers=loader.num_workers, collate_fn=loader.collate_fn
        )
    return (batch for i, batch in enumerate(loader) if i % world == rank)


def _add_batch(model, parameters, sums, batch, n, loss_fn) -> None:
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss_fn(model, batch), list(parameters.values()), allow_unused=True)
    with torch.no_grad():
        values = {}
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            values[name] = sums.per_index(name, parameter.detach(), gradient)
        sums.add(values, n)


def _add_each_sample(model, parameters, sums, batch, n, loss_fn) -> None:
    """Per-image gradients: vectorised with torch.func where the model allows it, one by one where it does not."""
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    state = {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}

    def loss_of(weights, sample):
        def call(*args, **kwargs):
            return functional_call(model, {**state, **weights}, args, kwargs)

        return loss_fn(call, _map_tensors(lambda x: x.unsqueeze(0), sample))

    def measured(sample):
        gradients = grad(loss_of)(weights, sample)
        return {name: sums.per_index(name, weights[name], gradients[name]) for name in weights}

    chunk = max(1, min(n, 2**27 // max(1, sum(w.numel() for w in weights.values()))))  # at most 512 MB of gradients
    try:
        values = vmap(measured, chunk_size=chunk)(tuple(batch) if isinstance(batch, list) else batch)
    except RuntimeError:  # an op without a batching rule, or code that looks at values: the same numbers, one by one
        for i in range(n):
            sample = _map_tensors(lambda x, i=i: x[i : i + 1], batch)
            _add_batch(model, parameters, sums, sample, 1, loss_fn)
        return
    for i in range(n):
        sums.add({param: {dim: v[i] for dim, v in dims.items()} for param, dims in values.items()}, 1)


def _map_tensors(function, batch):
    return torch.utils._pytree.tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, batch)


def _batch_size(batch) -> int:
    tensors = [x for x in torch.utils._pytree.tree_flatten(batch)[0] if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        raise ScoreError(f"a batch of type {type(batch).__name__} holds no tensors; the loader must give tensors")
    return tensors[0].shape[0]


def _with_progress(batches: Iterable, progress: bool | None) -> Iterable:
    if progress is None:
        progress = sys.stderr.isatty()
    if not progress:
        yield from batches
        return
    from rich.console import Console
    from rich.progress import track

    total = len(batches) if hasattr(batches, "__len__") else math.inf
    console = Console(stderr=True)
    yield from track(batches, "scoring channels", total=None if total is math.inf else total, console=console)
