"""Small hand-written nets, one for each way in which channels hang together.

Each stands in ``NETS`` with the input it takes, the groups that must be found (name → number of units) and the layers
that must stay frozen. The numbers are worked out by hand from the net's code, not copied from a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 4


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    groups: Mapping[str, int]
    shape: tuple[int, ...] = (1, 3, 8, 8)
    frozen: tuple[str, ...] = ("fc",)
    crosses_norm: tuple[str, ...] = field(default=())


NETS: dict[str, Net] = {}


def net(shape=(1, 3, 8, 8), frozen=("fc",), crosses_norm=(), **groups: int):
    """Put a class into the table; ``stem=6`` expects the group ``stem``, ``a__b`` stands for ``a.b``."""

    def add(build):
        expected = {name.replace("__", "."): size for name, size in groups.items()}
        NETS[build.__name__] = Net(build, expected, shape, tuple(frozen), tuple(crosses_norm))
        return build

    return add


class Head(nn.Module):
    """Base: what a subclass's ``features`` makes of an image is pooled and classified."""

    def __init__(self, features: int):
        super().__init__()
        self.fc = nn.Linear(features, CLASSES)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


# ---- convs ------------------------------------------------------------------------------------------------------


@net(conv1=6, conv2=5)
class PlainChain(Head):
    def __init__(self):
        super().__init__(5)
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5)

    def features(self, x):
        return self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()


class Residual(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


@net(stem=6, blocks__0__conv1=8, blocks__1__conv1=5)
class SkipConnections(Head):
    def __init__(self):
        super().__init__(6)
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(Residual(6, 8), Residual(6, 5))

    def features(self, x):
        return self.blocks(self.stem(x))


@net(expand=6, project=5, multiply=7)
class Depthwise(Head):
    """A depthwise conv, and one that makes two channels of each."""

    def __init__(self):
        super().__init__(14)
        self.expand, self.depthwise = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6, padding=1)
        self.project = nn.Conv2d(6, 5, 1)
        self.multiply = nn.Conv2d(5, 7, 1)
        self.twice = nn.Conv2d(7, 14, 3, groups=7)

    def features(self, x):
        x = self.project(self.depthwise(self.expand(x)).relu())
        return self.twice(self.multiply(x).relu()).relu()


@net(before=4, grouped=4)
class FewLargeGroups(Head):
    """Two groups of four channels: the same index goes in both."""

    def __init__(self):
        super().__init__(8)
        self.before, self.grouped = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2, padding=1)

    def features(self, x):
        return self.grouped(self.before(x).relu()).relu()


@net(before=4)
class ManySmallGroups(Head):
    """Four groups of two channels: whole groups go."""

    def __init__(self):
        super().__init__(8)
        self.before, self.grouped = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=4, padding=1)

    def features(self, x):
        return self.grouped(self.before(x).relu()).relu()


@net(conv=8, gate__reduce=3)
class SqueezeExcite(Head):
    def __init__(self):
        super().__init__(8)
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.gate = nn.ModuleDict({"reduce": nn.Conv2d(8, 3, 1), "expand": nn.Conv2d(3, 8, 1)})

    def features(self, x):
        x = self.bn(self.conv(x))
        return x * self.gate["expand"](self.gate["reduce"](x.mean((2, 3), keepdim=True)).relu()).sigmoid()


@net(conv1=6, conv2=8)
class WeightStandardised(Head):
    """The weight itself is normalised per filter, as in timm's ScaledStdConv2d; the second conv is sliced as usual."""

    def __init__(self):
        super().__init__(8)
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.gain = nn.Parameter(torch.ones(6, 1, 1, 1))

    def features(self, x):
        weight = self.conv1.weight
        standardised = F.batch_norm(
            weight.reshape(1, weight.shape[0], -1), None, None, weight=self.gain.view(-1), training=True
        ).reshape_as(weight)
        return self.conv2(F.conv2d(x, standardised, self.conv1.bias).relu()).relu()


