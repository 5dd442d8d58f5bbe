"""timm_knapsack: prune any timm image model to a budget, exactly, and get an ordinary timm model back.

Importing it makes ``timm.create_model`` know the pruned models, whichever of the two is imported first; everything else
is loaded on first use, torch and timm included.
"""

from importlib import import_module

from ._registration import register_with_timm
from .errors import BudgetError, ChannelConfigError, KnapsackError
from .version import __version__

# Public name → the module it lives in, in the order in which a user meets them.
_HOME = {
    "find_channel_groups": "channels.find_groups",
    "ChannelGroup": "slim.channel_groups",
    "ChannelGroups": "slim.channel_groups",
    "register_rule": "channels.op_rules",
    "Layout": "channels.labels",
    "taylor_scores": "values.gradient_pass",
    "Scores": "values.scores",
    "Criterion": "values.criteria",
    "register_criterion": "values.criteria",
    "solve_knapsack": "knapsack.solve",
    "Budget": "pruning.budget",
    "Cost": "costs.cost",
    "CostKind": "costs.kinds",
    "register_cost": "costs.kinds",
    "LatencyTable": "costs.latency.table",
    "prune": "pruning.prune",
    "sweep": "pruning.prune",
    "slice_model": "slim.cutting",
    "resize_model": "slim.cutting",
    "recover": "recovery.closed_form",
    "DistillationConfig": "training.distillation",
    "finetune": "training.finetuning",
    "FinetuneConfig": "training.finetuning",
    "evaluate": "training.finetuning",
    "save_pretrained": "hub.saving",
    "push_to_hub": "hub.saving",
    "ChannelConfig": "slim.channel_config",
    "register_pruned_model": "models.pruned_models",
    "count_macs": "costs.counted",
    "count_params": "costs.counted",
    "measure_latency": "costs.latency.table",
    "MeasuringConditions": "costs.latency.conditions",
}

__all__ = ["BudgetError", "ChannelConfigError", "KnapsackError", "__version__", *_HOME]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'timm_knapsack' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)


register_with_timm()
