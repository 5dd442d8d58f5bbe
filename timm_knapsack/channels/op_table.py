"""The op table, and what rules are made with.

A rule is ``rule(labels, op, layouts, args, kwargs, outputs) -> layout or tuple of layouts``. ``layouts(x)`` gives the
`Layout` of a tensor argument; ``outputs`` are the op's real (meta) results, for their shapes. A rule ties what must
shrink together with ``labels.tie``, and freezes what it can't follow with ``labels.freeze``. An op without a rule
freezes whatever reaches it. ``docs/op_rules.md`` shows how to add one.
"""

from collections.abc import Callable

from ..errors import KnapsackError
from .labels import Axis, Labels, Layout

RULES: dict[str, Callable] = {}


def register_rule(*ops: str) -> Callable:
    """Register a rule for ATen (or custom) ops, by name without overload; a later rule replaces an earlier one.

    Example:
        >>> @register_rule("mylib::scale_channels")
        ... def scale_channels(labels, op, layouts, args, kwargs, outputs):
        ...     x, scale = layouts(args[0]), layouts(args[1])          # [B, C, H, W] and [C]
        ...     channels = labels.tie(x.dims[1], scale.dims[0])
        ...     return Layout([x.dims[0], channels, *x.dims[2:]])
    """

    def register(rule: Callable) -> Callable:
        for op in ops:
            if not isinstance(op, str) or not op:
                raise KnapsackError(f"register_rule takes op names such as 'aten::add', got {op!r}")
            RULES[op if "::" in op else f"aten::{op}"] = rule
        return rule

    return register


def plain(shape) -> Layout:
    """A layout without channels."""
    return Layout([() if size == 1 else (Axis(size),) for size in shape])


def uniform(labels: Labels, shape) -> Layout:
    """A layout of a filled tensor: the same value everywhere, so any index may go."""
    return Layout([labels.new_dim(size, uniform=True) for size in shape])


def freeze_all(labels: Labels, layouts, args, kwargs, why: str) -> None:
    """Freeze every label among the arguments."""
    for x in layouts.tensors(args, kwargs):
        for dim in layouts(x).dims:
            labels.freeze(dim, why)
