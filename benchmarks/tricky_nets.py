"""A grammar of small networks whose code does something with channels that shapes alone don't show.

`tricky_net(seed)` draws one: a stem, one to three tricks in a row (cuts at literal places, shuffles, arithmetic on
widths, in-place ops on parts, attention, norms, hooks, …, and those of ``nasty_nets``), ordinary layers between them,
and a head. A trick may stand in a skip connection, beside a conv whose channels are joined to its own, or under a gate.
Some tricks can be pruned through, others must be frozen; which is which is not said here: the oracle decides.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.nasty_nets import NASTY, WIDTH

IMAGE = (1, 3, 6, 6)
WIDTHS = (8, 12, 16)
TRICKS: dict[str, type[nn.Module]] = {}


def trick(kind: type[nn.Module]) -> type[nn.Module]:
    TRICKS[kind.__name__] = kind
    return kind


class Trick(nn.Module):
    """Maps [B, width, H, W] to the same shape. ``draw`` chooses among its variants.

    ``combines`` names the variants in which values of different channels meet other than in a product with weights:
    there, zero is not the same as removed.
    """

    combines: tuple = ()

    def __init__(self, width: int, draw: random.Random):
        super().__init__()
        self.build(width, draw)

    def build(self, width: int, draw: random.Random) -> None:
        """Most tricks have a variant, some have layers."""

    @property
    def zero_is_removed(self) -> bool:
        return getattr(self, "_variant", None) not in self.combines


def pick(module: nn.Module, draw: random.Random, *variants) -> None:
    """Choose how the module runs; kept in a private attribute, so that no rule takes it for a number."""
    module._variant = draw.choice(variants)


# ---- cuts at literal places ---------------------------------------------------------------------------------------


@trick
class LiteralTail(Trick):
    """The code holds the place of the cut: ``x[:, 8:]``."""

    combines = ("mean",)

    def build(self, width, draw):
        self._at = draw.choice([1, 2, width // 4, width // 2, width - 2, width - 1, -2, -(width // 2)])
        ways = "negated", "in place", "assigned", "gated", "gated tail", "mean", "rolled", "doubled", "added", "dropped"
        pick(self, draw, *ways)

    def forward(self, x):
        head, tail = x[:, : self._at], x[:, self._at :]
        match self._variant:
            case "negated":
                return torch.cat([head, -tail], 1)
            case "in place":
                x = x.clone()
                x[:, self._at :].mul_(-1)
                return x
            case "assigned":
                x = x.clone()
                x[:, self._at :] = tail.flip(2)
                return x
            case "gated":
                return torch.cat([head * head.sigmoid(), tail], 1)
            case "gated tail":
                return torch.cat([head, tail * tail.sigmoid()], 1)
            case "mean":
                return x * (1 + tail.mean(1, keepdim=True))
            case "rolled":
                return torch.cat([head, tail.roll(1, 3)], 1)
            case "doubled":
                return torch.cat([head * 2, tail], 1)
            case "added":
                x = x.clone()
                x[:, self._at :] += 0.5
                return x
            case "dropped":
                return F.pad(tail, (0, 0, 0, 0, x.shape[1] - tail.shape[1], 0))


@trick
class AddsToTail(Trick):
    """A conv makes as many channels as the tail has."""

    def build(self, width, draw):
        self._at = draw.choice([2, width // 2, width - 2])
        self.side = nn.Conv2d(width, width - self._at, 1)

    def forward(self, x):
        y = x.clone()
        y[:, self._at :] += self.side(x)
        return y


@trick
class LiteralSplit(Trick):
    combines = ("summed",)

    def build(self, width, draw):
        self._part = draw.choice([2, 4, width // 2])
        pick(self, draw, "weighted", "reversed", "first", "summed")

    def forward(self, x):
        parts = x.split(self._part, 1)
        match self._variant:
            case "weighted":
                return torch.cat([(i + 1) * part for i, part in enumerate(parts)], 1)
            case "reversed":
                return torch.cat(parts[::-1], 1)
            case "first":
                return torch.cat([parts[0].relu(), *parts[1:]], 1)
            case "summed":
                return x + sum(part.mean(1, keepdim=True) * (i + 1) for i, part in enumerate(parts))


@trick
class Chunks(Trick):
    """Parts whose size follows the width."""

    def build(self, width, draw):
        self._parts = draw.choice([2, 4])
        pick(self, draw, "gated", "swapped", "weighted")

    def forward(self, x):
        parts = x.chunk(self._parts, 1)
        match self._variant:
            case "gated":
                return torch.cat([parts[0] * parts[1].sigmoid(), *parts[1:]], 1)
            case "swapped":
                return torch.cat(parts[::-1], 1)
            case "weighted":
                return torch.cat([part * (i + 1) for i, part in enumerate(parts)], 1)


@trick
class Half(Trick):
    """The place of the cut is calculated from the width."""

    def build(self, width, draw):
        pick(self, draw, 2, 3, 4)

    def forward(self, x):
        at = x.shape[1] // self._variant
        return torch.cat([x[:, :at] * 2, x[:, at:]], 1)


@trick
class Picked(Trick):
    combines = ("one", "list", "sorted")

    def build(self, width, draw):
        self._index = draw.randrange(width)
        pick(self, draw, "one", "every other", "list", "flipped", "sorted", "rolled")

    def forward(self, x):
        match self._variant:
            case "one":
                return x * x[:, self._index].unsqueeze(1)
            case "every other":
                y = x.clone()
                y[:, ::2] *= 2
                return y
            case "list":
                return x + x[:, [0, self._index]].sum(1, keepdim=True)
            case "flipped":
                return x + x.flip(1)
            case "sorted":
                return x.sort(1).values
            case "rolled":
                return x + x.roll(1, 1)


# ---- views ----------------------------------------------------------------------------------------------------------


@trick
class Shuffle(Trick):
    """Channel shuffles, square ones among them; one of the two factors is literal, or neither."""

    def build(self, width, draw):
        self._groups = draw.choice([n for n in (2, 3, 4, width // 2) if width % n == 0])
        self._width = width
        pick(self, draw, "groups", "within", "both", "torch")

    def forward(self, x):
        batch, channels, height, width = x.shape
        match self._variant:
            case "groups":
                x = x.view(batch, self._groups, channels // self._groups, height, width)
            case "within":
                x = x.view(batch, -1, self._groups, height, width)
            case "both":
                x = x.view(batch, self._groups, self._width // self._groups, height, width)
            case "torch":
                return F.channel_shuffle(x, self._groups)
        return x.transpose(1, 2).reshape(batch, -1, height, width)


@trick
class GroupsOfChannels(Trick):
    combines = ("maximum", "normalised", "first")

    def build(self, width, draw):
        self._groups = draw.choice([2, 4])
        pick(self, draw, "weighted", "maximum", "normalised", "first")

    def forward(self, x):
        y = x.view(x.shape[0], self._groups, -1, *x.shape[2:])
        match self._variant:
            case "weighted":
                y = y * torch.arange(1.0, 1 + self._groups, dtype=x.dtype, device=x.device).view(1, -1, 1, 1, 1)
            case "maximum":
                y = y + y.amax(1, keepdim=True)
            case "normalised":
                y = y / (1 + y.square().mean(2, keepdim=True).sqrt())
            case "first":
                y = y * y[:, :1]
        return y.reshape(x.shape)


# ---- arithmetic on widths -----------------------------------------------------------------------------------------


@trick
class WidthAsNumber(Trick):
    combines = ("sum", "filled")  # what is added to all channels alike, a norm over them takes away again

    def build(self, width, draw):
        self.width = width
        pick(self, draw, "scale", "exactly", "more than", "odd", "attribute", "filled", "sum", "numel")

    def forward(self, x):
        match self._variant:
            case "scale":
                return x * x.shape[1] ** -0.5
            case "exactly":
                return x * 2 if x.shape[1] == self.width else x
            case "more than":
                return x * 2 if x.shape[1] > 5 else x
            case "odd":
                return x * (1 + x.shape[1] % 2)
            case "attribute":
                return x.view(x.shape[0], self.width, -1).view_as(x) / self.width
            case "filled":
                return x + torch.full((1, x.shape[1], 1, 1), x.shape[1] / 10, dtype=x.dtype, device=x.device)
            case "sum":
                return x + x.sum(1, keepdim=True) / x.shape[1]
            case "numel":
                return x * (100 / x[0].numel())


@trick
class Ramp(Trick):
    """Numbers that depend on a channel's position."""

    combines = ("cumsum",)

    def build(self, width, draw):
        pick(self, draw, "arange", "linspace", "cumsum", "eye")

    def forward(self, x):
        width, like = x.shape[1], {"dtype": x.dtype, "device": x.device}
        match self._variant:
            case "arange":
                return x * torch.arange(1, width + 1, **like).view(1, -1, 1, 1)
            case "linspace":
                return x * torch.linspace(0.5, 1.5, width, **like).view(1, -1, 1, 1)
            case "cumsum":
                return x.cumsum(1)
            case "eye":
                return F.conv2d(x, torch.eye(width, **like).view(width, width, 1, 1))


