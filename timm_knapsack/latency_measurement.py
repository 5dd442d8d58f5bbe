"""Filling a latency table: visits to slim copies, round after round, each saved as it comes."""

import math
import time
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .latency_plan import STAIR_OFFSETS, find_timed_layers, grid_plan, group_steps, stairs_plan
from .layer_timing import WARM_UP, LayerTimer, time_pass
from .slim import slice_model
from .time_surface import find_step

PASSES = 4  # timed passes in a visit to a copy


class Measurement:
    """Fills a `LatencyTable`: stairs first, then the grid."""

    def __init__(self, table, model, groups, path, rounds, precision, max_seconds, progress):
        self.table, self.groups, self.path = table, groups, path
        self.rounds, self.precision, self.max_seconds, self.progress = rounds, precision, max_seconds, progress
        self.layers = find_timed_layers(model, groups, table.conditions)
        table.layers = [layer.name for layer in self.layers]
        self.network = table.conditions.prepared(model)
        self.clock = table.clock or table.conditions.clock()
        self.images = table.conditions.images()
        self.reference = LayerTimer(self.network, table.layers, self.clock)

    def run(self) -> None:
        table = self.table
        with table.conditions.active(), self._bar() as advance:
            for _ in range(WARM_UP):
                self.reference.time_pass(self.images)
            if table.stairs is None:
                copies = stairs_plan(self.groups)
                self._visit_all("stairs", copies, self.max_seconds * 0.3, min(self.rounds, 4), advance)
                table.stairs = self._stairs(copies)
            if not table.grid:
                table.grid = grid_plan(self.groups, self.layers, group_steps(self.groups, self.layers, table.stairs))
            self._visit_all("grid", table.grid, self.max_seconds, self.rounds, advance)
        table.complete = True
        self._save()

    def _visit_all(self, plan: str, copies: list[list[int]], max_seconds: float, rounds: int, advance) -> None:
        table = self.table
        for turn in range(rounds):
            done = {v["copy"] for v in table.visits if v["plan"] == plan and v["round"] == turn}
            if turn and not done and self._precise(plan):
                return
            for copy in np.random.default_rng(turn).permutation(len(copies)).tolist():
                if copy in done:
                    continue
                if turn and table.seconds > max_seconds:
                    return
                start = time.monotonic()
                # Copies that have the same level everywhere are also timed as a whole, without marks.
                whole = plan == "grid" and copy % math.isqrt(len(copies)) == 0
                visit = {"plan": plan, "round": turn, "copy": copy, **self._visit(copies[copy], whole)}
                table.visits.append(visit)
                table.seconds += time.monotonic() - start
                self._save()
                advance(plan, turn * len(copies) + len(done), rounds * len(copies), max_seconds - table.seconds)

    def _visit(self, counts: list[int], whole: bool) -> dict[str, Any]:
        keep = {group.name: torch.arange(count) for group, count in zip(self.groups, counts, strict=True)}
        network = slice_model(self.network, self.groups, keep).eval().requires_grad_(False)
        timer = LayerTimer(network, self.table.layers, self.clock)
        runs, references = [], [sum(self.reference.time_pass(self.images).values())]
        for turn in range(1 + PASSES):
            times = timer.time_pass(self.images)
            if turn:
                runs.append([times.get(name, 0.0) for name in ("", *self.table.layers)])
        references.append(sum(self.reference.time_pass(self.images).values()))
        timer.remove()
        visit = {"reference": _short(min(references)), "layers": [_short(s) for s in np.quantile(runs, 0.25, axis=0)]}
        if whole:
            if self.table.conditions.compiled:
                torch._dynamo.reset()
                network = torch.compile(network)
                time_pass(network, self.images, self.clock)
            totals = [time_pass(network, self.images, self.clock) for _ in range(PASSES)]
            visit["total"] = _short(np.quantile(totals, 0.25))
        return visit

    def _precise(self, plan: str) -> bool:
        """Whether the visits to a copy agree: the standard error of its time, in the median over copies."""
        sums: dict[int, list[float]] = {}
        for visit, speed in zip(self.table.visits, self.table.speeds(), strict=True):
            if visit["plan"] == plan:
                sums.setdefault(visit["copy"], []).append(sum(visit["layers"]) / speed)
        errors = [np.std(s, ddof=1) / np.mean(s) / np.sqrt(len(s)) for s in sums.values() if len(s) > 1]
        return bool(errors) and float(np.median(errors)) <= self.precision

    def _stairs(self, copies: list[list[int]]) -> dict[str, int]:
        """The stairs of each kind of layer, from the sums of the layers of that kind whose widths all move."""
        speeds = self.table.speeds()
        found = {}
        for kind in dict.fromkeys(layer.kind for layer in self.layers):
            members = [
                i
                for i, layer in enumerate(self.layers)
                if layer.kind == kind
                and all(w.at(copies[0]) != w.at(copies[-1]) for w in layer.widths if w.units)
                and any(w.units for w in layer.widths)
            ]
            offsets, seconds = [], []
            for visit, speed in zip(self.table.visits, speeds, strict=True):
                if visit["plan"] == "stairs":
                    offsets.append(STAIR_OFFSETS[visit["copy"]])
                    seconds.append(sum(visit["layers"][i + 1] for i in members) / speed)
            if not members or sum(seconds) < 0.05 * sum(sum(v["layers"]) for v in self.table.visits):
                found[kind] = 1  # too small a part of the network to tell, or to matter
                continue
            pairs = list(zip(offsets, seconds, strict=True))
            merged = {offset: float(np.median([s for o, s in pairs if o == offset])) for offset in offsets}
            found[kind] = find_step(list(merged), list(merged.values()))
        return found

    def _save(self) -> None:
        if self.path is not None:
            self.table.save(self.path)

    @contextmanager
    def _bar(self):
        if not self.progress:
            yield lambda *_: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            tasks: dict[str, Any] = {}

            def advance(plan, done, total, seconds_left):
                if plan not in tasks:
                    what = "finding stairs" if plan == "stairs" else "timing layers"
                    tasks[plan] = bar.add_task(f"{self.table.model}: {what}", total=total)
                bar.advance(tasks[plan])

            yield advance


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")
