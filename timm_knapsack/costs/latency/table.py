"""LatencyTable: what each layer of a network takes on a device, over its widths, measured inside the network.

Times are in seconds for one forward pass of one batch. The file holds what was measured, visit by visit; surfaces are
fitted to it when a cost is asked for, so a better fit needs no new measurement.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...channels.find_groups import find_channel_groups
from ...errors import LatencyError
from ...files.atomic import write_text
from ...files.plain_json import read_json
from ...files.versions import versions
from ...slim.channel_config import model_name
from ...slim.channel_groups import ChannelGroups
from .conditions import MeasuringConditions
from .cost import LatencyCost, on_stairs
from .layer_timing import Conditions, device_name
from .measurement import DISTURBED, Measurement
from .network_timing import Comparison, Latency, compare_latency, measure_latency  # noqa: F401  (public names)
from .plan import find_timed_layers, group_steps
from .table_check import MAX_SECONDS, check_table
from .time_surface import Surface, fit_surface

FORMAT = "timm-knapsack latency table"
MAX_KNOTS = 7


@dataclass
class LatencyTable:
    """Times of the layers of one network on one device.

    Attributes:
        conditions: device, threads, batch size, input size, dtype, memory format, runtime, fp32 or int8.
        layers: names of the timed layers, in the order in which they run.
        stairs: for each kind of layer, the channels that the device takes together (1: no stairs).
        visits: what was measured: which copy, and seconds for each layer.

    Example:
        >>> table = LatencyTable.measure(model, path="cpu.json", max_seconds=5)  # resumes if it was interrupted
        >>> budget = Budget(latency=0.6, table=table)  # for prune(model, loader, budget=budget)
    """

    model: str
    shapes: str  # digest of the shapes of all tensors and groups
    conditions: Conditions
    layers: list[str]
    stairs: dict[str, int] | None = None
    grid: list[list[int]] = field(default_factory=list)
    visits: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    surfaces: dict[str, Surface] = field(default_factory=dict, compare=False, repr=False)  # filled by `cost`
    elsewhere: bool = field(default=False, compare=False)
    check_seconds: float = field(default=40.0, compare=False)  # at most this long to measure one pruned network
    clock: Any = field(default=None, compare=False, repr=False)

    # ---- files

    @classmethod
    def load(cls, path: str | os.PathLike, *, elsewhere: bool = False) -> "LatencyTable":
        """Read a table.

        Args:
            elsewhere: the table may come from another machine; times are then predicted and not measured.
        """
        advice = "`timm-knapsack latency` or LatencyTable.measure(…) makes one"
        data = read_json(path, "a latency table", format=FORMAT, version=1, error=LatencyError, advice=advice)
        try:
            fields = {name: data[name] for name in cls._saved}
            check_table(fields)
            fields["conditions"] = Conditions.from_dict(fields["conditions"])
            return cls(**fields, elsewhere=elsewhere)
        except (KeyError, TypeError, LatencyError) as error:
            raise LatencyError(f"latency table {path} is damaged: {error}; measure it again") from None

    _saved = (
        *("model", "shapes", "conditions", "versions", "date", "seconds", "complete"),
        *("layers", "stairs", "grid", "visits"),
    )

    def save(self, path: str | os.PathLike) -> None:
        """Write the table as JSON, in one step: an interrupted save leaves the file as it was."""
        path = Path(path)
        data = {"format": FORMAT, "version": 1, **{name: getattr(self, name) for name in self._saved}}
        data["conditions"] = self.conditions.to_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f'"{key}": {json.dumps(value)}' for key, value in data.items() if key != "visits"]
        visits = ",\n  ".join(json.dumps(visit) for visit in self.visits)
        write_text(path, "{\n" + ",\n".join(lines) + f',\n"visits": [\n  {visits}\n]\n}}\n')

    # ---- measuring

    @classmethod
    def measure(
        cls,
        model: nn.Module,
        groups: ChannelGroups | None = None,
        *,
        path: str | os.PathLike | None = None,
        conditions: MeasuringConditions | None = None,
        rounds: int = 5,
        progress: bool = False,
        clock=None,
        **options,
    ) -> "LatencyTable":
        """Measure every layer over a grid of its widths; the model itself is left untouched.

        Slim copies of the network run in turns, round after round, with the original beside them as a yardstick of how
        fast the machine is just then. It stops when the times are known to ``precision`` or ``max_seconds`` (180) are
        over, but not before every copy was seen once.

        Args:
            path: a file that is read first and written as measurements come: a finished table is returned at once, an
                interrupted one is taken up where it stopped.
            conditions: what to measure under.
            options: single fields of `MeasuringConditions`: batch_size, device, threads, max_seconds …

        Example:
            >>> LatencyTable.measure(model, batch_size=2, threads=1, path="cpu-b2.json", max_seconds=5)
            LatencyTable(...)
        """
        asked = MeasuringConditions.read(conditions, **options)
        conditions = Conditions.of(model, asked)
        if groups is None:
            groups = find_channel_groups(model, torch.empty((1, *conditions.input_size), device="meta"))
        if path is not None and Path(path).exists():
            table = cls.load(path)
            table._check_shapes(model, groups)
            differences = table.conditions.differences(conditions)
            if differences:
                raise LatencyError(
                    f"latency table {path} was made under other conditions: this run has {'; '.join(differences)}. "
                    "Use another path, or the same conditions"
                )
        else:
            table = cls(
                model=model_name(model),
                shapes=_digest(groups),
                conditions=conditions,
                layers=[],
                versions=versions("torch", "timm", "timm_knapsack", "python")
                | conditions.open_runtime().describe()["versions"],
                date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            )
        table.clock = clock
        if not table.complete:
            limits = rounds, asked.precision, asked.seconds(180.0)
            Measurement(table, model, groups, path, *limits, progress).run()
        return table

    # ---- using

    def cost(
        self, model: nn.Module, groups: ChannelGroups, batch_size: int | None = None, runtime: str | None = None
    ) -> LatencyCost:
        """The time of the network as a function of its widths.

        Raises:
            LatencyError: for another network, device, number of threads, batch size or runtime than the table's.
        """
        self._check_shapes(model, groups)
        if not self.complete:
            raise LatencyError(
                f"the latency table of {self.model} is not complete: it holds {len(self.visits)} visits; "
                "LatencyTable.measure(…, path=…) goes on where it stopped"
            )
        if batch_size is not None and batch_size != self.conditions.batch_size:
            raise LatencyError(
                f"the latency table was measured at batch size {self.conditions.batch_size}, and {batch_size} is asked "
                f"for; measure one with batch_size={batch_size}"
            )
        if runtime is not None and runtime != self.conditions.runtime:
            raise LatencyError(
                f"the latency table was measured in the runtime {self.conditions.runtime!r}, and {runtime!r} is asked "
                f"for; measure one with runtime={runtime!r}"
            )
        if not self.elsewhere:
            self._check_here()
        conditions = self.conditions
        if self.elsewhere:  # run the layers here, only to see which they are; shapes say the batch size
            options = {"input_size": conditions.input_size, "batch_size": conditions.batch_size}
            conditions = Conditions.of(model, **options)
        layers = find_timed_layers(model, groups, conditions)
        fits = all(1 <= n <= size for row in self.grid for n, size in zip(row, groups.sizes, strict=False))
        if [layer.name for layer in layers] != self.layers or not fits or len(self.grid[0]) != len(groups):
            raise LatencyError(f"the latency table of {self.model} is of other layers or widths; measure it again")
        return self._fitted(layers, groups)

    def _fitted(self, layers, groups: ChannelGroups) -> LatencyCost:
        seconds = self._seconds_of_copies()  # copy × layer
        copies = [self.grid[c] for c in seconds]
        times = np.array(list(seconds.values()))
        if not (times <= MAX_SECONDS).all():  # a yardstick far off makes huge ones, or none, of possible times
            raise LatencyError("the latency table is damaged: its times make no finite ratio; measure it again")
        by_shape: dict[str, list[int]] = {}
        for i, layer in enumerate(layers):
            by_shape.setdefault(layer.shape, []).append(i)
        stairs = [(self.stairs or {}).get(layer.kind, 1) for layer in layers]
        surfaces: list[Any] = [None] * len(layers)
        windows = np.zeros((2, len(layers)))
        for members in by_shape.values():
            points = np.array([[w.at(copy) for w in layers[i].widths] for i in members for copy in copies], dtype=float)
            points = np.minimum(on_stairs(points, stairs[members[0]]), points.max(axis=0))
            measured = np.concatenate([times[:, i + 1] for i in members])
            surface = fit_surface(points, measured, [_knots(points[:, axis]) for axis in (0, 1)])
            for i in members:
                surfaces[i] = surface
                windows[:, i] = [knots[-1] / 12 for knots in surface.knots]
        rest = float(np.median(times[:, 0]))
        shape = [layer.name for layer in layers], [layer.widths for layer in layers], surfaces, len(groups)
        cost = LatencyCost(*shape, stairs=stairs)
        predicted, totals, trust = [], [], []
        for visit, speed in zip(self.visits, self.speeds(), strict=True):
            if visit.get("total"):
                predicted.append(cost.at(self.grid[visit["copy"]]) + rest)
                totals.append(visit["total"] / speed)
                trust.append(_trust(speed))
        factor, constant = _calibrated(*map(np.array, (predicted, totals, trust))) if totals else (1.0, 0.0)
        self.surfaces = dict(zip(cost.names, surfaces, strict=True))
        return LatencyCost(
            *shape,
            stairs=stairs,
            calibration=(factor, factor * rest + constant),
            steps=group_steps(groups, layers, self.stairs or {}),
            windows=windows,
            conditions=None if self.elsewhere else self.conditions,
            check_seconds=self.check_seconds,
            clock=self.clock,
        )

    def speeds(self) -> np.ndarray:
        """For each visit, the original's time just then ÷ its time on the undisturbed machine (the lowest decile)."""
        references = np.array([visit["reference"] for visit in self.visits])
        return references / np.quantile(references, 0.1) if len(references) else references

    def _seconds_of_copies(self) -> dict[int, np.ndarray]:
        """For each copy of the grid, seconds of each layer (the time before the first comes first).

        Visits while the machine was busy with something else count little where there is a better one.
        """
        found: dict[int, list[tuple[float, np.ndarray]]] = {}
        for visit, speed in zip(self.visits, self.speeds(), strict=True):
            if visit["plan"] == "grid":
                found.setdefault(visit["copy"], []).append((_trust(speed), np.array(visit["layers"]) / speed))
        return {copy: _weighted_median(*zip(*visits, strict=True)) for copy, visits in sorted(found.items())}

    def __str__(self):
        """What the table is of, how far the visits can be trusted, and where the fit overruled the measurement."""
        c = self.conditions
        speeds = self.speeds()
        lines = [
            f"{self.model} on {c.device_name}: {c.threads} threads, batch {c.batch_size}, {c.dtype}, {c.memory_format}"
            f", in {c.kind}; {len(self.visits)} visits in {self.seconds:.0f} s, {self.date}",
            f"stairs: {self.stairs}",
        ]
        if len(speeds):
            lines.append(f"visits while something else ran: {np.mean(speeds > DISTURBED):.0%}")
        worst = sorted(self.surfaces.items(), key=lambda item: -item[1].residual)[:5]
        lines += [f"{name}: fit off by {s.residual:.1%}, {s.pooled} falls pooled" for name, s in worst]
        return "\n".join(lines)

    # ---- refusing

    def _check_shapes(self, model: nn.Module, groups: ChannelGroups) -> None:
        if self.shapes != _digest(groups):
            raise LatencyError(
                f"the latency table was measured for {self.model} with the shapes {self.shapes}; this model is "
                f"{model_name(model)} with the shapes {_digest(groups)}. Measure a table for it"
            )

    def _check_here(self) -> None:
        table = self.conditions
        try:
            name = device_name(torch.device(table.device))
        except LatencyError as error:
            name = f"none ({error})"
        here = {"device": (table.device_name, name), "threads": (table.threads, torch.get_num_threads())}
        for what, (measured, now) in here.items():
            if measured != now and (what == "device" or table.device == "cpu"):
                raise LatencyError(
                    f"the latency table was measured with {what} {measured}, and here it is {now}. Measure one here, "
                    f"{'call torch.set_num_threads, ' if what == 'threads' else ''}or take its word with "
                    "LatencyTable.load(path, elsewhere=True)"
                )
        for package, now in table.open_runtime().describe()["versions"].items():
            then = self.versions.get(package)
            if then != now:
                warnings.warn(f"latency table: measured with {package} {then}, now {now}", stacklevel=3)


