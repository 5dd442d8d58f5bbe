"""What a full-size network gives when some channels are zero and norms see only the others: what a slim one must give.

Setting a removed unit's weights to zero is the same as removing it, but where channels meet: a norm, a softmax or a
mean over channels counts the zeros. So a masked network runs under `SurvivorsOnly`: labels follow its ops as in any
trace, and an op that combines channels is given those that are left, by their positions in its input.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .labels import Dim
from .op_rules import REDUCTIONS, reduced_dims, slides_along_channels
from .tracing import Assumptions, Trace


class CannotFollow(Exception):
    """An op combines channels in a way that has no rule here."""

    def __init__(self, why: str, labels: np.ndarray):
        super().__init__(why)
        self.labels = labels  # the removed ones that it meets


class SurvivorsOnly(Trace):
    """A trace with values, in which ops that combine channels see those that are alive.

    Args:
        alive: for each label of a trace of the same network whether it stays.
    """

    def __init__(self, model, assuming: Assumptions, alive: np.ndarray):
        super().__init__(model, assuming, follow_maps=False)
        self.alive = alive

    def survivors(self, dim: Dim) -> Tensor | None:
        """The indices of a dim that stay; None where all do."""
        mask = np.ones(1, dtype=bool)
        for axis in dim:
            own = np.ones(axis.size, dtype=bool) if axis.labels is None else self.alive[axis.labels]
            mask = np.logical_and.outer(mask, own).reshape(-1)
        return None if mask.all() else torch.from_numpy(mask.nonzero()[0])

    def concerned(self, tensor: Tensor, dims) -> dict[int, Tensor]:
        """Of these dims of a tensor, those that have lost something, with what stays."""
        layout = self._layout(tensor).dims
        found = {d % len(layout): self.survivors(layout[d]) for d in dims}
        return {d: index for d, index in found.items() if index is not None}

    def computed(self, func, op, args, kwargs):
        combine = COMBINING.get(op)
        result = combine(self, func, op, args, kwargs) if combine is not None else None
        return func(*args, **kwargs) if result is None else result

    def attention_scale(self, query):
        super().attention_scale(query)
        stays = self.concerned(query, [-1])
        return len(stays[query.dim() - 1]) ** -0.5 if stays else None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = len(self.labels.mixed)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        op = func._schema.name.partition("::")[2]
        for mixed in self.labels.mixed[known:] if op not in COMBINING else ():
            if not self.alive[mixed].all():
                raise CannotFollow(f"{self.labels.place} combines channels in its own way", mixed[~self.alive[mixed]])
        return result


def _taken(tensor: Tensor, stays: dict[int, Tensor]) -> Tensor:
    for d, index in stays.items():
        tensor = tensor.index_select(d, index)
    return tensor


def _put_back(tensor: Tensor, stays: dict[int, Tensor], shape: torch.Size) -> Tensor:
    """The tensor in its old shape, with zeros where nothing is left."""
    for d, index in stays.items():
        wide = [*tensor.shape]
        wide[d] = shape[d]
        tensor = tensor.new_zeros(wide).index_copy_(d, index, tensor)
    return tensor


# Each takes (trace, func, op, args, kwargs) and returns what the op gives, or None where nothing it combines is gone.


def _reduced(trace: SurvivorsOnly, func, op, args, kwargs):
    if op in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return None
    stays = trace.concerned(args[0], reduced_dims(op, args[0].dim(), args, kwargs))
    return func(_taken(args[0], stays), *args[1:], **kwargs) if stays else None


def _along(trace: SurvivorsOnly, func, op, args, kwargs):
    stays = trace.concerned(args[0], [args[1]])
    if stays:
        return _put_back(func(_taken(args[0], stays), *args[1:], **kwargs), stays, args[0].shape)
    return None


def _layer_norm(trace: SurvivorsOnly, func, op, args, kwargs):
    x, normalized = args[0], args[1]
    first = x.dim() - len(normalized)
    stays = trace.concerned(x, range(first, x.dim()))
    if not stays:
        return None
    inner = {d - first: index for d, index in stays.items()}
    kept = _taken(x, stays)
    rest = (_taken(v, inner) if isinstance(v, Tensor) else v for v in args[2:])
    result = func(kept, list(kept.shape[first:]), *rest, **kwargs)
    y, *statistics = result if isinstance(result, tuple) else (result,)
    y = _put_back(y, stays, x.shape)
    return (y, *statistics) if isinstance(result, tuple) else y


def _group_norm(trace: SurvivorsOnly, func, op, args, kwargs):
    x, weight, bias, batch, _, pixels, groups, *rest = args
    stays = trace.concerned(x, [1])
    if not stays:
        return None
    left = torch.bincount(stays[1] // (x.shape[1] // groups), minlength=groups)
    if len(left[left > 0].unique()) != 1:
        what = "unequal groups are left" if left.any() else "none of its groups is left"
        raise CannotFollow(f"{trace.labels.place}: {what}", np.concatenate(_removed(trace, x, 1)))
    kept = _taken(x, stays)
    vectors = (v if v is None else v.index_select(0, stays[1]) for v in (weight, bias))
    y, *_ = func(kept, *vectors, batch, kept.shape[1], pixels, int((left > 0).sum()), *rest)
    statistics = [x.new_zeros(batch, groups) for _ in range(2)]  # nobody asks for them in inference
    return (_put_back(y, stays, x.shape), *statistics)


def _removed(trace: SurvivorsOnly, x: Tensor, d: int) -> list[np.ndarray]:
    labels = [axis.labels for axis in trace._layout(x).dims[d] if axis.labels is not None]
    return [own[~trace.alive[own]] for own in labels]


def _batch_norm(trace: SurvivorsOnly, func, op, args, kwargs):
    """With statistics of the batch itself, as where weights are standardised."""
    x = args[0]
    stays = trace.concerned(x, [0, *range(2, x.dim())]) if any(a is True for a in args[3:6]) else None
    if not stays:
        return None
    y, *statistics = func(_taken(x, stays), *args[1:], **kwargs)
    return (_put_back(y, stays, x.shape), *statistics)


def _weight_norm(trace: SurvivorsOnly, func, op, args, kwargs):
    """A filter that is gone has no direction."""
    v, g, *dim = args
    d = (dim[0] if dim else 0) % v.dim()
    stays = trace.concerned(v, [d])
    if not stays:
        return None
    result = func(_taken(v, stays), _taken(g, stays), *dim, **kwargs)
    if isinstance(result, tuple):
        return tuple(_put_back(y, stays, x.shape) for y, x in zip(result, (v, g), strict=True))
    return _put_back(result, stays, v.shape)


def _convolution(trace: SurvivorsOnly, func, op, args, kwargs):
    x = args[0]
    if x.dim() != 3 or not slides_along_channels(trace._layout(x), args):
        return None
    stays = trace.concerned(x, [2])
    return _put_back(func(_taken(x, stays), *args[1:]), stays, x.shape) if stays else None


def _product(trace: SurvivorsOnly, func, op, args, kwargs):
    """A product of two activations sums over channels that no weight sets to zero."""
    at = int(op in ("addmm", "baddbmm"))
    a, b = args[at : at + 2]
    if trace._layout(a).weight or trace._layout(b).weight:
        return None
    stays = trace.concerned(a, [-1])
    if not stays:
        return None
    second = {(b.dim() - 2 if b.dim() > 1 else 0): index for index in stays.values()}
    return func(*args[:at], _taken(a, stays), _taken(b, second), *args[at + 2 :], **kwargs)


COMBINING: dict[str, Callable] = {
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys("_softmax _safe_softmax softmax _log_softmax log_softmax".split(), _along),
    **dict.fromkeys("native_layer_norm rms_norm _fused_rms_norm".split(), _layer_norm),
    "native_group_norm": _group_norm,
    **dict.fromkeys("native_batch_norm _native_batch_norm_legit batch_norm".split(), _batch_norm),
    **dict.fromkeys("_weight_norm _weight_norm_interface".split(), _weight_norm),
    "convolution": _convolution,
    **dict.fromkeys("mm addmm bmm baddbmm mv dot vdot".split(), _product),
}
