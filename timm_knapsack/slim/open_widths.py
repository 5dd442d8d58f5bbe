"""timm's attention modules whose code takes a width for granted: the same code, with that width left open.

``B, N, C = x.shape … .reshape(B, N, C)`` runs only where attention is as wide as its input, and fused attention without
a ``scale`` divides by the width that a head has after pruning. Both would tie what is independent, or change what the
network computes. So each copy of a model (`copying.copy_with`) has, in place of such a module's class, a subclass whose
method is timm's own source with a few words replaced: ``-1`` for the width, ``scale=self.scale`` for the scale. At full
width it computes the same; the state dict, the module's name and ``isinstance`` stay what they are.

Where the words are not found (another version of timm) the class stays as it is, and what it ties stays tied: the
verification of `channels` has the last word either way.
"""

import inspect
import linecache
import pkgutil
import re
import sys
import textwrap
from functools import cache

from torch import nn

# What is replaced: (regular expression, replacement).
Edit = tuple[str, str]
OUT: Edit = (r"\.reshape\((\w+), (\w+), C\)", r".reshape(\1, \2, -1)")
HEADS: Edit = (r"C // self\.(num_heads|groups)", "-1")
SCALE: Edit = (r"(scaled_dot_product_attention\(\s*\w+, \w+, \w+)", r"\1, scale=self.scale")
# Where queries, keys and values are written out one per line.
SCALE_BEFORE_DROPOUT: Edit = (r"(\s)dropout_p=", r"\1scale=self.scale, dropout_p=")

# class → method → edits; each must be found.
OPENINGS: dict[str, dict[str, tuple[Edit, ...]]] = {
    "timm.layers.attention.Attention": {"forward": (SCALE,)},
    "timm.layers.attention.AttentionRope": {"forward": (SCALE,)},
    "timm.layers.attention2d.MultiQueryAttention2d": {"forward": (SCALE,)},
    "timm.layers.attention_pool.AttentionPoolLatent": {
        "forward": (SCALE, (r"self\.latent_len, C\)", "self.latent_len, -1)")),
    },
    "timm.layers.attention_pool2d.AttentionPool2d": {"forward": (SCALE,)},
    "timm.layers.attention_pool2d.RotAttentionPool2d": {"forward": (SCALE,)},
    "timm.layers.diff_attention.DiffAttention": {"forward": (SCALE, OUT)},
    "timm.models.beit.Attention": {"forward": (SCALE, OUT)},
    "timm.models.cait.ClassAttn": {"forward": (SCALE, HEADS, (r"\.reshape\(B, 1, C\)", ".reshape(B, 1, -1)"))},
    "timm.models.cait.TalkingHeadAttn": {"forward": (HEADS, OUT)},
    "timm.models.coat.FactorAttnConvRelPosEnc": {"forward": (HEADS, OUT)},
    "timm.models.convit.GPSA": {"forward": (HEADS, OUT), "get_attention": (HEADS,)},
    "timm.models.convit.MHSA": {"forward": (HEADS, OUT)},
    "timm.models.cpubone.ConvAttention": {"forward": (SCALE,)},
    "timm.models.crossvit.CrossAttention": {"forward": (HEADS, (r"\.reshape\(B, 1, C\)", ".reshape(B, 1, -1)"))},
    "timm.models.davit.ChannelAttention": {"forward": (HEADS, OUT)},
    "timm.models.davit.ChannelAttentionV2": {"forward": (HEADS, OUT)},
    "timm.models.davit.WindowAttention": {"forward": (SCALE, HEADS, OUT)},
    "timm.models.edgenext.CrossCovarianceAttn": {"forward": (OUT,)},
    "timm.models.eva.EvaAttention": {"forward": (SCALE, OUT)},
    "timm.models.fastvit.Attention": {"forward": (SCALE, OUT)},
    "timm.models.gcvit.WindowAttentionGlobal": {"forward": (OUT,)},
    "timm.models.hiera.MaskUnitAttention": {"forward": (SCALE, (r"self\.dim_out\)", "self.heads * self.head_dim)"))},
    "timm.models.hieradet_sam2.MultiScaleAttention": {"forward": (SCALE,)},
    "timm.models.iformer.SHMA": {"forward": (SCALE_BEFORE_DROPOUT,)},
    "timm.models.lowformer.ConvAttention": {"forward": (SCALE,)},
    "timm.models.maxxvit.Attention2d": {"forward": (SCALE_BEFORE_DROPOUT,)},
    "timm.models.maxxvit.AttentionCl": {"forward": (SCALE,)},
    "timm.models.metaformer.Attention": {"forward": (SCALE, OUT)},
    "timm.models.nest.Attention": {"forward": (SCALE, HEADS, (r"\.reshape\(B, T, N, C\)", ".reshape(B, T, N, -1)"))},
    "timm.models.nextvit.EfficientAttention": {"forward": (SCALE, OUT)},
    "timm.models.pvt_v2.Attention": {"forward": (SCALE, OUT)},
    "timm.models.swin_transformer.WindowAttention": {"forward": (SCALE,)},
    "timm.models.swin_transformer_v2.WindowAttention": {"forward": (OUT,)},
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": {"forward": (HEADS,)},
    "timm.models.tiny_vit.Attention": {"forward": (SCALE,)},
    "timm.models.twins.GlobalSubSampleAttn": {
        "forward": (
            SCALE,
            (r"\.reshape\(B, -1, 2, self\.num_heads, C // \S+\)\.", ".unflatten(-1, (2, self.num_heads, -1))."),
            HEADS,
            OUT,
        ),
    },
    "timm.models.twins.LocallyGroupedAttn": {
        "forward": (
            SCALE,
            HEADS,
            (r"self\.ws, self\.ws, C\)", "self.ws, self.ws, -1)"),
            (r"_w \* self\.ws, C\)", "_w * self.ws, -1)"),
            OUT,
        ),
    },
    "timm.models.vision_transformer.DiffParallelScalingBlock": {"forward": (SCALE, OUT)},
    "timm.models.vision_transformer.ParallelScalingBlock": {"forward": (SCALE, OUT)},
    "timm.models.vision_transformer_relpos.RelPosAttention": {"forward": (SCALE, OUT)},
    "timm.models.vision_transformer_sam.Attention": {"forward": (SCALE,)},
    "timm.models.visformer.Attention": {"forward": (SCALE_BEFORE_DROPOUT,)},
    "timm.models.volo.Attention": {"forward": (SCALE, HEADS, (r"\.reshape\(B, H, W, C\)", ".reshape(B, H, W, -1)"))},
    "timm.models.volo.OutlookAttention": {
        "forward": (HEADS, (r"C \* self\.kernel_size \* self\.kernel_size, h \* w", "-1, h * w")),
    },
    "timm.models.xcit.XCA": {"forward": (HEADS, OUT)},
}


