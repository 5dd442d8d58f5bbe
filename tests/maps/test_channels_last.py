"""Weights lie channels last while it computes faster so, and come back as they were."""

import pytest
import torch
from torch import nn

import timm_knapsack as tk
from timm_knapsack import DistillationConfig, FinetuneConfig, finetune
from timm_knapsack.maps.channels_last import channels_last, side_by_side
from timm_knapsack.recovery.batchnorm import reestimate_batchnorm

IMAGES = torch.randn(2, 3, 8, 8)


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def layouts(model):
    return [weight.is_contiguous() for weight in model.parameters()]


def test_weights_come_back_as_they_were_also_after_an_error():
    model = network()
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(RuntimeError), channels_last(model, None, images=IMAGES):
        assert layouts(model) == [False, True, False, True]
        raise RuntimeError
    assert all(layouts(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_model_that_lay_so_is_left_alone():
    model = network().to(memory_format=torch.channels_last)
    with channels_last(model, images=IMAGES) as layout:
        assert not layout.models and layout.format == torch.channels_last
    assert layouts(model) == [False, True, False, True]


def test_finetune_gives_back_what_it_got_and_averages_too():
    seen = []
    student, batches = network(), [(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))] * 2
    student.register_forward_hook(lambda module, *_: seen.append(layouts(module)))
    terms = DistillationConfig(kd_weight=0, ikd_weight=0)
    config = FinetuneConfig(epochs=1, lr=0.01, ema_decay=0.5, progress=False, distillation=terms)
    result = finetune(student, None, batches, batches, config)
    assert [False, True, False, True] in seen
    assert result.model is not student
    assert all(layouts(result.model)) and all(layouts(student))


class Viewed(nn.Module):
    """Looks at the layout of its maps, as most networks of tutorials do."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.linear1, self.linear2 = nn.BatchNorm2d(8), nn.Linear(8 * 16, 24), nn.Linear(24, 4)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.norm(self.conv2(self.conv1(x).relu())).relu(), 2)
        return self.linear2(self.linear1(x.view(x.size(0), -1)).relu())


class ViewedPixels(nn.Module):
    """A multilayer perceptron on pixels."""

    def __init__(self):
        super().__init__()
        self.linear1, self.linear2, self.linear3 = nn.Linear(3 * 64, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x):
        return self.linear3(self.linear2(self.linear1(x.view(-1, 3 * 64)).relu()).relu())


class ViewedLater(nn.Module):
    """Runs on images that lie channels last, and not with weights that do: its first maps are made of tokens."""

    def __init__(self):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(64, 64), nn.Linear(8 * 64, 4)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        maps = self.linear1(x.reshape(len(x), 3, 64)).reshape(len(x), 3, 8, 8)
        return self.linear2(self.conv2(self.conv1(maps).relu()).relu().view(len(x), -1))


class Strided(nn.Module):
    """Would silently read other pixels."""

    def forward(self, x):
        return x.as_strided((len(x), 64), (192, 1))


@pytest.mark.parametrize("network", [Viewed, ViewedPixels, ViewedLater])
def test_networks_that_look_at_the_layout_take_every_step(network):
    torch.manual_seed(0)
    model, batches = network().eval(), [(torch.randn(16, 3, 8, 8), torch.arange(16) % 4)] * 2
    result = tk.prune(model, batches, budget=tk.Budget(macs=0.6))
    slim = result.model
    reestimate_batchnorm(slim, batches)
    tk.recover(slim, model, batches, kept=result.kept_channels)
    tk.refine(slim, model, batches, kept=result.kept_channels, epochs=1)
    tk.finetune(slim, model, batches, batches, FinetuneConfig(epochs=1, progress=False), kept=result.kept_channels)
    assert tk.evaluate(slim, batches)["samples"] == 32


def test_only_models_that_compute_the_same_are_laid():
    model = network()
    assert side_by_side([IMAGES], model)[0].is_contiguous(memory_format=torch.channels_last)
    for other in (Viewed(), ViewedPixels(), Strided()):
        assert side_by_side([IMAGES], model, other)[0] is IMAGES
        with channels_last(model, other, images=IMAGES) as layout:
            assert all(layouts(model)) and all(layouts(other)) and layout.lay(IMAGES).is_contiguous()
    later = ViewedLater()
    assert side_by_side([IMAGES], later)[0].is_contiguous(memory_format=torch.channels_last)
    with channels_last(later, images=IMAGES) as layout:
        assert all(layouts(later)) and layout.lay(IMAGES).is_contiguous()
