"""How labels follow each ATen op that computes something; ops that only rearrange are in ``shape_rules``.

Importing this fills the whole table, so that a rule that is registered afterwards replaces a built-in one.
"""

import re
from math import prod

from . import shape_rules  # noqa: F401  (its half of the table)
from .labels import Dim, Labels, Layout, size_of
from .op_table import RULES, freeze_all, plain, register_rule, uniform

__all__ = ["RULES", "freeze_all", "plain", "register_rule", "uniform"]

# ---- element by element ----------------------------------------------------------------------------------------

ELEMENTWISE = """
    abs abs_ acos add add_ addcdiv addcmul alias atan bitwise_and bitwise_not bitwise_or bernoulli ceil celu celu_ clamp
    clamp_ clamp_max clamp_min clamp_min_ clone copy copy_ cos cosh detach div div_ dropout elu elu_ eq erf exp exp_
    exp2 expm1 floor floor_divide fmod ge gelu gelu_ gt hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_
    hardtanh hardtanh_ isfinite isinf isnan le leaky_relu leaky_relu_ lerp lift_fresh log log10 log1p log2 log_sigmoid
    logical_and logical_not logical_or logical_xor logit lt masked_fill masked_fill_ maximum minimum mish mish_ mul
    mul_ nan_to_num native_dropout ne neg neg_ pow _prelu_kernel prelu reciprocal relu relu_ relu6 remainder round
    rrelu_with_noise rsqrt rsub selu selu_ sigmoid sigmoid_ sign silu silu_ sin sinh softplus sqrt square sub sub_ tan
    tanh tanh_ threshold threshold_ _to_copy trunc where xlogy fill_ zero_ bernoulli_ uniform_ normal_ zeros_like
    ones_like empty_like full_like rand_like randn_like fill polygamma sgn frac hypot atan2 lift_fresh_copy log_normal_
    logaddexp special_entr erfinv heaviside real contiguous to _conj type_as expand_as native_channel_shuffle_backward
    """.split()


@register_rule(*ELEMENTWISE)
def elementwise(labels, op, layouts, args, kwargs, outputs):
    inputs = [layouts(x) for x in (*args, *kwargs.values()) if layouts.is_tensor(x)]
    rank = max(len(x.dims) for x in inputs)
    dims: list[Dim] = [()] * rank
    for x in inputs:
        offset = rank - len(x.dims)
        for i, dim in enumerate(x.dims):
            dims[offset + i] = labels.tie(dims[offset + i], dim)
    if op in ("add", "add_", "sub") and sum(not x.weight for x in inputs) > 1:
        labels.added.extend(axis.labels for dim in dims for axis in dim if axis.labels is not None)
    result = Layout(dims, all(x.weight for x in inputs))
    return tuple(result for _ in outputs) if len(outputs) > 1 else result


@register_rule(
    "zeros",
    "ones",
    "full",
    "new_zeros",
    "new_ones",
    "new_full",
    "empty",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
)
def filled(labels, op, layouts, args, kwargs, outputs):
    return uniform(labels, outputs[0].shape)


@register_rule("arange", "scalar_tensor", "linspace", "eye", "rand", "randn", "randint", "randperm", "tril_indices")
def made_here(labels, op, layouts, args, kwargs, outputs):
    return plain(outputs[0].shape)


# ---- contractions: these cost MACs -----------------------------------------------------------------------------


def _heads(labels: Labels, batch: list[Dim]) -> None:
    """Batch dims of a product of activations are heads; they go one by one unless their number is tied to the input."""
    heads = [axis.labels for dim in batch for axis in dim if axis.labels is not None]
    labels.heads.extend(heads)
    if labels.only_whole_heads or not labels.bound:
        labels.whole_heads.extend(heads)