# ---- attention and norms ------------------------------------------------------------------------------------------


@trick
class Attention(Trick):
    combines = ("fused", "scaled by its width", "scaled by a number", "cosine")

    def build(self, width, draw):
        heads = draw.choice([2, 4])
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        pick(self, draw, "fused", "scaled by its width", "scaled by a number", "cosine")
        self._scale = (width // heads) ** -0.5

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        batch, count, _ = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self._variant == "fused":
            y = F.scaled_dot_product_attention(q, k, v)
        elif self._variant == "cosine":
            y = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1) @ v
        else:
            scale = q.shape[-1] ** -0.5 if self._variant == "scaled by its width" else self._scale
            y = (q @ k.transpose(-2, -1) * scale).softmax(-1) @ v
        y = self.proj(y.transpose(1, 2).reshape(batch, count, -1))
        return x + y.transpose(1, 2).reshape(x.shape)


@trick
class TorchAttention(Trick):
    combines = (True, False)

    def build(self, width, draw):
        self.attn = nn.MultiheadAttention(width, draw.choice([2, 4]), batch_first=draw.random() < 0.7)
        pick(self, draw, True, False)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        y, _ = self.attn(tokens, tokens, tokens, need_weights=self._variant)
        return x + y.transpose(1, 2).reshape(x.shape)