@net(stem=6, inner=10)
class LayerScale(Head):
    def __init__(self):
        super().__init__(6)
        self.stem, self.inner, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 10, 1), nn.Conv2d(10, 6, 1)
        self.gamma = nn.Parameter(torch.full((6,), 0.5))

    def features(self, x):
        x = self.stem(x)
        return x + self.out(self.inner(x).relu()) * self.gamma.view(1, -1, 1, 1)


@net(shrink=5, inner=6, frozen=("fc", "up"))
class TransposedConv(Head):
    """The first one's output meets the image: it is frozen with it."""

    def __init__(self):
        super().__init__(6)
        self.shrink, self.up = nn.Conv2d(3, 5, 2, stride=2), nn.ConvTranspose2d(5, 3, 2, stride=2)
        self.inner = nn.ConvTranspose2d(3, 6, 3)

    def features(self, x):
        return self.inner((x + self.up(self.shrink(x).relu())).relu()).relu()


@net(before=5, after=6)
class PixelShuffles(Head):
    """Four channels of one pixel become one channel of four pixels, and back."""

    def __init__(self):
        super().__init__(6)
        self.before, self.after = nn.Conv2d(3, 20, 1), nn.Conv2d(20, 6, 1)

    def features(self, x):
        x = F.pixel_shuffle(self.before(x), 2).relu()
        return self.after(F.pixel_unshuffle(x, 2)).relu()