@register_rule("mm", "addmm", "bmm", "baddbmm", "addbmm_", "mv", "dot", "vdot")
def matmul(labels, op, layouts, args, kwargs, outputs):
    has_bias = op in ("addmm", "baddbmm")
    a, b = (layouts(x) for x in args[has_bias : has_bias + 2])
    batch = [labels.tie(x, y) for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True)]
    _heads(labels, batch)
    if op in ("mv", "dot", "vdot"):
        rows, columns = a.dims[:-1], []
    else:
        rows, columns = [a.dims[-2]], [b.dims[-1]]
    inner = labels.tie(a.dims[-1], b.dims[-2] if columns else b.dims[-1])
    dims = [*batch, *rows, *columns]
    if has_bias:
        bias = layouts(args[0])
        for i, dim in enumerate(bias.dims):
            position = len(dims) - len(bias.dims) + i
            dims[position] = labels.tie(dims[position], dim)
    if b.weight and columns:
        labels.make_channels(b.dims[-1], b.dims[-2])
    elif a.weight and columns:
        labels.make_channels(a.dims[-2], a.dims[-1])
    if columns:  # torch counts no products with a vector
        labels.count_macs([*batch, *rows, *columns, inner])
    return Layout(dims, a.weight and b.weight)


@register_rule("linear")
def linear(labels, op, layouts, args, kwargs, outputs):
    x, weight = layouts(args[0]), layouts(args[1])
    inner = labels.tie(x.dims[-1], weight.dims[1])
    out = weight.dims[0]
    if len(args) > 2 and args[2] is not None:
        out = labels.tie(out, layouts(args[2]).dims[0])
    labels.make_channels(weight.dims[0], weight.dims[1])
    labels.count_macs([*x.dims[:-1], out, inner])
    return Layout([*x.dims[:-1], out])


@register_rule("convolution", "_convolution")
def convolution(labels, op, layouts, args, kwargs, outputs):
    x, weight = layouts(args[0]), layouts(args[1])
    transposed, groups = args[6], args[8]
    out, into = (weight.dims[1], weight.dims[0]) if transposed else (weight.dims[0], weight.dims[1])
    pixels = plain(outputs[0].shape[2:]).dims
    if slides_along_channels(x, args) and outputs[0].shape == args[0].shape:
        labels.mix(x.dims[2])  # without a channel, others become neighbours
        pixels = [x.dims[2]]
    elif stays_in_place(args):
        pixels = x.dims[2:]
    else:
        for dim in x.dims[2:]:
            labels.freeze(dim, "a kernel or pixel position, not a channel")
    for dim in weight.dims[2:]:
        labels.freeze(dim, "a kernel or pixel position, not a channel")
    made = None
    if groups == 1:
        into = labels.tie(into, x.dims[1])
        consumed = into
    elif transposed:
        for dim in (x.dims[1], out, into):
            labels.freeze(dim, "a transposed conv with groups has no rule")
        consumed, made = into, plain(outputs[0].shape[1:2]).dims[0]
    else:
        out, consumed = _grouped(labels, x.dims[1], out, into, groups)
    if weight.weight:
        labels.make_channels(weight.dims[1 if transposed else 0], weight.dims[0 if transposed else 1])
    bias = args[2]
    channels = out if made is None else made
    if bias is not None:
        channels = labels.tie(channels, layouts(bias).dims[0])
    counted = plain(args[0].shape[2:]).dims if transposed else pixels
    labels.count_macs([x.dims[0], out, consumed, *counted], prod(args[1].shape[2:]))
    return Layout([x.dims[0], channels, *pixels])


def stays_in_place(args) -> bool:
    """A kernel of one position: what stands where pixels would be, as channels, does not meet."""
    _, weight, _, stride, padding, _, transposed = args[:7]
    return set(weight.shape[2:]) == set(stride) == {1} and set(padding) == {0} and not transposed


def slides_along_channels(x: Layout, args) -> bool:
    """ECA: a small 1-d conv over the vector of all channels, which stand where pixels would be."""
    _, weight, _, stride, _, dilation, transposed = args[:7]
    return (
        list(weight.shape[:-1]) == [1, 1]
        and list(stride) == list(dilation) == [1]
        and not transposed
        and len(x.dims[2]) == 1
    )


