"""Filling a latency table: visits to slim copies, round after round, each saved as it comes."""

import math
import time
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ...slim.cutting import slice_model
from .layer_timing import WARM_UP
from .plan import STAIR_OFFSETS, find_timed_layers, grid_plan, group_steps, stairs_plan
from .stopwatch import Stopwatch
from .time_surface import ASSUMED_STEP, find_step

PASSES = 4  # timed passes in a visit to a copy
DISTURBED = 1.25  # the original takes this much longer than on the idle machine: the visit will be repeated


class Measurement:
    """Fills a `LatencyTable`: stairs first, then the grid."""

    def __init__(self, table, model, groups, path, rounds, precision, max_seconds, progress):
        self.table, self.groups, self.path = table, groups, path
        self.rounds, self.precision, self.max_seconds, self.progress = rounds, precision, max_seconds, progress
        self.layers = find_timed_layers(model, groups, table.conditions)
        table.layers = [layer.name for layer in self.layers]
        self.network = table.conditions.copied(model)
        self.clock = table.clock or table.conditions.clock()
        self.images = table.conditions.images()
        self.watch = Stopwatch(table.conditions.open_runtime(), table.layers, self.clock, self.images)
        self.reference = self.watch.yardstick(self.network)

    def run(self) -> None:
        table = self.table
        with table.conditions.active(), self._bar() as advance, self.watch:
            for _ in range(WARM_UP):
                self.reference()
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
        """Every copy once; then again, in rounds, those whose times are not yet known well enough."""
        table = self.table
        for turn in range(rounds):
            done = {v["copy"] for v in table.visits if v["plan"] == plan and v["round"] == turn}
            order = np.random.default_rng(turn).permutation(len(copies)).tolist()
            waiting = [copy for copy in order if copy not in done]
            if turn:
                worst_first = self._errors(plan)
                waiting = [copy for copy in waiting if worst_first[copy] > self.precision]
                waiting.sort(key=lambda copy: -worst_first[copy])
            for copy in waiting:
                if turn and table.seconds > max_seconds:
                    return
                start = time.monotonic()
                # Copies that have the same level everywhere are also timed as a whole, without marks.
                whole = plan == "grid" and copy % math.isqrt(len(copies)) == 0
                visit = {"plan": plan, "round": turn, "copy": copy, **self._visit(plan, copy, copies[copy], whole)}
                table.visits.append(visit)
                table.seconds += time.monotonic() - start
                self._save()
                advance(plan, rounds * len(copies))

    def _visit(self, plan: str, copy: int, counts: list[int], whole: bool) -> dict[str, Any]:
        def slim():
            keep = {group.name: torch.arange(count) for group, count in zip(self.groups, counts, strict=True)}
            return slice_model(self.network, self.groups, keep).eval().requires_grad_(False)

        timed = self.watch.take(f"{plan}-{copy}", slim)
        references = [self.reference()]
        runs = [[times.get(name, 0.0) for name in ("", *self.table.layers)] for times in timed.layer_seconds(PASSES)]
        references.append(self.reference())
        layers = [_short(seconds) for seconds in np.quantile(runs, 0.25, axis=0)]
        visit = {"reference": _short(np.mean(references)), "layers": layers}
        if whole:
            visit["total"] = _short(np.quantile(timed.seconds(PASSES), 0.25))
        return visit

    def _errors(self, plan: str) -> dict[int, float]:
        """For each copy, how unsure its time is, relative: infinite after a single visit or while disturbed."""
        visits: dict[int, list[tuple[float, float]]] = {}
        for visit, speed in zip(self.table.visits, self.table.speeds(), strict=True):
            if visit["plan"] == plan:
                visits.setdefault(visit["copy"], []).append((speed, sum(visit["layers"]) / speed))
        errors = {}
        for copy, pairs in visits.items():
            calm = [seconds for speed, seconds in pairs if speed < DISTURBED]
            errors[copy] = np.std(calm, ddof=1) / np.mean(calm) / np.sqrt(len(calm)) if len(calm) > 1 else np.inf
        return errors

    def _stairs(self, copies: list[list[int]]) -> dict[str, int]:
        """The stairs of each kind of layer, from the sums of the layers of that kind that have a width that moves."""
        speeds = self.table.speeds()
        found = {}
        for kind in dict.fromkeys(layer.kind for layer in self.layers):
            members = [
                i
                for i, layer in enumerate(self.layers)
                if layer.kind == kind and any(width.at(copies[0]) != width.at(copies[-1]) for width in layer.widths)
            ]
            pairs = [
                (STAIR_OFFSETS[visit["copy"]], speed, sum(visit["layers"][i + 1] for i in members) / speed)
                for visit, speed in zip(self.table.visits, speeds, strict=True)
                if visit["plan"] == "stairs"
            ]
            whole = sum(sum(v["layers"]) / speed for v, speed in zip(self.table.visits, speeds, strict=True))
            if not members:
                found[kind] = ASSUMED_STEP  # too narrow to tell
                continue
            if sum(seconds for *_, seconds in pairs) < 0.05 * whole:
                found[kind] = 1  # too small a part of the network to matter
                continue
            merged = {}
            for offset in dict.fromkeys(offset for offset, *_ in pairs):
                visits = sorted((speed, seconds) for o, speed, seconds in pairs if o == offset)
                merged[offset] = float(np.median([seconds for _, seconds in visits[: (len(visits) + 1) // 2]]))
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

            def advance(plan, total):
                if plan not in tasks:
                    what = "finding stairs" if plan == "stairs" else "timing layers"
                    tasks[plan] = bar.add_task(f"{self.table.model}: {what}", total=total)
                bar.advance(tasks[plan])

            yield advance


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")
