"""The registry with the built-in costs in it."""

from . import activations, counted
from .latency import kind as latency
from .registry import COSTS, CostKind, register_cost

__all__ = ["COSTS", "CostKind", "register_cost"]

for _kind in (*counted.KINDS, latency.KIND, activations.KIND):
    register_cost(_kind)