@net(conv1=6, conv2=5)
class FlattenedHead(nn.Module):
    """Each channel owns a run of the linear layer's inputs, one for each pixel."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3, stride=2)
        self.fc = nn.Linear(5 * 2 * 2, CLASSES)

    def forward(self, x):
        return self.fc(self.conv2(self.conv1(x).relu()).relu().flatten(1))


# ---- joining and cutting ----------------------------------------------------------------------------------------


@net(stem=4, layers__0=3, layers__1=5, layers__2=2)
class DenselyJoined(Head):
    def __init__(self):
        super().__init__(14)
        self.stem = nn.Conv2d(3, 4, 3)
        self.layers = nn.ModuleList(nn.Conv2d(width, new, 3, padding=1) for width, new in ((4, 3), (7, 5), (12, 2)))
        self.norm = nn.BatchNorm2d(14)

    def features(self, x):
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)).relu())
        return self.norm(torch.cat(parts, 1))


@net(stem=6, small=4, large_in=3, large_out=5, pooled=2, join=7)
class InceptionBranches(Head):
    def __init__(self):
        super().__init__(7)
        self.stem = nn.Conv2d(3, 6, 3)
        self.small = nn.Conv2d(6, 4, 1)
        self.large_in, self.large_out = nn.Conv2d(6, 3, 1), nn.Conv2d(3, 5, 3, padding=1)
        self.pooled = nn.Conv2d(6, 2, 1)
        self.join = nn.Conv2d(11, 7, 1)

    def features(self, x):
        x = self.stem(x).relu()
        branches = [self.small(x), self.large_out(self.large_in(x).relu()), self.pooled(F.max_pool2d(x, 3, 1, 1))]
        return self.join(torch.cat(branches, 1).relu())


@net(conv=4, after=5)
class EqualChunks(Head):
    """Two halves meet, so that channel i goes with channel i + 4."""

    def __init__(self):
        super().__init__(5)
        self.conv, self.after = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 5, 1)

    def features(self, x):
        first, second = self.conv(x).chunk(2, 1)
        return self.after(first * second.sigmoid())


class SplitBySizes(Head):
    """Two parts of unequal size, cut by numbers that the module remembers."""

    def __init__(self):
        super().__init__(6)
        self.conv = nn.Conv2d(3, 8, 3)
        self.split_sizes = [3, 5]
        self.left, self.right = nn.Conv2d(3, 6, 1), nn.Conv2d(5, 6, 1)

    def features(self, x):
        left, right = torch.split(self.conv(x).relu(), self.split_sizes, dim=1)
        return self.left(left) + self.right(right)


NETS["SplitBySizes"] = Net(SplitBySizes, {"conv": 3, "conv#2": 5, "left": 6})


@net(stem=4, inner=5, join=6)
class CrossStagePartial(Head):
    """Half of the channels go through a block, the other half round it; they are joined again."""

    def __init__(self):
        super().__init__(6)
        self.half = 4
        self.stem, self.inner, self.back = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 5, 1), nn.Conv2d(5, 4, 1)
        self.join = nn.Conv2d(8, 6, 1)

    def features(self, x):
        around, through = self.stem(x).relu().split(self.half, 1)
        through = through + self.back(self.inner(through).relu())
        return self.join(torch.cat([around, through], 1))


@net(before=2, middle=4, after=5)
class ChannelShuffle(Head):
    """Channel 4g + w moves to 2w + g, and the next conv has two groups: 4 channels make a unit, for w and w + 2."""

    def __init__(self):
        super().__init__(5)
        self.before = nn.Conv2d(3, 8, 1)
        self.middle = nn.Conv2d(8, 8, 1, groups=2)
        self.after = nn.Conv2d(8, 5, 1)

    def features(self, x):
        x = self.before(x).relu()
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return self.after(self.middle(x).relu())


@net(shape=(1, 3, 4, 4), gated__0=5, embed=7)
class GatedLinearUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 7)
        self.gated = nn.ModuleList([nn.Linear(7, 10), nn.Linear(5, 7)])
        self.fc = nn.Linear(7, CLASSES)

    def forward(self, x):
        x = self.embed(x.flatten(2).transpose(1, 2))
        value, gate = self.gated[0](x).chunk(2, dim=-1)
        return self.fc((x + self.gated[1](value * F.silu(gate))).mean(1))


# ---- norms across channels --------------------------------------------------------------------------------------


@net(stem=6, inner=9, crosses_norm=("stem",))
class LayerNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 2, stride=2), nn.LayerNorm(6)
        self.inner, self.out = nn.Linear(6, 9), nn.Linear(9, 6)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1)
        x = x + self.out(F.gelu(self.inner(self.norm(x))))
        return self.fc(x.mean((1, 2)))


@net(conv1=4, conv2=6, crosses_norm=("conv1",))
class GroupNormed(Head):
    """GroupNorm over four groups of three: four whole groups are more units than three indices in each."""

    def __init__(self):
        super().__init__(6)
        self.conv1, self.norm, self.conv2 = nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.Conv2d(12, 6, 1)

    def features(self, x):
        return self.conv2(self.norm(self.conv1(x)).relu())


@net(inner=8, stem=5, crosses_norm=("inner",))
class GlobalResponseNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.out = nn.Conv2d(3, 5, 3), nn.Linear(5, 8), nn.Linear(8, 5)
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x):
        x = self.stem(x).permute(0, 2, 3, 1)
        y = F.gelu(self.inner(x))
        size = y.norm(p=2, dim=(1, 2), keepdim=True)
        response = size / (size.mean(dim=-1, keepdim=True) + 1e-6)
        x = x + self.out(y + self.scale * (y * response) + self.shift)
        return self.fc(x.mean((1, 2)))


# ---- attention --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, self.num_heads * self.head_dim))


@net(embed=8, attn__qkv=2, mlp__0=10, crosses_norm=("embed",))
class VisionTransformer(nn.Module):
    """Embedding stream, whole heads, MLP width; a class token and a position embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.position = nn.Parameter(torch.zeros(1, 5, 8))
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(8), Attention(8, 2), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.fc(x[:, 0])


