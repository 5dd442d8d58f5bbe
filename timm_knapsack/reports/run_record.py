"""What happened to a pruned model, beside its weights: one JSON file, so that a later command can go on and report."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import KnapsackError
from ..files.paths import named_path
from ..files.plain_json import read_json, shortened, write_json

FILE = "record.json"
FORMAT = "timm-knapsack/record"
VERSION = 1


@dataclass
class RunRecord:
    """Everything that `timm-knapsack report` shows, as plain data.

    Attributes:
        base: the `ModelSource` that was pruned, as a mapping: the teacher.
        pruning: ``PruneReport.to_dict()``.
        kept_channels: ``{layer: indices of the outputs that stay}``.
        finetune: config, history and evaluations of a fine-tuning run.
        evaluations: rows with ``what`` ("original", "pruned", "recovered", "fine-tuned"), top1, top5, samples, data.
        latency: measured seconds: ``{"original", "pruned", "batch_size", "threads", "device"}``.
        sweep: rows of accuracy against MACs: ``{"what", "macs", "top1", "kind"}``, and ``seconds`` where time was
            measured, too.
        curves: what each width of a group would cost, where value curves were measured: ``{group: {"size", "counts",
            "loss", "chosen"}}``, at some of the widths.
        notes: lines for the model card's "How it was made", one for each step behind the cut.
        command: how it was made.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> RunRecord(evaluations=[{"what": "original", "top1": 93.4}]).save(folder).name
        'record.json'
        >>> RunRecord.load(folder).evaluations[0]["top1"]
        93.4
    """

    base: dict[str, Any] = field(default_factory=dict)
    pruning: dict[str, Any] = field(default_factory=dict)
    kept_channels: dict[str, list[int]] = field(default_factory=dict)
    finetune: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, Any] = field(default_factory=dict)
    sweep: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    command: str = ""

    @classmethod
    def of_pruning(cls, result: Any, base: Mapping[str, Any] | None = None, **more) -> "RunRecord":
        """From a `PruneResult`."""
        kept = {name: index.tolist() for name, index in result.kept_channels.items()}
        return cls(dict(base or {}), result.report.to_dict(), kept, **more)

    def add_curves(self, values: Any, groups: Any, keep: Mapping[str, Any], most: int = 33) -> None:
        """From `ValueCurves` and the units that stay; at most ``most`` widths of each group are kept."""
        if values.loss_of(0.0) is None:
            return
        for group in groups:
            rungs = values.ladder(group)
            last, chosen = len(rungs.counts) - 1, len(keep[group.name])
            at = {round(i * last / (most - 1)) for i in range(most)}
            at = sorted(at | {i for i, count in enumerate(rungs.counts) if count == chosen})
            self.curves[group.name] = {
                "size": group.size,
                "counts": [int(rungs.counts[i]) for i in at],
                "loss": [values.loss_of(float(rungs.value[i])) for i in at],
                "chosen": chosen,
            }

    def add_finetuning(self, config: Any, result: Any) -> None:
        """From a `FinetuneConfig` and a `FinetuneResult`."""
        self.finetune = {
            "config": asdict(config),
            "history": list(result.history),
            "evaluations": list(result.evaluations),
            "updates": result.updates,
        }

    def add_evaluation(self, what: str, metrics: Mapping[str, Any], data: str = "") -> None:
        """The same images measured again replace the row."""
        row = {"what": what, **metrics, "data": data}
        self.evaluations = [r for r in self.evaluations if (r["what"], r.get("data")) != (what, data)] + [row]

    def save(self, folder: str | os.PathLike) -> Path:
        """Write ``record.json`` into a folder, whole or not at all."""
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return write_json(Path(folder) / FILE, data)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "RunRecord":
        """Read ``record.json`` from a folder; an empty record if there is none."""
        path = named_path(folder) / FILE
        if not path.exists():
            return cls()
        data = read_json(path, "a record", format=FORMAT, version=VERSION)
        for f in fields(cls):
            kind = str if f.name == "command" else list if f.name in ("evaluations", "sweep", "notes") else dict
            value = data.get(f.name, kind())
            rows = value if kind is list else ()
            one = str if f.name == "notes" else dict
            if not isinstance(value, kind) or not all(isinstance(row, one) for row in rows):
                raise KnapsackError(f"{path} is damaged: {f.name} is {shortened(value)}, which no record holds")
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})
