"""Shapes of the commonest ops, worked out directly.

On the meta device torch runs most ops through Python reference implementations, which take a millisecond each; the
shapes alone take microseconds. Results are contiguous: strides decide nothing in a trace. An op or a call that is not
covered gives None, and torch's own meta kernel runs.
"""

import torch
from torch import Tensor

from .op_rules import ELEMENTWISE

_NOT_FLOAT = frozenset("eq ge gt le lt ne isfinite isinf isnan logical_and logical_not logical_or logical_xor".split())
# Ops that return something else than one tensor of the broadcast shape, or that follow a dtype argument.
_OTHER = frozenset(
    "native_dropout rrelu_with_noise _to_copy to type_as where copy copy_ expand_as lift_fresh detach alias "
    "zeros_like ones_like empty_like full_like rand_like randn_like bernoulli fill_ zero_".split()
)
_BROADCAST = frozenset(ELEMENTWISE) - _OTHER


def meta_result(op: str, args: tuple, kwargs: dict):
    """The meta result of an op, or None where torch must be asked."""
    if op in _BROADCAST:
        return _elementwise(op, args, kwargs)
    shape = _SHAPES.get(op)
    return None if shape is None or kwargs else shape(args)


def _empty(like: Tensor, shape) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _elementwise(op: str, args, kwargs):
    first = args[0]
    if not isinstance(first, Tensor):
        return None
    if op.endswith("_"):
        others = [x.shape for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor)]
        return first if all(_fits_into(shape, first.shape) for shape in others) else None
    shape, dtype = first.shape, first.dtype
    for x in (*args[1:], *kwargs.values()):
        if isinstance(x, Tensor):
            if x.shape != shape and x.dim():
                shape = torch.broadcast_shapes(shape, x.shape)
            if x.dtype != dtype:
                return None
        elif isinstance(x, float) and not dtype.is_floating_point:
            return None
    if op in _NOT_FLOAT:
        dtype = torch.bool
    elif not dtype.is_floating_point and op not in ("add", "sub", "mul", "neg", "abs", "clone", "maximum", "minimum"):
        return None
    return torch.empty(shape, dtype=dtype, device="meta")


def _fits_into(shape, whole) -> bool:
    """Whether a tensor broadcasts to this shape and not beyond."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, there) for size, there in pairs)


def _addmm(args):
    return _mm(args[1:3]) if len(args) == 3 else None


def _mm(args):
    a, b = args
    if a.shape[1] != b.shape[0]:
        return None  # torch's kernel says what is wrong
    return _empty(a, (a.shape[0], b.shape[1]))


def _bmm(args):
    a, b = args
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return None
    return _empty(a, (a.shape[0], a.shape[1], b.shape[2]))


def _layer_norm(args):
    x, shape, *vectors = args
    n = len(shape)
    if list(x.shape[-n:]) != list(shape) or any(
        isinstance(v, Tensor) and list(v.shape) != list(shape) for v in vectors
    ):
        return None
    statistics = _empty(x, (*x.shape[:-n], *[1] * n))
    return _empty(x, x.shape), statistics, statistics.clone()


def _batch_norm(args):
    x = args[0]
    if any(isinstance(v, Tensor) and v.shape != x.shape[1:2] for v in args[1:5]) or args[5]:
        return None
    return _empty(x, x.shape), _empty(x, (0,)), _empty(x, (0,))


def _convolution(args):
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if transposed or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    n = x.dim() - 2
    stride, padding, dilation = (list(v) * n if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    pixels = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return _empty(x, (x.shape[0], weight.shape[0], *pixels)) if min(pixels) > 0 else None


def _softmax(args):
    return _empty(args[0], args[0].shape)


def _mean(args):
    if len(args) < 2 or not args[1]:
        return None
    x, dims, *keep = args
    dims = {d % x.dim() for d in dims}
    keep = bool(keep and keep[0])
    return _empty(x, [1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims])


_SHAPES = {
    "addmm": _addmm,
    "mm": _mm,
    "bmm": _bmm,
    "native_layer_norm": _layer_norm,
    "native_batch_norm": _batch_norm,
    "convolution": _convolution,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "mean": _mean,
}
