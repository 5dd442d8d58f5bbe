"""The checks that every pruned model must pass, and the means to run them: tests and property tests share them."""

import json

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.coverage import first, randomise
from timm_knapsack.slim.channel_config import ChannelConfig
from timm_knapsack.slim.channel_groups import ChannelGroups
from timm_knapsack.slim.copying import on_meta
from timm_knapsack.slim.cutting import channel_config_of, mask_model, resize_model, slice_model

TOLERANCE = 1e-9  # relative, in float64


def random_keep(groups: ChannelGroups, seed: int = 0, only=lambda group: True) -> dict[str, torch.Tensor]:
    """From one to all units of each group, at random."""
    draw = torch.Generator().manual_seed(seed)
    keep = {}
    for group in (g for g in groups if only(g)):
        count = int(torch.randint(1, group.size + 1, (), generator=draw))
        keep[group.name] = torch.randperm(group.size, generator=draw)[:count].sort().values
    return keep


def torch_macs(model: torch.nn.Module, shape) -> int:
    """What torch counts, on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        on_meta(model).requires_grad_(False)(torch.empty(shape, device="meta"))
    return counter.get_total_flops() // 2


def widths_of(groups: ChannelGroups, keep) -> list[int]:
    return [len(units) for units in groups.check_keep(keep).values()]


def slim_differs_from_masked(model, groups: ChannelGroups, keep, shape, batch: int = 2) -> float:
    """Largest relative difference in float64 between the slim model and the one with zeros, over exact groups."""
    exact = {group.name: keep[group.name] for group in groups if not group.crosses_norm and group.name in keep}
    double = mask_model(model, groups, {}).double().eval()
    x = torch.randn(batch, *shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        masked = first(mask_model(double, groups, exact)(x))
        slim = first(slice_model(double, groups, exact)(x))
    assert masked.shape == slim.shape
    assert torch.isfinite(masked).all() and masked.abs().max() > 0, "an output of zeros would prove nothing"
    return ((slim - masked).abs().max() / masked.abs().max()).item()


def check_pruned(model, groups: ChannelGroups, keep, shape, base: str = "base") -> torch.nn.Module:
    """All that must hold for a slim model; returns it, in training mode, with gradients."""
    assert groups.macs() == torch_macs(model, shape)
    assert slim_differs_from_masked(model, groups, keep, shape) < TOLERANCE
    slim = slice_model(model, groups, keep)
    assert torch_macs(slim, shape) == groups.macs(widths_of(groups, keep))
    x = torch.randn(2, *shape[1:], generator=torch.Generator().manual_seed(2))
    y = first(slim.train()(x))
    y.float().square().mean().backward()
    assert torch.isfinite(y).all()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in slim.parameters())
    check_rebuilds(model, groups, keep, slim, base)
    return slim


def check_rebuilds(model, groups: ChannelGroups, keep, slim, base: str = "base") -> None:
    """ChannelConfig → JSON → resize_model gives the slim model again: shapes and numbers."""
    config = channel_config_of(groups, keep, base)
    again = ChannelConfig.from_json(config.to_json())
    assert again == config and json.loads(again.to_json()) == config.to_dict()
    rebuilt = resize_model(on_meta(model), again)
    assert shapes_of(rebuilt) == shapes_of(slim)
    assert repr(rebuilt.eval()) == repr(slim.eval())
    slim.train()


def shapes_of(model) -> dict[str, tuple[int, ...]]:
    """Of parameters and all buffers, those outside the state dict too."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def seeded(model: torch.nn.Module) -> torch.nn.Module:
    """Weights for which every channel matters; returns the model, in eval mode."""
    randomise(model)
    return model.eval()
