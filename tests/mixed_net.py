"""A small network with every kind of group, for the tests of scores and of pruning."""

import torch
from torch import nn

import timm_knapsack as tk

CLASSES = 4


class Mixed(nn.Module):
    """A residual stream (6), a plain conv inside it (8), and a grouped conv of 2 × 4 channels fed by another conv."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.inner, self.bn1 = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.outer, self.bn2 = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.before, self.bn3 = nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8)
        self.grouped, self.bn4 = nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.bn0(self.stem(x)).relu()
        x = (x + self.bn2(self.outer(self.bn1(self.inner(x)).relu()))).relu()
        return self.fc(self.bn4(self.grouped(self.bn3(self.before(x)).relu())).relu().mean((2, 3)))


def mixed():
    torch.manual_seed(1)
    model = Mixed()
    for module in model.modules():  # statistics and weights that are not those of a new norm
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.3), nn.init.normal_(module.bias, 0, 0.3)
            nn.init.normal_(module.running_mean, 0, 0.1), nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def mixed_groups(model):
    return tk.find_channel_groups(model, torch.empty(1, 3, 8, 8, dtype=model.fc.weight.dtype))


def batches_of(count=14, size=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 3, 8, 8, generator=generator, dtype=dtype)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return list(zip(images.split(size), labels.split(size), strict=True))