def open_widths(model: nn.Module) -> None:
    """Give the modules of a model that take a width for granted the class that does not; in place, on a copy."""
    for module in model.modules():
        kind = type(module)
        wider = opened(kind)
        if wider is not kind:
            module.__class__ = wider


@cache
def opened(kind: type) -> type:
    """The class with its widths left open; itself where there is nothing to open, or the words are not found."""
    methods = {}
    for name, edits in OPENINGS.get(f"{kind.__module__}.{kind.__qualname__}", {}).items():
        method = _edited(kind, name, edits)
        if method is None:
            return kind
        methods[name] = method
    if not methods:
        return kind
    # Pickles find the class by __qualname__ through __getattr__ below.
    path = f"{kind.__module__}.{kind.__qualname__}".replace(".", "__")
    about = {"__module__": __name__, "__qualname__": path, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**methods, **about})


def _edited(kind: type, name: str, edits: tuple[Edit, ...]):
    try:
        source = textwrap.dedent(inspect.getsource(getattr(kind, name)))
    except (AttributeError, OSError):  # another timm, or one without its source
        return None
    for pattern, replacement in edits:
        source, count = re.subn(pattern, replacement, source)
        if not count:
            return None
    file = f"<{kind.__module__}.{kind.__qualname__}.{name} with open widths>"
    # For tracebacks, and TorchScript, which reads sources.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: dict = {}
    exec(compile(source, file, "exec"), vars(sys.modules[kind.__module__]), made)
    return made[name]


def __getattr__(name: str) -> type:
    """An opened class by its name here, for pickles that hold one."""
    module, _, kind = name.replace("__", ".").rpartition(".")
    if f"{module}.{kind}" in OPENINGS:
        return opened(pkgutil.resolve_name(f"{module}:{kind}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
