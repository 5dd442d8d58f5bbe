"""timm_knapsack: prune any timm image model to a budget, exactly, and get an ordinary timm model back.

Importing it makes ``timm.create_model`` know the pruned models; everything else is loaded on first use.
"""

from ._torchvision_operators import declare_missing_operators

declare_missing_operators()  # before anything imports timm

from .errors import BudgetError, ChannelConfigError, KnapsackError  # noqa: E402
from .version import __version__  # noqa: E402

# Public name → the module it lives in, in the order in which a user meets them.
_HOME = {
    "find_channel_groups": "find_groups",
    "ChannelGroup": "channel_groups",
    "ChannelGroups": "channel_groups",
    "register_rule": "channel_rules",
    "taylor_scores": "taylor_scores",
    "Scores": "taylor_scores",
    "solve_knapsack": "knapsack",
    "Budget": "budget",
    "LatencyTable": "latency",
    "prune": "pruning",
    "sweep": "pruning",
    "slice_model": "slim",
    "resize_model": "slim",
    "recover": "recovery",
    "DistillationConfig": "distillation",
    "finetune": "finetune",
    "FinetuneConfig": "finetune",
    "evaluate": "finetune",
    "save_pretrained": "hub",
    "push_to_hub": "hub",
    "ChannelConfig": "channel_config",
    "register_pruned_model": "pruned_models",
    "count_macs": "costs",
    "count_params": "costs",
    "measure_latency": "latency",
}

__all__ = ["BudgetError", "ChannelConfigError", "KnapsackError", "__version__", *_HOME]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'timm_knapsack' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


# Registering models is what the import is for.
from . import cifar_resnet, pruned_models  # noqa: E402, F401

# These functions share their module's name: loaded at once, or the module would stand where the function belongs.
from .finetune import finetune  # noqa: E402, F401
from .taylor_scores import taylor_scores  # noqa: E402, F401


def __dir__():
    return sorted(__all__)
