"""Pruned networks that fine-tuning starts from, made once and kept: by curves, the paper's scores, Torch-Pruning."""

import os
from pathlib import Path

import torch
from competitors import by_torch_pruning
from real_networks import NETWORKS
from torch import nn

import timm_knapsack as tk
from timm_knapsack.recovery.batchnorm import reestimate_batchnorm

CACHE = Path("~/.cache/timm-knapsack/finetune_starts").expanduser()


def _curves(model, loader, share):
    """The plain call."""
    return tk.prune(model, loader, budget=tk.Budget(macs=share)).model


def _paper(model, loader, share):
    """The paper's Taylor scores, then recovery: the choice alone differs from `_curves`."""
    result = tk.prune(model, loader, budget=tk.Budget(macs=share), method="paper")
    return tk.recover(result.model, model, loader, kept=result.kept_channels)


def _torch_pruning(model, loader, share):
    """Torch-Pruning's choice and weights, with new BatchNorm statistics."""
    groups = tk.find_channel_groups(model)
    slim, note = by_torch_pruning(model, groups, loader, share * groups.macs())
    if note:
        print(f"  Torch-Pruning: {note}", flush=True)
    reestimate_batchnorm(slim, loader)
    return slim


CHOICES = {"curves": _curves, "paper": _paper, "torch-pruning": _torch_pruning}


def starting_point(net: str, choice: str, share: float, images: int) -> tuple[nn.Module, nn.Module]:
    """The original and the pruned network; the latter as it was kept, if it was made before with the same arguments."""
    network = NETWORKS[net]()
    path = CACHE / f"{net}-{choice}-{share:g}-{images}-{tk.__version__}.pt"
    if not path.exists():
        loader = list(network.train(batch_size=50, limit=images))
        slim = CHOICES[choice](network.model, loader, share).eval()
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(slim, path.with_suffix(".new"))  # Torch-Pruning's network is no timm model: only a pickle keeps it
        os.replace(path.with_suffix(".new"), path)
    return network.model, torch.load(path, weights_only=False)
