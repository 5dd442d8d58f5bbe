"""Attention modules of timm with their widths left open: the same function, and one that can be narrower."""

import copy
import importlib
import importlib.util
import pickle

import pytest
import torch
from torch import nn

from timm_knapsack.slim.copying import copy_with
from timm_knapsack.slim.open_widths import OPENINGS, SCALE, _edited, open_widths, opened

DIM, HEADS, TOKENS = 16, 4, 9
TOKEN_MAP = (torch.Size([2, TOKENS, DIM]),)
IMAGE = (torch.Size([2, DIM, 4, 4]),)
CHANNELS_LAST = (torch.Size([2, 4, 4, DIM]),)

# What each class is made with, and called with: shapes of tensors, or other arguments.
CALLS = {
    "timm.layers.diff_attention.DiffAttention": ({}, TOKEN_MAP),
    "timm.layers.attention2d.MultiQueryAttention2d": ({"key_dim": 4, "value_dim": 4}, IMAGE),
    "timm.layers.attention_pool.AttentionPoolLatent": ({}, TOKEN_MAP),
    "timm.layers.attention_pool2d.AttentionPool2d": ({"feat_size": 4, "head_dim": None}, IMAGE),
    "timm.layers.attention_pool2d.RotAttentionPool2d": ({"ref_feat_size": 4, "head_dim": None}, IMAGE),
    "timm.models.beit.Attention": ({"window_size": (4, 2)}, TOKEN_MAP),
    "timm.models.coat.FactorAttnConvRelPosEnc": ({"shared_crpe": "crpe"}, (torch.Size([2, 17, DIM]), (4, 4))),
    "timm.models.convit.GPSA": ({}, (torch.Size([2, 16, DIM]),)),
    "timm.models.cpubone.ConvAttention": ({"input_dim": 60}, (torch.Size([2, 60, 8, 8]),)),
    "timm.models.davit.WindowAttention": ({"window_size": (3, 3)}, TOKEN_MAP),
    "timm.models.eva.EvaAttention": ({"scale_norm": False}, TOKEN_MAP),
    "timm.models.fastvit.Attention": ({"head_dim": DIM // HEADS}, IMAGE),
    "timm.models.gcvit.WindowAttentionGlobal": ({"window_size": (3, 3), "use_global": False}, TOKEN_MAP),
    "timm.models.hiera.MaskUnitAttention": ({"dim_out": DIM, "heads": HEADS, "q_stride": 1}, TOKEN_MAP),
    "timm.models.hieradet_sam2.MultiScaleAttention": ({"dim_out": DIM}, CHANNELS_LAST),
    "timm.models.iformer.SHMA": ({}, IMAGE),
    "timm.models.lowformer.ConvAttention": ({"input_dim": 60}, (torch.Size([2, 60, 8, 8]),)),
    "timm.models.maxxvit.Attention2d": ({"dim_head": DIM // HEADS}, IMAGE),
    "timm.models.maxxvit.AttentionCl": ({"dim_head": DIM // HEADS}, CHANNELS_LAST),
    "timm.models.metaformer.Attention": ({"head_dim": DIM // HEADS}, TOKEN_MAP),
    "timm.models.nest.Attention": ({}, CHANNELS_LAST),
    "timm.models.nextvit.EfficientAttention": ({"head_dim": DIM // HEADS}, TOKEN_MAP),
    "timm.models.pvt_v2.Attention": ({}, (torch.Size([2, TOKENS, DIM]), (3, 3))),
    "timm.models.swin_transformer.WindowAttention": ({"window_size": 3}, TOKEN_MAP),
    "timm.models.swin_transformer_v2.WindowAttention": ({"window_size": (3, 3)}, TOKEN_MAP),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": ({"window_size": (3, 3)}, TOKEN_MAP),
    "timm.models.tiny_vit.Attention": ({"key_dim": DIM // HEADS, "resolution": (3, 3)}, TOKEN_MAP),
    "timm.models.twins.GlobalSubSampleAttn": ({}, (torch.Size([2, TOKENS, DIM]), (3, 3))),
    "timm.models.twins.LocallyGroupedAttn": ({"ws": 2}, (torch.Size([2, TOKENS, DIM]), (3, 3))),
    "timm.models.vision_transformer_sam.Attention": ({}, CHANNELS_LAST),
    "timm.models.visformer.Attention": ({}, IMAGE),
    "timm.models.volo.Attention": ({}, CHANNELS_LAST),
    "timm.models.volo.OutlookAttention": ({"kernel_size": 3, "padding": 1, "stride": 2}, CHANNELS_LAST),
}
# Older versions of timm have not all of the modules.
THERE = [path for path in OPENINGS if importlib.util.find_spec(path.rpartition(".")[0])]
WITHOUT_NUM_HEADS = ("cpubone", "fastvit", "hiera.", "iformer", "lowformer", "maxxvit", "metaformer", "nextvit")


def class_of(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def made(path):
    """A small module of the class with random weights, in float64, and what to call it with."""
    kind = class_of(path)
    given, inputs = CALLS.get(path, ({}, TOKEN_MAP))
    given = dict(given) if any(part in path for part in WITHOUT_NUM_HEADS) else {"num_heads": HEADS, **given}
    first = "in_features" if "attention_pool" in path else "dim"
    if "shared_crpe" in given:
        encoding = importlib.import_module("timm.models.coat").ConvRelPosEnc
        given["shared_crpe"] = encoding(DIM // HEADS, HEADS, {3: 1, 5: 3})
    torch.manual_seed(0)
    module = kind(**given if "input_dim" in given else {first: DIM, **given}).double()
    module.eval()  # tiny_vit's returns None
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module, [torch.randn(x, dtype=torch.float64) if isinstance(x, torch.Size) else x for x in inputs]


@pytest.mark.parametrize("path", THERE)
def test_the_same_numbers_with_open_widths(path):
    module, inputs = made(path)
    before = module(*inputs)
    slim = copy_with(module, lambda _, tensor: tensor.clone())
    assert type(slim) is not type(module) and isinstance(slim, type(module))
    torch.testing.assert_close(slim(*inputs), before, rtol=1e-12, atol=1e-12)  # head_dim ** -0.5 and 1 / sqrt: an ulp
    assert type(module).__module__.startswith("timm."), "the model itself keeps its class"


def test_a_narrow_module_runs_where_timms_own_does_not():
    module, inputs = made("timm.models.beit.Attention")
    module.num_heads, module.relative_position_bias_table = 2, None
    module.qkv.weight = nn.Parameter(module.qkv.weight.reshape(3, DIM, DIM)[:, : DIM // 2].reshape(-1, DIM))
    module.proj.weight = nn.Parameter(module.proj.weight[:, : DIM // 2])
    with pytest.raises(RuntimeError, match="shape"):
        module(*inputs)
    open_widths(module)
    assert module(*inputs).shape == inputs[0].shape


def test_the_scale_is_that_of_the_original_width():
    """Queries and keys with a zero in place of half of each head give what they give without that half."""
    module, inputs = made("timm.layers.attention.Attention")
    head, half = DIM // HEADS, DIM // HEADS // 2
    stays = torch.arange(3 * DIM).reshape(-1, head)[:, :half].reshape(-1)
    masked = copy.deepcopy(module)
    masked.qkv.weight.data[torch.arange(3 * DIM).reshape(-1, head)[:, half:].reshape(-1)] = 0
    slim = copy.deepcopy(module)
    slim.qkv.weight = nn.Parameter(module.qkv.weight[stays])
    slim.proj.weight = nn.Parameter(module.proj.weight[:, stays[: stays.numel() // 3]])
    slim.head_dim, slim.attn_dim = half, half * HEADS
    expected = masked(*inputs)
    assert not torch.allclose(slim(*inputs), expected), "timm's own scale follows the slim width"
    open_widths(slim)
    torch.testing.assert_close(slim(*inputs), expected)


def test_pickles_find_the_class():
    module, inputs = made("timm.models.eva.EvaAttention")
    open_widths(module)
    again = pickle.loads(pickle.dumps(module))
    assert type(again) is type(module)
    assert torch.equal(again(*inputs), module(*inputs))


def test_a_class_without_the_words_stays_as_it_is():
    kind = class_of("timm.models.eva.EvaAttention")
    assert _edited(kind, "forward", (SCALE, ("words that are not there", ""))) is None
    assert _edited(kind, "no_such_method", ()) is None
    assert opened(kind) is opened(kind)
