"""Modules that users write: shared and tied layers, einsum, other convs, norms and parametrisations, several inputs and
outputs. What can be pruned is, and the slim network computes what the masked one does."""

import pytest
import torch
from oracle import random_keep, seeded
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_flatten

import timm_knapsack as tk
from timm_knapsack.slim.cutting import mask_model

NETS = {}


def net(*shapes, frozen=("head",), **sizes):
    """Register a network with its inputs' shapes, its groups' sizes and its frozen layers."""

    def register(kind):
        NETS[kind.__name__] = (kind, shapes, {k.replace("__", "."): v for k, v in sizes.items()}, set(frozen))
        return kind

    return register


@net((1, 3, 8, 8), stem=8, between=6)
class SharedConv(nn.Module):
    """One conv called twice: what goes in is as wide as what comes out."""

    def __init__(self):
        super().__init__()
        self.stem, self.shared = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.between, self.head = nn.Conv2d(8, 6, 1), nn.Linear(6, 5)

    def forward(self, x):
        x = self.shared(self.shared(self.stem(x)).relu()).relu()
        return self.head(self.between(x).relu().mean((2, 3)))


@net((1, 3, 8, 8), stem=7, encode=6)
class TiedAutoencoder(nn.Module):
    """A decoder that is the encoder's transposed weight: one parameter, two roles."""

    def __init__(self):
        super().__init__()
        self.stem, self.encode, self.head = nn.Conv2d(3, 7, 3), nn.Linear(7, 6), nn.Linear(7, 5)

    def forward(self, x):
        x = self.stem(x).mean((2, 3))
        code = self.encode(x).relu()
        return self.head(nn.functional.linear(code, self.encode.weight.t()))


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        weight = nn.functional.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, training=True)
        return nn.functional.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1, groups=self.groups)


@net((1, 3, 8, 8), conv1=4, conv2=4, conv3=4)
class StandardisedGroups(nn.Module):
    """Weights are standardised over the channels they read: of two such convs in a row, with few large groups, one must
    not give up whole groups and the other channels within them."""

    def __init__(self):
        super().__init__()
        self.conv1 = StandardisedConv(3, 8, 3)
        self.conv2, self.conv3 = StandardisedConv(8, 8, 3, groups=2), StandardisedConv(8, 8, 3, groups=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv3(self.conv2(self.conv1(x).relu()).relu()).relu()
        return self.head(x.mean((2, 3)))


@net((1, 3, 6, 6), qkv=3)
class MultiScaleAttention(nn.Module):
    """Linear attention as EfficientViT's: heads of the map itself, and heads of what a conv with a group for each of a
    head's three parts makes of it. A head goes with the one that is made of it; within groups, nothing could."""

    heads, width = 3, 10

    def __init__(self):
        super().__init__()
        inner = 3 * self.heads * self.width
        self.qkv = nn.Conv2d(3, inner, 1)
        self.wider = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.mixed = nn.Conv2d(inner, inner, 1, groups=3 * self.heads)
        self.head = nn.Linear(2 * self.heads * self.width, 5)

    def forward(self, x):
        qkv = self.qkv(x)
        both = torch.cat([qkv, self.mixed(self.wider(qkv))], 1)
        q, k, v = both.reshape(len(x), -1, 3 * self.width, x[0, 0].numel()).transpose(-1, -2).chunk(3, dim=-1)
        out = q.relu() @ (k.relu().transpose(-1, -2) @ v)
        return self.head(out.transpose(-1, -2).flatten(1, 2).mean(-1))


@net((1, 3, 8, 8), stem=6)
class WidenedBetweenNorms(nn.Module):
    """A depthwise conv that makes two channels of each, as PiT's pooling does, and norms across the channels on both
    sides: each channel goes with the two that are made of it."""

    def __init__(self):
        super().__init__()
        self.stem, self.widen, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 12, 3, groups=6), nn.Linear(12, 5)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(12)

    def forward(self, x):
        x = self.norm1(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.norm2(self.widen(x).permute(0, 2, 3, 1))
        return self.head(x.mean((1, 2)))


@net((1, 6, 8), qkv=4, proj=8)
class ChannelAttention(nn.Module):
    """Attention between channels, whose module calls its heads groups."""

    def __init__(self):
        super().__init__()
        self.groups = 4
        self.qkv, self.proj, self.head = nn.Linear(8, 48), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.groups, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q.transpose(-1, -2) @ k * x.shape[1] ** -0.5).softmax(dim=-1)
        out = (attn @ v.transpose(-1, -2)).transpose(-1, -2)
        return self.head(self.proj(out.transpose(1, 2).flatten(2)).mean(1))


@net((1, 9, 4), frozen=("head",), query=6, value=7)
class EinsumProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 6), nn.Linear(4, 6)
        self.value, self.head = nn.Linear(4, 7), nn.Linear(7, 5)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = torch.einsum("bnc,bmc->bnm", q, k) * 6**-0.5
        return self.head(torch.einsum("bnm,bmd->bnd", scores.softmax(-1), v).mean(1))


@net((1, 3, 6, 6), down=6, up=7)
class UpAndDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 2, stride=2), nn.ConvTranspose2d(6, 7, 2, stride=2)
        self.norm, self.head = nn.BatchNorm2d(7), nn.Linear(7, 5)

    def forward(self, x):
        return self.head(self.norm(self.up(self.down(x).relu())).relu().mean((2, 3)))