@trick
class Normed(Trick):
    """Norms over channels; with ``stand_in`` something that treats each channel alone, so that zero is removed."""

    stand_in = False

    def build(self, width, draw):
        kinds = {
            "layer": lambda: nn.LayerNorm(width),
            "plain layer": lambda: nn.LayerNorm(width, elementwise_affine=False),
            "rms": lambda: nn.RMSNorm(width),
            "group": lambda: nn.GroupNorm(draw.choice([1, 2, 4]), width),
            "batch": lambda: nn.BatchNorm2d(width),
            "instance": lambda: nn.InstanceNorm2d(width, affine=True),
            "softmax": lambda: nn.Softmax(1),
            "unit": nn.Identity,
        }
        self._variant = draw.choice(list(kinds))
        self.norm = kinds[self._variant]()

    def forward(self, x):
        if Normed.stand_in and self._variant not in ("batch", "instance"):  # these treat each channel alone anyway
            weight, bias = (getattr(self.norm, name, None) for name in ("weight", "bias"))
            x = x.tanh() if weight is None else x * weight.view(1, -1, 1, 1)
            return x if bias is None else x + bias.view(1, -1, 1, 1)
        if self._variant in ("layer", "plain layer", "rms"):
            return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.normalize(x, dim=1) if self._variant == "unit" else self.norm(x)


# ---- hooks and gates ----------------------------------------------------------------------------------------------