class WindowAttention(nn.Module):
    """Four windows of 2 × 2 tokens with a table of relative positions, one column per head."""

    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = heads, width // heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros(9, heads))
        self.register_buffer("index", torch.arange(16).view(4, 4) % 9, persistent=False)

    def forward(self, x):
        windows, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(windows, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(4, 4, -1).permute(2, 0, 1)
        attention = ((q * self.scale) @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(windows, tokens, -1))


@net(embed=6, attn__qkv=3)
class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attn = nn.Conv2d(3, 6, 2, stride=2), WindowAttention(6, 3)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.embed(x).permute(0, 2, 3, 1)
        batch, _, _, channels = x.shape
        shifted = torch.roll(x, (-1, -1), (1, 2)).view(batch, 2, 2, 2, 2, channels)
        windows = shifted.transpose(2, 3).reshape(-1, 4, channels)
        y = self.attn(windows).view(batch, 2, 2, 2, 2, channels).transpose(2, 3).reshape(x.shape)
        return self.fc((x + torch.roll(y, (1, 1), (1, 2))).mean((1, 2)))


class ReadsWidths(nn.Module):
    """Attention whose code takes the width from its input: heads can only go with the stream, if at all."""

    def __init__(self, width, heads):
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


@net(stem=6, reduce=5, crosses_norm=("stem",))
class PatchesMerged(nn.Module):
    """Swin's way down: 2 × 2 neighbours become channels, after windows of 3 × 3 that a bias has labelled."""

    def __init__(self):
        super().__init__()
        self.stem, self.bias = nn.Conv2d(3, 6, 1), nn.Parameter(torch.randn(3, 3, 1))
        self.norm, self.reduce = nn.LayerNorm(24), nn.Linear(24, 5, bias=False)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x):
        x = self.stem(F.interpolate(x, size=(6, 6))).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        windows = x.reshape(batch, 2, 3, 2, 3, channels).transpose(2, 3) + self.bias
        x = windows.transpose(2, 3).reshape(batch, height, width, channels)
        x = x.reshape(batch, 3, 2, 3, 2, channels).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.fc(self.reduce(self.norm(x)).mean((1, 2)))


@net(embed=4, mlp__0=5)
class WidthsReadOffTheInput(nn.Module):
    """The same index of each of two heads goes, in the stream and in the heads alike."""

    def __init__(self):
        super().__init__()
        self.embed, self.attn = nn.Conv2d(3, 8, 2, stride=2), ReadsWidths(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 8))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.attn(x)
        return self.fc((x + self.mlp(x)).mean(1))


@net(stem=6, to_q=2)
class LinearAttention(Head):
    """Keys meet values first: relu(q) @ (relu(k)ᵀ @ v), two heads of three channels."""

    def __init__(self):
        super().__init__(6)
        self.stem = nn.Conv2d(3, 6, 2, stride=2)
        self.heads = 2
        self.to_q, self.to_k, self.to_v, self.back = (nn.Conv2d(6, 6, 1) for _ in range(4))

    def features(self, x):
        x = self.stem(x)
        q, k, v = (f(x).reshape(x.shape[0], self.heads, 3, -1) for f in (self.to_q, self.to_k, self.to_v))
        y = (v @ k.relu().transpose(-2, -1)) @ q.relu()
        return x + self.back(y.reshape(x.shape[0], self.heads * 3, *x.shape[2:]))


# ---- parameters that are not used plainly -----------------------------------------------------------------------


