"""timm_knapsack: prune any timm image model to a budget, exactly, and get an ordinary timm model back.

Importing it makes ``timm.create_model`` know the pruned models, whichever of the two is imported first; everything else
is loaded on first use, torch and timm included.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._registration import register_with_timm
from .errors import BudgetError, ChannelConfigError, KnapsackError
from .version import __version__

if TYPE_CHECKING:  # the names of _HOME for type checkers and completion; tests/test_typing.py compares the two
    from .channels.find_groups import find_channel_groups as find_channel_groups
    from .channels.labels import Layout as Layout
    from .channels.op_rules import register_rule as register_rule
    from .costs.cost import Cost as Cost
    from .costs.counted import count_macs as count_macs
    from .costs.counted import count_params as count_params
    from .costs.kinds import CostKind as CostKind
    from .costs.kinds import register_cost as register_cost
    from .costs.latency.conditions import MeasuringConditions as MeasuringConditions
    from .costs.latency.table import LatencyTable as LatencyTable
    from .costs.latency.table import measure_latency as measure_latency
    from .export.export_model import export_model as export_model
    from .export.kinds import Exporter as Exporter
    from .export.kinds import register_exporter as register_exporter
    from .hub.loading import load_pretrained as load_pretrained
    from .hub.saving import push_to_hub as push_to_hub
    from .hub.saving import save_pretrained as save_pretrained
    from .images.loaders import image_loader as image_loader
    from .knapsack.solve import solve_knapsack as solve_knapsack
    from .models.pruned_models import register_pruned_model as register_pruned_model
    from .pipeline.compare import compare_networks as compare_networks
    from .pipeline.narrower_heads import turn_heads as turn_heads
    from .pipeline.prune import prune as prune
    from .pruning.budget import Budget as Budget
    from .pruning.choose import sweep as sweep
    from .recovery.closed_form import recover as recover
    from .recovery.refinement import refine as refine
    from .runtimes.kinds import register_runtime as register_runtime
    from .runtimes.runtime import Runtime as Runtime
    from .slim.channel_config import ChannelConfig as ChannelConfig
    from .slim.channel_groups import ChannelGroup as ChannelGroup
    from .slim.channel_groups import ChannelGroups as ChannelGroups
    from .slim.cutting import resize_model as resize_model
    from .slim.cutting import slice_model as slice_model
    from .training.distillation import DistillationConfig as DistillationConfig
    from .training.finetuning import FinetuneConfig as FinetuneConfig
    from .training.finetuning import evaluate as evaluate
    from .training.finetuning import finetune as finetune
    from .training.timm_task import InnerDistillationTask as InnerDistillationTask
    from .values.criteria import Criterion as Criterion
    from .values.criteria import register_criterion as register_criterion
    from .values.curves import ValueCurves as ValueCurves
    from .values.gradient_pass import taylor_scores as taylor_scores
    from .values.measured_curves import value_curves as value_curves
    from .values.scores import Scores as Scores

# Public name → the module it lives in, in the order in which a user meets them.
_HOME = {
    "image_loader": "images.loaders",
    "find_channel_groups": "channels.find_groups",
    "ChannelGroup": "slim.channel_groups",
    "ChannelGroups": "slim.channel_groups",
    "register_rule": "channels.op_rules",
    "Layout": "channels.labels",
    "value_curves": "values.measured_curves",
    "ValueCurves": "values.curves",
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
    "prune": "pipeline.prune",
    "turn_heads": "pipeline.narrower_heads",
    "sweep": "pruning.choose",
    "slice_model": "slim.cutting",
    "resize_model": "slim.cutting",
    "recover": "recovery.closed_form",
    "refine": "recovery.refinement",
    "DistillationConfig": "training.distillation",
    "finetune": "training.finetuning",
    "FinetuneConfig": "training.finetuning",
    "evaluate": "training.finetuning",
    "InnerDistillationTask": "training.timm_task",
    "save_pretrained": "hub.saving",
    "load_pretrained": "hub.loading",
    "push_to_hub": "hub.saving",
    "ChannelConfig": "slim.channel_config",
    "register_pruned_model": "models.pruned_models",
    "count_macs": "costs.counted",
    "count_params": "costs.counted",
    "measure_latency": "costs.latency.table",
    "MeasuringConditions": "costs.latency.conditions",
    "Runtime": "runtimes.runtime",
    "register_runtime": "runtimes.kinds",
    "export_model": "export.export_model",
    "Exporter": "export.kinds",
    "register_exporter": "export.kinds",
    "compare_networks": "pipeline.compare",
}

__all__ = ["BudgetError", "ChannelConfigError", "KnapsackError", "__version__", *_HOME]


if not TYPE_CHECKING:  # a type checker would take it for a promise that every name is there

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module 'timm_knapsack' has no attribute {name!r}")
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__():
    return sorted(__all__)


register_with_timm()