@net((1, 3, 20), first=6, second=8)
class Signal(nn.Module):
    """Conv1d and ConvTranspose1d over a signal."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 6, 5, padding=2), nn.BatchNorm1d(6)
        self.second, self.head = nn.ConvTranspose1d(6, 8, 2, stride=2), nn.Linear(8, 5)

    def forward(self, x):
        x = self.second(self.norm(self.first(x)).relu()).relu()
        return self.head(nn.functional.adaptive_avg_pool1d(x, 1).flatten(1))


@net((1, 3, 4, 8, 8), first=6, second=8)
class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv3d(3, 6, 3, padding=1), nn.BatchNorm3d(6)
        self.depthwise = nn.Conv3d(6, 6, 3, padding=1, groups=6)
        self.second, self.head = nn.Conv3d(6, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.avg_pool3d(self.norm(self.first(x)).relu(), 2)
        return self.head(self.second(self.depthwise(x)).relu().mean((2, 3, 4)))


@net((1, 3, 4, 4), first=6, wide=5, last=7)
class SuperResolution(nn.Module):
    """PixelShuffle: four channels of the conv before it become one."""

    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 20, 3, padding=1)
        self.last, self.head = nn.Conv2d(5, 7, 3, padding=1), nn.Linear(7, 5)

    def forward(self, x):
        x = nn.functional.pixel_shuffle(self.wide(self.first(x).relu()), 2)
        return self.head(self.last(x).relu().mean((2, 3)))


@net((1, 3, 8, 8), first=4, second=9)
class Normed(nn.Module):
    """GroupNorm with four groups of three; InstanceNorm with weights and statistics of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.groups = nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12)
        self.second = nn.Conv2d(12, 9, 3)
        self.instance = nn.InstanceNorm2d(9, affine=True)
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        x = self.groups(self.first(x)).relu()
        return self.head(self.instance(self.second(x)).relu().amax((2, 3)))


@net((1, 3, 8, 8), first__parametrizations__weight=6, second__parametrizations__weight=8)
class WeightNormed(nn.Module):
    """torch.nn.utils.parametrizations.weight_norm: a direction and a length for each filter."""

    layer_norm = staticmethod(parametrizations.weight_norm)

    def __init__(self):
        super().__init__()
        self.first, self.second = self.layer_norm(nn.Conv2d(3, 6, 3)), self.layer_norm(nn.Conv2d(6, 8, 3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


@net((1, 3, 8, 8), first__parametrizations__weight=6, second__parametrizations__weight=8)
class SpectralNormed(WeightNormed):
    """In inference it divides by the product of the weight and two stored vectors, which are cut with it."""

    layer_norm = staticmethod(parametrizations.spectral_norm)


class Positive(nn.Module):
    def forward(self, weight):
        return nn.functional.softplus(weight)


@net((1, 3, 8, 8), first=6, second__parametrizations__weight=8)
class OwnParametrisation(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, 5)
        parametrize.register_parametrization(self.second, "weight", Positive())

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


@net((1, 3, 8, 8), (1, 4), image=6, table=7, joined=8)
class SeveralInputs(nn.Module):
    """An image and a row of numbers, joined."""

    def __init__(self):
        super().__init__()
        self.image, self.table = nn.Conv2d(3, 6, 3), nn.Linear(4, 7)
        self.joined, self.head = nn.Linear(13, 8), nn.Linear(8, 5)

    def forward(self, image, numbers):
        x = torch.cat([self.image(image).relu().mean((2, 3)), self.table(numbers).relu()], 1)
        return self.head(self.joined(x).relu())


@net((1, 3, 8, 8), frozen=("boxes", "classes"), stem=6, inner=7)
class DictOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 7, 3)
        self.boxes, self.classes = nn.Conv2d(7, 4, 1), nn.Linear(7, 5)

    def forward(self, x):
        x = self.inner(self.stem(x).relu()).relu()
        return {"boxes": self.boxes(x), "classes": [self.classes(x.mean((2, 3)))]}


def inputs_of(name, batch=2):
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch, *s[1:], generator=draw, dtype=torch.float64) for s in NETS[name][1])


def outputs(model, inputs):
    with torch.no_grad():
        return [y for y in tree_flatten(model(*inputs))[0] if isinstance(y, torch.Tensor)]


def groups_of(name, model):
    return tk.find_channel_groups(model, tuple(x.float()[:1] for x in inputs_of(name)))


@pytest.mark.parametrize("name", NETS)
def test_what_can_be_pruned_is(name):
    kind, _, sizes, frozen = NETS[name]
    groups = groups_of(name, seeded(kind()))
    assert {group.name: group.size for group in groups} == sizes, dict(groups.frozen)
    assert set(groups.frozen) == frozen
    assert groups.verified == "values" and not groups.verified_note


# A filter of zeros has no direction: NaN. And of channels that a LayerNorm sees there is nothing to compare.
@pytest.mark.parametrize("name", sorted(set(NETS) - {"WeightNormed", "WidenedBetweenNorms"}))
def test_slim_is_masked(name):
    model = seeded(NETS[name][0]()).double()
    groups = groups_of(name, NETS[name][0]().eval())
    keep = random_keep(groups, seed=3, only=lambda group: not group.crosses_norm)
    assert keep, "nothing to compare"
    masked, slim = mask_model(model, groups, keep), tk.slice_model(model, groups, keep)
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in model.parameters())
    for got, expected in zip(outputs(slim, inputs_of(name)), outputs(masked, inputs_of(name)), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