def _grouped(labels: Labels, x: Dim, out: Dim, into: Dim, groups: int) -> tuple[Dim, Dim]:
    """Channels of a grouped conv: whole groups may go, or the same index within each group; see Split."""
    inner_in, inner_out = size_of(x) // groups, size_of(out) // groups
    x_pieces = labels.view([x], [groups, inner_in])
    out_pieces = labels.view([out], [groups, inner_out])
    by_group = labels.tie(x_pieces[0], out_pieces[0])
    labels.use(groups, by_group, "groups")
    consumed = labels.tie(into, x_pieces[1])
    if inner_out == 1:
        return by_group, consumed
    return out, consumed


@register_rule(
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
)
def attention(labels, op, layouts, args, kwargs, outputs):
    q, k, v = (layouts(x) for x in args[:3])
    batch = [labels.tie(labels.tie(x, y), z) for x, y, z in zip(q.dims[:-2], k.dims[:-2], v.dims[:-2], strict=True)]
    _heads(labels, batch)
    inner = labels.tie(q.dims[-1], k.dims[-1])
    labels.freeze(inner, "the width of a head sets the attention's scale")
    tokens = labels.tie(k.dims[-2], v.dims[-2])
    labels.mix(tokens)
    labels.count_macs([*batch, q.dims[-2], tokens, inner])
    labels.count_macs([*batch, q.dims[-2], v.dims[-1], tokens])
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 and layouts.is_tensor(args[3]) else None)
    if mask is not None:
        for i, dim in enumerate(reversed(layouts(mask).dims)):
            labels.tie(([*batch, q.dims[-2], tokens])[-1 - i], dim)
    first = Layout([*batch, q.dims[-2], v.dims[-1]])
    return (first, *(plain(x.shape) for x in outputs[1:])) if len(outputs) > 1 else first


# ---- norms, softmax, reductions: values of different channels meet ---------------------------------------------