@net(embed=6, lstm=4, after=5)
class Recurrent(nn.Module):
    """Each hidden unit owns four rows of each weight; both directions have one hidden size, so they shrink alike."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Conv2d(3, 6, 4, stride=4), nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.after, self.fc = nn.Linear(8, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x, _ = self.lstm(self.embed(x).flatten(2).transpose(1, 2))
        return self.fc(self.after(x).relu().mean(1))


@net(stem=6, inner=8)
class TiedWeights(Head):
    """Two layers share one weight, another is used forwards and, transposed, backwards."""

    def __init__(self):
        super().__init__(6)
        self.stem = nn.Conv2d(3, 6, 3)
        self.first, self.second = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)
        self.second.weight = self.first.weight
        self.inner = nn.Linear(6, 8)

    def features(self, x):
        x = self.stem(x).relu()
        x = x + self.second(self.first(x).relu())
        y = self.inner(x.permute(0, 2, 3, 1)).relu()
        return x + F.linear(y, self.inner.weight.t()).permute(0, 3, 1, 2)


@net(conv=6)
class HiddenBuffer(Head):
    """Per-channel numbers in a buffer that the state dict does not hold."""

    def __init__(self):
        super().__init__(6)
        self.conv = nn.Conv2d(3, 6, 3)
        self.register_buffer("level", torch.linspace(0.5, 1.5, 6).view(1, 6, 1, 1), persistent=False)

    def features(self, x):
        return self.conv(x).relu() * self.level


class CachedBias(nn.Module):
    """Keeps what it computed for inference until the next call of train(), like LeViT's attention biases."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.cache = {}

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.cache = {}
        return self

    def forward(self, x):
        if self.training:
            return x * self.weight.exp().view(1, -1, 1, 1)
        if x.device not in self.cache:
            self.cache[x.device] = self.weight.exp().view(1, -1, 1, 1)
        return x * self.cache[x.device]


@net(conv=6)
class CachedInference(Head):
    def __init__(self):
        super().__init__(6)
        self.conv, self.bias = nn.Conv2d(3, 6, 3), CachedBias(6)

    def features(self, x):
        return self.bias(self.conv(x)).relu()


@net(conv=6)
class ReusedLayer(Head):
    """One conv runs twice, on its own output."""

    def __init__(self):
        super().__init__(6)
        self.conv, self.again = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1)

    def features(self, x):
        return self.again(self.again(self.conv(x)).relu())


@net(stem=8, inner=5, crosses_norm=("stem",))
class EfficientChannelAttention(Head):
    """A 1-d conv runs along the channels: without one of them, others become neighbours."""

    def __init__(self):
        super().__init__(8)
        self.inner, self.stem = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 8, 3)
        self.along = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def features(self, x):
        x = self.stem(self.inner(x).relu())
        gate = self.along(x.mean((2, 3)).unsqueeze(1)).sigmoid()
        return x * gate.view(x.shape[0], -1, 1, 1)


@net(conv2=5, frozen=("conv1", "fc"))
class LiteralSizes(Head):
    """The code itself holds a number of channels: nothing can repair it, so the dry run freezes the layer."""

    def __init__(self):
        super().__init__(5)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)

    def features(self, x):
        first, second = self.conv1(x).split((3, 5), 1)
        return self.conv2(torch.cat([second, first], 1).relu())


@net(conv2=5, frozen=("conv1", "fc"))
class SortedChannels(Head):
    """torch.sort has no rule: what reaches it is frozen, what comes after it is not."""

    def __init__(self):
        super().__init__(5)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)

    def features(self, x):
        return self.conv2(self.conv1(x).sort(dim=1).values).relu()


@net(frozen=("fc",))
class NothingToPrune(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Conv2d(3, CLASSES, 1)

    def forward(self, x):
        return self.fc(x)


# Convs and linears of every kind that is a matrix product of what it sees.
LAYERS = {
    "3x3": lambda: nn.Conv2d(6, 8, 3, padding=1),
    "stride": lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(6, 8, 3, dilation=2, padding=2),
    "1x1 stride": lambda: nn.Conv2d(6, 8, 1, stride=2, bias=False),
    "oblong": lambda: nn.Conv2d(6, 8, (1, 5), padding=(0, 2)),
    "same": lambda: nn.Conv2d(6, 8, (3, 4), padding="same", dilation=(2, 1)),
    "valid": lambda: nn.Conv2d(6, 8, 3, stride=2, padding="valid"),
    "groups": lambda: nn.Conv2d(6, 9, 3, padding=1, groups=3),
    "depthwise": lambda: nn.Conv2d(6, 6, 5, padding=2, groups=6),
    "linear": lambda: nn.Linear(12, 7),
}
