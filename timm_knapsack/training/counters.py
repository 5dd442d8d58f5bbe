"""The counters of a checkpoint: whether a run can have come to them."""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..files.plain_json import is_number, shortened


def check_counters(state: Mapping[str, Any], epochs: int, batches: int, accumulation: int, place: Any) -> None:
    """Refuse counters that no run of so many epochs, batches per epoch and batches per update can have.

    Example:
        >>> state = {"epoch": 1, "batch": 2, "update": 6, "count": 0, "sums": [0.0], "history": [], "evaluations": []}
        >>> check_counters({**state, "best": None}, epochs=3, batches=4, accumulation=1, place="last")
        >>> best = {"epoch": 1, "top1": 101.0}
        >>> check_counters({**state, "best": best}, epochs=3, batches=4, accumulation=1, place="last")
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.CheckpointError: last can't be resumed: best is {'epoch': 1, 'top1': 101.0}, and a ...
    """

    def refuse(name: str) -> None:
        raise CheckpointError(
            f"{place} can't be resumed: {name} is {shortened(state.get(name))}, and a run of {epochs} epochs of "
            f"{batches} batches, {accumulation} an update, does not come there; it is damaged: restore it from a copy"
        )

    for name in ("epoch", "batch", "update", "count"):
        if type(state.get(name)) is not int or state[name] < 0:
            refuse(name)
    epoch, batch = state["epoch"], state["batch"]
    if epoch > epochs:
        refuse("epoch")
    if batch > batches or (batch % accumulation and batch != batches) or (batch and epoch == epochs):
        refuse("batch")
    if state["update"] != epoch * math.ceil(batches / accumulation) + math.ceil(batch / accumulation):
        refuse("update")
    sums, best = state.get("sums"), state.get("best")
    if not isinstance(sums, list) or not all(is_number(value) for value in sums):
        refuse("sums")
    if best is not None and not _is_evaluation(best, epochs):
        refuse("best")
    for name in ("history", "evaluations"):
        rows = state.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            refuse(name)


def _is_evaluation(row: Any, epochs: int) -> bool:
    if not isinstance(row, dict) or type(row.get("epoch")) is not int or not 0 <= row["epoch"] <= epochs:
        return False
    top1 = row.get("top1")  # none without labels
    return all(map(is_number, row.values())) and (top1 is None or 0 <= top1 <= 100)
