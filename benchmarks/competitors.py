"""Other ways to choose what goes: a global threshold, a uniform ratio, Torch-Pruning; all to a given number of MACs."""

import copy

import torch
from ablation_knapsack import threshold_keep
from torch.nn import functional as F

import timm_knapsack as tk
from timm_knapsack.slim.cutting import kept_outputs

STEPS = 5  # of Torch-Pruning, each with new gradients
TRIALS = 10  # to find the ratio that has the MACs of a step
NEAR = 0.002  # of the MACs of a step: no further trial


def by_threshold(model, groups, scores, macs):
    """The units with the best Taylor scores of the whole network, whatever their group; the best of each stays."""
    return _cut(model, groups, threshold_keep(groups, scores, macs, with_streams=True))


def by_uniform_ratio(model, groups, scores, macs):
    """The same share of every group, its units with the best Taylor scores."""

    def counts(share):
        return [max(1, round(share * group.size)) for group in groups]

    low, high = 0.0, 1.0  # fits at low, too large at high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if groups.macs(counts(middle)) <= macs else (low, middle)
    pairs = zip(groups, counts(low), strict=True)
    return _cut(model, groups, {g.name: scores[g.name].topk(count).indices.sort().values for g, count in pairs})


def _cut(model, groups, keep):
    return tk.slice_model(model, groups, keep).eval(), kept_outputs(groups, keep)


def by_torch_pruning(model, groups, loader, macs):
    """Torch-Pruning's GroupTaylorImportance, global, in five steps, the gradients of all images anew in each.

    It prunes to a ratio of channels; the ratio that has the wanted MACs is found by bisection in each step. In
    attention the width of the heads is pruned, as in its own script for timm. Where it fails on a network (shortcuts
    that pad channels), it is told to leave the residual streams alone.

    Returns:
        The network, and what had to be left alone.
    """
    try:
        return _in_steps(model, loader, macs, ()), ""
    except Exception as error:
        streams = {s.param.rpartition(".")[0] for group in groups if group.is_stream for s in group.slices
                   if s.role == "out"}  # fmt: skip
        if not streams:
            raise
        slim = _in_steps(model, loader, macs, tuple(sorted(streams)))
        return slim, f"streams left alone, with them {type(error).__name__}"


def _in_steps(model, loader, macs, ignored):
    slim = copy.deepcopy(model).eval()
    for module in _attentions(slim):
        module.fused_attn = False  # the fused one would scale by the new width of the heads
    original = tk.count_macs(slim)
    images_in_all = sum(len(labels) for _, labels in loader)
    for step in range(1, STEPS + 1):
        aim = original * (macs / original) ** (step / STEPS)
        slim.zero_grad()
        for images, labels in loader:
            (F.cross_entropy(slim(images), labels, reduction="sum") / images_in_all).backward()
        slim = _smaller(slim, aim, ignored)
    return slim


def _smaller(model, macs, ignored):
    """The network with the least ratio of channels gone that fits the MACs."""
    low, high, best, found = 0.0, 1.0, None, 0
    for _ in range(TRIALS):
        ratio = (low + high) / 2
        trial = _at_ratio(model, ratio, ignored)
        count = tk.count_macs(trial)
        if count > macs:
            low = ratio
            continue
        high = ratio
        if count > found:
            best, found = trial, count
        if count > (1 - NEAR) * macs:
            break
    if best is None:
        raise RuntimeError(f"no ratio of channels brings it to {macs:.4g} MACs")
    return best


def _at_ratio(model, ratio, ignored):
    import torch_pruning as tp

    slim = copy.deepcopy(model)
    for new, old in zip(slim.parameters(), model.parameters(), strict=True):
        new.grad = None if old.grad is None else old.grad.clone()
    attentions = _attentions(slim)
    size = slim.pretrained_cfg["input_size"]
    pruner = tp.pruner.BasePruner(
        slim,
        torch.randn(2, *size),
        importance=tp.importance.GroupTaylorImportance(),
        global_pruning=True,
        pruning_ratio=ratio,
        ignored_layers=[slim.get_classifier(), *(slim.get_submodule(name) for name in ignored)],
        num_heads={module.qkv: module.num_heads for module in attentions},
    )
    pruner.step()
    for module in attentions:
        module.attn_dim = module.qkv.out_features // 3
        module.head_dim = module.attn_dim // module.num_heads
    return slim


def _attentions(model):
    return [module for module in model.modules() if hasattr(module, "qkv") and hasattr(module, "num_heads")]
