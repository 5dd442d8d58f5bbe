"""Weights lie channels last while it computes faster so, and come back as they were."""

import pytest
import torch
from torch import nn

from timm_knapsack import DistillationConfig, FinetuneConfig, finetune
from timm_knapsack.maps.channels_last import channels_last


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def layouts(model):
    return [weight.is_contiguous() for weight in model.parameters()]


def test_weights_come_back_as_they_were_also_after_an_error():
    model = network()
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(RuntimeError), channels_last(model, None):
        assert layouts(model) == [False, True, False, True]
        raise RuntimeError
    assert all(layouts(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_model_that_lay_so_is_left_alone():
    model = network().to(memory_format=torch.channels_last)
    with channels_last(model) as laid:
        assert not laid
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
