"""A small network of residual blocks of several kinds, for tests of blocks that go as a whole."""

import torch
from nets import CLASSES, Residual
from torch import nn


class TwoBranches(nn.Module):
    """A transformer's block in small: two sums, a norm before each branch, an argument that is passed along."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm1, self.mix, self.drop1 = nn.GroupNorm(1, width), nn.Conv2d(width, width, 3, padding=1), nn.Identity()
        self.norm2 = nn.GroupNorm(1, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, inner, 1), nn.GELU(), nn.Conv2d(inner, width, 1))

    def forward(self, x, scale: float = 1.0):
        x = x + self.drop1(self.mix(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Wider(nn.Module):
    """A block with a projection for a shortcut: nothing in it can go."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1)

    def forward(self, x):
        return (self.shortcut(x) + self.conv2(self.conv1(x).relu())).relu()


class PostNorm(nn.Module):
    """The norm stands behind the sum: without its branch the block is no identity."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, 7, 1), nn.Conv2d(7, width, 1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.norm(x + self.conv2(self.conv1(x).relu()))


class Blocks(nn.Module):
    """With few blocks, it is quick to try."""

    def __init__(self, few: bool = False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(8, 6), Residual(8, 5), Residual(8, 7), Wider(8, 12), Residual(12, 9))
        self.tokens = nn.ModuleList([TwoBranches(12, 16), TwoBranches(12, 10)])
        if few:
            self.blocks, self.tokens = nn.Sequential(*self.blocks[:2], self.blocks[3]), nn.ModuleList()
        self.last = PostNorm(12)
        self.fc = nn.Linear(12, CLASSES)
        self.num_classes = CLASSES

    def forward(self, x):
        x = self.blocks(self.stem(x))
        for block in self.tokens:
            x = block(x, scale=2.0)
        return self.fc(self.last(x).mean((2, 3)))


BRANCHES = [
    "blocks.0",
    "blocks.1",
    "blocks.2",
    "blocks.4",
    "tokens.0.mix",
    "tokens.0.mlp",
    "tokens.1.mix",
    "tokens.1.mlp",
]


def blocks_net(few: bool = False) -> nn.Module:
    """With statistics of BatchNorm and outputs that say something, as a trained network's do."""
    torch.manual_seed(0)
    net = Blocks(few)
    with torch.no_grad():
        for _ in range(4):
            net.train()(torch.randn(16, 3, 8, 8))
        net.eval()
        net.fc.weight.div_(net(torch.randn(16, 3, 8, 8)).std(0).mean())
    return net


def images(count: int = 32) -> list[torch.Tensor]:
    return [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(count // 8)]