@register_rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "batch_norm",
    "_batch_norm_with_update",
    "_native_batch_norm_legit_functional",
)
def batch_norm(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    channels = x.dims[1]
    for vector in (v for v in args[1:5] if layouts.is_tensor(v)):
        channels = labels.tie(channels, layouts(vector).dims[0])
    if any(a is True for a in args[3:6]):  # statistics of this very batch: other labelled dims are mixed into them
        for dim in (x.dims[0], *x.dims[2:]):
            labels.mix(dim, shun=not x.weight)  # the layers beside a standardised weight may be plain
    dims = [x.dims[0], channels, *x.dims[2:]]
    rest = [Layout([channels]) if list(y.shape) == [size_of(channels)] else plain(y.shape) for y in outputs[1:]]
    return (Layout(dims, x.weight), *rest)


@register_rule("native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    dims = list(x.dims)
    count = len(args[1])
    for vector in (v for v in args[2:4] if layouts.is_tensor(v)):
        for i, dim in enumerate(layouts(vector).dims):
            dims[len(dims) - count + i] = labels.tie(dims[len(dims) - count + i], dim)
    for dim in dims[-count:]:
        labels.mix(dim)
    rest = [Layout([*dims[:-count], *[()] * count]) for _ in outputs[1:]]
    return (Layout(dims), *rest) if rest else Layout(dims)


@register_rule("native_group_norm", "group_norm")
def group_norm(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    weight, bias, groups = (args[1], args[2], args[6]) if op == "native_group_norm" else (args[2], args[3], args[1])
    channels = x.dims[1]
    for vector in (v for v in (weight, bias) if v is not None):
        channels = labels.tie(channels, layouts(vector).dims[0])
    if groups > 1:
        by_group, within = labels.view([channels], [groups, size_of(channels) // groups])
        labels.use(groups, by_group, "num_groups", "groups")
        labels.mix(within)
    labels.mix(channels, shun=groups == 1)
    return (Layout([x.dims[0], channels, *x.dims[2:]]), *(plain(y.shape) for y in outputs[1:]))


@register_rule("_weight_norm", "_weight_norm_interface")
def weight_norm(labels, op, layouts, args, kwargs, outputs):
    v, g = layouts(args[0]), layouts(args[1])
    d = (args[2] if len(args) > 2 else 0) % len(v.dims)
    dims = list(v.dims)
    dims[d] = labels.tie(dims[d], g.dims[d])
    # A filter of zeros has no direction; zeros among its inputs do not change its length.
    labels.mix(dims[d], shun=not v.weight)
    weight = Layout(dims, v.weight and g.weight)
    return (weight, Layout([dim if i == d else () for i, dim in enumerate(dims)])) if len(outputs) > 1 else weight


@register_rule(
    "_softmax", "_safe_softmax", "softmax", "_log_softmax", "log_softmax", "cumsum", "logcumsumexp", "cumprod"
)
def across(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    if op.startswith("cum") or op.startswith("logcum"):
        labels.freeze(x.dims[args[1]], "the order of the channels matters")
    labels.mix(x.dims[args[1]])
    return Layout(list(x.dims), x.weight)


REDUCTIONS = """
    mean sum amax amin var std linalg_vector_norm max min prod var_mean std_mean any all logsumexp norm argmax argmin
    aminmax median nansum
    """.split()


def reduced_dims(op: str, rank: int, args, kwargs) -> set[int]:
    """The dims that a reduction runs over."""
    position = 2 if op in ("linalg_vector_norm", "norm") else 1
    wanted = kwargs.get("dim", args[position] if len(args) > position else None)
    wanted = [wanted] if isinstance(wanted, int) else wanted
    return {d % rank for d in wanted} if wanted else set(range(rank))


@register_rule(*REDUCTIONS)
def reduction(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    if op in ("max", "min") and len(args) > 1 and layouts.is_tensor(args[1]):
        return elementwise(labels, op, layouts, args, kwargs, outputs)
    reduced = reduced_dims(op, len(x.dims), args, kwargs)
    for d in reduced:
        labels.mix(x.dims[d], shun=not x.weight)
        if op.startswith("arg"):
            labels.freeze(x.dims[d], "the position of a channel matters")
    kept = outputs[0].dim() == len(x.dims)
    dims = [() if d in reduced else dim for d, dim in enumerate(x.dims) if kept or d not in reduced]
    result = Layout(dims, x.weight)
    return tuple(result for _ in outputs) if len(outputs) > 1 else result


# ---- pixels move, channels stay ---------------------------------------------------------------------------------


@register_rule(
    "max_pool2d_with_indices",
    "avg_pool2d",
    "_adaptive_avg_pool2d",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "max_pool2d",
    "avg_pool1d",
    "avg_pool3d",
    "max_pool3d_with_indices",
    "_adaptive_avg_pool3d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "mkldnn_max_pool2d",
    "grid_sampler_2d",
)
def over_pixels(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    pixels = int(re.search(r"([123])d", op)[1])
    first = len(x.dims) - pixels
    for dim in x.dims[first:]:
        labels.freeze(dim, "a pixel position, not a channel")
    results = tuple(Layout([*x.dims[:first], *plain(y.shape[first:]).dims], x.weight) for y in outputs)
    return results if len(results) > 1 else results[0]


@register_rule("roll", "flip")
def moved(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    dims = args[2] if op == "roll" and len(args) > 2 else args[1]
    for d in [dims] if isinstance(dims, int) else dims:
        labels.freeze(x.dims[d], "channels change places")
    return Layout(list(x.dims), x.weight)


@register_rule("tril", "triu", "tril_", "triu_")
def triangle(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    for dim in x.dims[-2:]:
        labels.freeze(dim, "the order of the channels matters")
    return Layout(list(x.dims), x.weight)


@register_rule("as_strided_", "as_strided")
def restrided(labels, op, layouts, args, kwargs, outputs):
    x = layouts(args[0])
    if list(args[1]) == [size_of(dim) for dim in x.dims]:  # only a change of memory format
        return x
    for dim in x.dims:
        labels.freeze(dim, "as_strided can read memory in any order")
    return plain(outputs[0].shape)
