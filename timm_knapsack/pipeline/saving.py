"""A pruned model's folder: what save_pretrained writes, and the record of how it came about."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..hub.saving import save_pretrained
from ..reports.pictures import draw_kept_channels
from ..reports.run_record import RunRecord


def save_run(
    result: Any,
    folder: str | Path,
    source: Any = None,
    record: RunRecord | None = None,
    notes: Sequence[str] = (),
    draw: bool = True,
    **saving,
) -> tuple[Path, RunRecord]:
    """Save a `PruneResult` or a pruned model with its record; returns the folder and the record."""
    if record is None:
        record = RunRecord.of_pruning(result, source.to_dict() if source is not None else None)
    folder = save_pretrained(result, folder, notes=notes, picture=picture_of(record) if draw else None, **saving)
    record.save(folder)
    return folder, record


def picture_of(record: RunRecord):
    """A function that draws the kept channels for the model card; None where matplotlib is not installed."""
    layers = record.pruning.get("layers")
    if not layers or find_spec("matplotlib") is None:
        return None
    return lambda path: draw_kept_channels(layers, path)