def _knots(widths: np.ndarray) -> np.ndarray:
    """The measured widths themselves, or a few among them where sums over groups give many."""
    distinct = np.unique(widths)
    if len(distinct) <= MAX_KNOTS:
        return distinct
    return np.unique(np.quantile(distinct, np.linspace(0, 1, MAX_KNOTS)))


def _trust(speed: float) -> float:
    """How much a visit counts: what else ran on the machine then does not slow all layers alike."""
    return float(max(speed, 1.0) ** -4)


def _weighted_median(weights: Sequence[float], rows: Sequence[np.ndarray]) -> np.ndarray:
    """Column by column, the least value with half of the weight at or below it."""
    order = np.argsort(rows, axis=0)
    reached = np.cumsum(np.array(weights)[order], axis=0) >= 0.5 * sum(weights) * (1 - 1e-9)
    chosen = np.take_along_axis(order, reached.argmax(axis=0)[None], axis=0)
    return np.take_along_axis(np.array(rows), chosen, axis=0)[0]


def _calibrated(predicted: np.ndarray, totals: np.ndarray, trust: np.ndarray) -> tuple[float, float]:
    """(factor, constant) ≥ 0 that make the sum of the layers the time of the network, errors relative."""
    from scipy.optimize import nnls

    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        rows = np.stack([predicted / totals, totals.mean() / totals], axis=1)
    if not (np.isfinite(rows).all() and np.isfinite(trust).all()):
        raise LatencyError("the latency table is damaged: its times make no finite ratio; measure it again")
    factor, constant = nnls(rows * np.sqrt(trust)[:, None], np.sqrt(trust))[0]
    return float(factor), float(constant * totals.mean())


def _digest(groups: ChannelGroups) -> str:
    text = json.dumps([sorted((n, list(s)) for n, s in groups.shapes.items()), [(g.name, g.size) for g in groups]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