@trick
class Hooked(Trick):
    def build(self, width, draw):
        self.conv = nn.Conv2d(width, width, 1)
        at = draw.choice([2, width // 2])
        kind = draw.choice(["scale", "tail", "before", "method"])
        if kind == "scale":
            self.conv.register_forward_hook(lambda module, inputs, output: output * 0.5 + 1)
        elif kind == "tail":
            self.conv.register_forward_hook(lambda module, inputs, y: torch.cat([y[:, :at], -y[:, at:]], 1))
        elif kind == "before":
            self.conv.register_forward_pre_hook(lambda module, inputs: (inputs[0].abs(),))
        else:
            self.gain = nn.Parameter(torch.ones(width))
            self.conv.register_forward_hook(self.multiply)

    def multiply(self, module, inputs, output):
        return output * self.gain.view(1, -1, 1, 1)

    def forward(self, x):
        return self.conv(x)


@trick
class Gate(Trick):
    def build(self, width, draw):
        inner = draw.choice([3, 4])
        self.reduce, self.expand = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, draw.choice([1, width]), 1)

    def forward(self, x):
        return x * self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


# ---- ordinary layers ----------------------------------------------------------------------------------------------


@trick
class Residual(Trick):
    def build(self, width, draw):
        inner = draw.choice([5, 6, width])
        self.first, self.norm = nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner)
        self.second = nn.Conv2d(inner, width, 1)

    def forward(self, x):
        return x + self.second(self.norm(self.first(x)).relu())


@trick
class GroupedConv(Trick):
    def build(self, width, draw):
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=draw.choice([2, 4, width]))

    def forward(self, x):
        return self.conv(x)


# Written for maps of 6 × 6 pixels that they leave so, and not random: what may stand anywhere in a network.
OTHER_PIXELS = {"transposed_conv_with_groups", "pixels_shuffled_up", "pixels_shuffled_down", "flattened_into_a_linear"}
ANYWHERE = [name for name in NASTY if name not in OTHER_PIXELS | {"dropout_that_is_always_on"}]


@trick
class HandWritten(Trick):
    """One of ``nasty_nets``, between convs that bring the width it was written for, and the network's own again."""

    zero_is_removed = False  # many combine channels

    def build(self, width, draw):
        self._variant = draw.choice(ANYWHERE)
        owns, self._does = NASTY[self._variant]
        owns(self)
        self.eval()
        with torch.no_grad():
            made = self._does(self, torch.randn(2, WIDTH, 6, 6)).shape[1]
        self.into, self.out = nn.Conv2d(width, WIDTH, 1), nn.Conv2d(made, width, 1)

    def forward(self, x):
        return self.out(self._does(self, self.into(x)))


class Around(nn.Module):
    """A trick in the company that it has in real networks."""

    def __init__(self, inner: Trick, width: int, draw: random.Random):
        super().__init__()
        self.inner = inner
        pick(self, draw, "skip", "joined", "gated", "depthwise")
        self.side = nn.Conv2d(width, width if self._variant == "gated" else 6, 1)
        self.join = nn.Conv2d(width + 6, width, 1)
        self.each = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x):
        match self._variant:
            case "skip":
                return x + self.inner(x)
            case "joined":
                return self.join(torch.cat([self.inner(x), self.side(x)], 1))
            case "gated":
                return self.inner(x) * self.side(x.mean((2, 3), keepdim=True)).sigmoid()
            case "depthwise":
                return self.inner(self.each(x)).relu() + x


class TrickyNet(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        width = draw.choice(WIDTHS)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        layers = []
        for name in draw.choices(list(TRICKS), k=draw.choice([1, 2, 2, 3])):
            one = TRICKS[name](width, draw)
            layers.append(Around(one, width, draw) if draw.random() < 0.5 else one)
            if draw.random() < 0.6:
                after = draw.choice(WIDTHS)
                layers.append(nn.Conv2d(width, after, 1))
                width = after
            if draw.random() < 0.5:
                layers.append(draw.choice([nn.ReLU, nn.GELU, nn.Tanh])())
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))

    @property
    def tricks(self) -> list[Trick]:
        return [module for module in self.layers.modules() if isinstance(module, Trick)]

    def __str__(self):
        return " → ".join(
            f"{type(module).__name__}({getattr(module, '_variant', '')})"
            for module in self.layers.modules()
            if isinstance(module, Trick | Around)
        )


def tricky_net(seed: int) -> TrickyNet:
    """The network of this seed, in eval mode."""
    return TrickyNet(seed).eval()
