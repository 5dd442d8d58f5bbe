"""The op table's second half: ops that only rearrange, cut or join dims."""

import numpy as np

from .labels import Axis, Dim, Labels, Layout, size_of
from .op_table import plain, register_rule, uniform


@register_rule(
    "view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy", "flatten", "unflatten"
)
def view(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    return Layout(labels.view(x.dims, list(outputs[0].shape)), x.weight)


@register_rule("t", "transpose", "permute", "swapaxes", "movedim", "numpy_T", "mT", "adjoint", "t_", "transpose_")
def permuted(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    order = list(range(len(x.dims)))
    if op in ("permute",):
        order = [d % len(order) for d in args[1]]
    elif op in ("t", "t_"):
        order.reverse()
    else:
        i, j = (-2, -1) if op in ("mT", "adjoint") else args[1:3]
        order[i], order[j] = order[j], order[i]
    return Layout([x.dims[d] for d in order], x.weight)


@register_rule("unsqueeze", "unsqueeze_")
def unsqueeze(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    at = args[1] % (len(x.dims) + 1)
    return Layout([*x.dims[:at], (), *x.dims[at:]], x.weight)


@register_rule("squeeze", "squeeze_")
def squeeze(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    if len(args) > 1:
        wanted = {d % len(x.dims) for d in ([args[1]] if isinstance(args[1], int) else args[1])}
    else:
        wanted = set(range(len(x.dims)))
    return Layout([dim for d, dim in enumerate(x.dims) if dim or d not in wanted], x.weight)


@register_rule("expand", "broadcast_to", "expand_copy")
def expand(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    shape = outputs[0].shape
    dims: list[Dim] = [()] * (len(shape) - len(x.dims)) + list(x.dims)
    dims = [
        dim if dim or size == 1 else labels.new_dim(size, uniform=True) for dim, size in zip(dims, shape, strict=True)
    ]
    for size, dim in zip(shape, dims, strict=True):
        labels.use(size, dim)
    return Layout(dims, x.weight)


@register_rule("repeat")
def repeat(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    counts = args[1]
    dims: list[Dim] = [()] * (len(counts) - len(x.dims)) + list(x.dims)
    result = []
    for dim, count in zip(dims, counts, strict=True):
        if count == 1:
            result.append(dim)
        elif not dim:
            result.append(labels.new_dim(count, uniform=True))
        elif all(axis.labels is None for axis in dim):
            result.append((Axis(size_of(dim) * count),))
        else:
            result.append((Axis(count, labels.new(count), uniform=True), *dim))
    return Layout(result, x.weight)


# ---- cutting ----------------------------------------------------------------------------------------------------


def cut(labels: Labels, dim: Dim, start: int, stop: int, step: int = 1) -> Dim:
    """The dim of ``x[start:stop:step]``."""
    size = len(range(start, stop, step))
    if size == size_of(dim):
        return dim
    flat = labels.flatten(dim)
    if size == 1:
        if flat is not None:
            labels.freeze((Axis(1, flat[start:stop:step]),), "one channel is picked by its position")
        return ()
    return (Axis(size) if flat is None else Axis(size, flat[start:stop:step], dim[0].uniform),)


@register_rule("slice")
def slice_rule(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    d, start, stop, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    d %= len(x.dims)
    size = size_of(x.dims[d])
    start, stop, step = slice(start, stop, step).indices(size)
    flat = labels.flatten(x.dims[d])
    dims = list(x.dims)
    labels.cuts.append(None if flat is None else flat[start:stop:step])
    dims[d] = cut(labels, x.dims[d], start, stop, step)
    if flat is not None and size_of(dims[d]) != size:
        if step != 1:
            labels.freeze((Axis(size, flat),), "every n-th channel is taken")
        for edge in {start, stop} - {0, size}:
            labels.use(edge, (Axis(edge, flat[:edge]),))
            labels.use(size - edge, (Axis(size - edge, flat[edge:]),))
    return Layout(dims, x.weight)


@register_rule("select")
def select(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    d = args[1] % len(x.dims)
    labels.freeze(x.dims[d], "one channel is picked by its position")
    return Layout([dim for i, dim in enumerate(x.dims) if i != d], x.weight)


@register_rule("unbind")
def unbind(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    d = (args[1] if len(args) > 1 else 0) % len(x.dims)
    labels.freeze(x.dims[d], "each index becomes a tensor of its own")
    return tuple(Layout([dim for i, dim in enumerate(x.dims) if i != d], x.weight) for _ in outputs)


@register_rule(
    "split",
    "unsafe_split",
    "chunk",
    "unsafe_chunk",
    "split_with_sizes",
    "unsafe_split_with_sizes",
    "split_with_sizes_copy",
    "split_copy",
    "tensor_split",
)
def split(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    d = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(x.dims)
    sizes = [y.shape[d] for y in outputs]
    dim = x.dims[d]
    labels.use(sum(sizes), dim)
    flat = labels.flatten(dim)
    ends = np.cumsum(sizes).tolist()
    labels.cuts.extend(None if flat is None else flat[end - size : end] for size, end in zip(sizes, ends, strict=True))
    if len(set(sizes)) == 1 and len(sizes) > 1 and any(axis.labels is not None for axis in dim):
        # Equal parts: the code may have computed their size from the whole, so they must shrink alike.
        parts, within = labels.view([dim], [len(sizes), sizes[0]])
        labels.freeze(parts, "each part becomes a tensor of its own")
        labels.use(sizes[0], within)
        return tuple(Layout([*x.dims[:d], within, *x.dims[d + 1 :]], x.weight) for _ in outputs)
    if flat is not None and "with_sizes" not in op:
        labels.freeze((Axis(flat.size, flat),), "cut into parts of unequal size")
    results = []
    for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        part = cut(labels, dim, end - size, end)
        labels.use(size, part, part=(i, len(sizes)))
        results.append(Layout([*x.dims[:d], part, *x.dims[d + 1 :]], x.weight))
    return tuple(results)


@register_rule("index")
def index(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    indices = list(args[1]) + [None] * (len(x.dims) - len(args[1]))
    picked = [d for d, i in enumerate(indices) if i is not None]
    for d in picked:
        labels.freeze(x.dims[d], "picked by position")
    new = plain(outputs[0].shape)
    rank = outputs[0].dim() - (len(x.dims) - len(picked))
    adjacent = picked == list(range(picked[0], picked[0] + len(picked)))
    at = picked[0] if adjacent else 0
    rest = [dim for d, dim in enumerate(x.dims) if d not in picked]
    return Layout([*rest[:at], *new.dims[at : at + rank], *rest[at:]], x.weight)


@register_rule("index_select")
def index_select(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    d = args[1] % len(x.dims)
    labels.freeze(x.dims[d], "picked by position")
    return Layout([*x.dims[:d], *plain([outputs[0].shape[d]]).dims, *x.dims[d + 1 :]], x.weight)


@register_rule("embedding")
def embedding(labels, op, layouts, args, kwargs, outputs):
    table = layouts(args[0])
    labels.freeze(table.dims[0], "picked by position")
    return Layout([*layouts(args[1]).dims, table.dims[1]])


# ---- joining ----------------------------------------------------------------------------------------------------


@register_rule("cat", "concat")
def cat(labels, op, layouts, args, kwargs, outputs):
    tensors = [x for x in args[0] if x.numel() > 0 or x.dim() > 1]
    inputs = [layouts(x) for x in tensors]
    d = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(inputs[0].dims)
    dims = list(inputs[0].dims)
    for x in inputs[1:]:
        for i in range(len(dims)):
            if i != d:
                dims[i] = labels.tie(dims[i], x.dims[i])
    parts = [x.dims[d] for x in inputs]
    flats = [labels.flatten(part) for part in parts]
    weight = all(x.weight for x in inputs)
    if all(flat is None for flat in flats):
        dims[d] = plain([outputs[0].shape[d]]).dims[0]
    elif len(inputs) == 1:
        dims[d] = parts[0]
    elif any(flat is None and size_of(part) > 0 for flat, part in zip(flats, parts, strict=True)):
        # Tokens beside tokens, or channels beside something that holds none: positions matter, nothing may go.
        for part in parts:
            labels.freeze(part, "joined with a dim that holds no channels")
        dims[d] = plain([outputs[0].shape[d]]).dims[0]
    else:
        dims[d] = (Axis(outputs[0].shape[d], np.concatenate(flats), all(part[0].uniform for part in parts)),)
    return Layout(dims, weight)


@register_rule("stack")
def stack(labels, op, layouts, args, kwargs, outputs):
    inputs = [layouts(x) for x in args[0]]
    d = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (len(inputs[0].dims) + 1)
    dims = list(inputs[0].dims)
    for x in inputs[1:]:
        dims = [labels.tie(a, b) for a, b in zip(dims, x.dims, strict=True)]
    return Layout([*dims[:d], *plain([len(inputs)]).dims, *dims[d:]], all(x.weight for x in inputs))


@register_rule("constant_pad_nd", "pad")
def pad(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    dims = list(x.dims)
    for i in range(len(args[1]) // 2):
        before, after = args[1][2 * i : 2 * i + 2]
        d = len(dims) - 1 - i
        if before == after == 0:
            continue
        flat = labels.flatten(dims[d])
        if flat is None:
            dims[d] = plain([outputs[0].shape[d]]).dims[0]
            continue
        new = [labels.new(max(before, 0)), labels.new(max(after, 0))]
        for count, padding, names in zip((before, after), new, (("pad_left",), ("pad_right",)), strict=True):
            if count > 0:
                labels.use(count, (Axis(count, padding),), *names)
        inside = flat[max(-before, 0) : flat.size - max(-after, 0)]
        dims[d] = (Axis(outputs[0].shape[d], np.concatenate([new[0], inside, new[1]])),)
    return Layout(dims, x.weight)


# ---- pixels and channels change places --------------------------------------------------------------------------


@register_rule("im2col")
def im2col(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    kernel = args[1][0] * args[1][1]
    channels = x.dims[-3] + (() if kernel == 1 else (Axis(kernel),))
    return Layout([*x.dims[:-3], channels, *plain(outputs[0].shape[-1:]).dims])


@register_rule("col2im")
def col2im(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    kernel = args[2][0] * args[2][1]
    channels, taps = labels.view([x.dims[-2]], [size_of(x.dims[-2]) // kernel, kernel])
    labels.freeze(taps, "a kernel position, not a channel")
    return Layout([*x.dims[:-2], channels, *plain(outputs[0].shape[-2:]).dims])


@register_rule("unfold")
def unfold(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    d = args[1] % len(x.dims)
    labels.freeze(x.dims[d], "sliding windows run over it")
    return Layout([*x.dims[:d], *plain([outputs[0].shape[d]]).dims, *x.dims[d + 1 :], *plain([args[2]]).dims])


@register_rule("pixel_shuffle")
def pixel_shuffle(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    channels, inside = labels.view([x.dims[-3]], [size_of(x.dims[-3]) // args[1] ** 2, args[1] ** 2])
    labels.freeze(inside, "becomes a pixel position")
    return Layout([*x.dims[:-3], channels, *plain(outputs[0].shape[-2:]).dims])


@register_rule("pixel_unshuffle")
def pixel_unshuffle(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    return Layout([*x.dims[:-3], (*x.dims[-3], Axis(args[1] ** 2)), *plain(outputs[0].shape[-2:]).dims])


@register_rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    groups, within = labels.view([x.dims[1]], [args[1], size_of(x.dims[1]) // args[1]])
    labels.freeze(groups, "shuffled with the other groups")
    return Layout([x.dims[0], (*within, *groups), *x.dims[2:]])


@register_rule("_assert_async", "_assert_scalar", "sym_size", "_local_scalar_dense")
def nothing(labels, op, layouts, args, kwargs, outputs):
    return tuple(uniform(labels, y.shape) for y in outputs)
