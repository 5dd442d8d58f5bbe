"""The whole trade-off: one scoring pass, a pruned network for each budget, and what they must beat.

Every point is a folder that `timm.create_model` reads; one that is there already is not made again, so that a sweep
that was stopped goes on. All times are measured at the end, in turns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ..costs.kinds import COSTS
from ..costs.latency.conditions import MeasuringConditions
from ..costs.latency.layer_timing import Conditions
from ..costs.latency.network_timing import on_images, time_in_turns
from ..errors import BudgetError, KnapsackError, first_line
from ..files.plain_json import plain, write_json
from ..models.model_source import ModelSource
from ..pruning.budget import Budget
from ..reports.page import write_report
from ..reports.pictures import chart, trade_off_series
from ..reports.run_record import RunRecord
from ..slim.example_inputs import example_input
from .baselines import ORIGINAL, RECOVERED, sides_for, smaller_images, stock
from .stage import Job, run_stages
from .stages import prune_again, stages

START = ("model", "data", "groups", "score", "hold out", "evaluate")
RECORD, VALUES = "sweep.json", "values.safetensors"
FINEST = 0.02  # of the cost: how near to each other two budgets are tried in the search for a drop
LEAST = 0.05
PICTURES = (
    ("macs", 1e-6, "million MACs", "Accuracy against MACs", "accuracy_macs.png"),
    ("seconds", 1e3, "ms for one batch", "Accuracy against time", "accuracy_time.png"),
)


def parse_shares(text: str) -> list[float]:
    """``0.9:0.3:0.1`` (first, last, step) or ``0.9,0.5`` as fractions, the largest first.

    Example:
        >>> parse_shares("0.9:0.3:0.2"), parse_shares("0.5,0.7")
        ([0.9, 0.7, 0.5, 0.3], [0.7, 0.5])
    """
    wrong = f"budgets {text!r}: expected FIRST:LAST:STEP, such as 0.9:0.3:0.1, or fractions joined by commas"
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            if step <= 0 or first < last:
                raise BudgetError(wrong)
            shares = [first - number * step for number in range(int((first - last) / step + 1e-9) + 1)]
        else:
            shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise BudgetError(wrong) from None
    shares = sorted({round(share, 6) for share in shares}, reverse=True)
    if not all(0 < share < 1 for share in shares):
        raise BudgetError(f"budgets {text!r}: fractions of the original's cost lie between 0 and 1")
    return shares


def start(job: Job) -> None:
    """Load, score once, and evaluate the original on images that neither values nor recovery see."""
    if job.settings.data is None:
        raise KnapsackError("this needs images with labels: data=…")
    names = ["read scores" if name == "score" and job.options.get("scores") else name for name in START]
    run_stages(stages(*names), job)


def _start_again(job: Job) -> None:
    """`start`, with the values that an earlier sweep left in the folder."""
    values = Path(job.folder) / VALUES
    if not job.options.get("scores") and values.exists():
        job.options = {**job.options, "scores": str(values)}
    start(job)
    if not values.exists():
        job["scores"].save(values)


def budget_of(cost: str, share: float, table: Any) -> Budget:
    return Budget(**{cost: share}, table=table if COSTS.find(cost).needs_table else None)


def sweep_budgets(
    job: Job,
    shares: Sequence[float],
    *,
    cost: str = "macs",
    table: Any = None,
    sides: Sequence[int] | None = None,
    baselines: Iterable[str] = (),
    conditions: MeasuringConditions | None = None,
) -> list[dict[str, Any]]:
    """Rows of accuracy against MACs and measured time: pruned networks and baselines; all written to ``job.folder``.

    Args:
        job: with settings of model, data, values and recovery, and the folder to write.
        shares: fractions of the original's cost.
        cost: which: "macs", "latency" (with its table) …
        sides: sizes of images for the original; by default those with about the same MACs as the budgets.
        baselines: smaller networks, ``NAME=WEIGHTS.safetensors``.
        conditions: how times are measured; by default as the table was, else at batch 1 in PyTorch.
    """
    COSTS.find(cost)
    for share in shares:
        budget_of(cost, share, table)  # a table that is missing is said before hours of work
    _start_again(job)
    base = job["base"]
    macs = job["groups"].macs()
    rows: list[dict[str, Any]] = [{"what": ORIGINAL, "kind": ORIGINAL, "macs": macs, "top1": _top1(job, ORIGINAL)}]
    networks: list[tuple[nn.Module, int | None]] = [(base, None)]
    for share in shares:
        row, network = _point(job, cost, share, table)
        if row is not None:
            rows.append(row)
            networks.append((network, None))
    side = example_input(base)[-1]
    for other in sides_for(side, shares) if sides is None else sides:
        try:
            rows.append(smaller_images(job, other))
        except (KnapsackError, RuntimeError, AssertionError) as error:
            job.say(f"note: no baseline of {other} px: {first_line(error)}")
            continue
        networks.append((base, other))
        job.say(f"{rows[-1]['what']}: top-1 {rows[-1]['top1']:.2f} %")
    for text in baselines:
        row, network = stock(job, text)
        rows.append(row)
        networks.append((network, None))
        job.say(f"{row['what']}: top-1 {row['top1']:.2f} %")
    _time(rows, networks, _conditions(conditions, table, cost))
    _write(job, rows)
    return rows


def _top1(job: Job, what: str) -> float:
    return next(row["top1"] for row in job["evaluations"] if row["what"] == what)


def _point(job: Job, cost: str, share: float, table: Any) -> tuple[dict[str, Any] | None, nn.Module | None]:
    """One pruned network: made, evaluated and saved, or read again where it is there."""
    folder = Path(job.folder) / f"{cost}-{share:g}"
    row = {"what": f"{share:.0%}", "kind": RECOVERED, "folder": folder.name}
    record = RunRecord.load(folder) if (folder / "config.json").exists() else RunRecord()
    top1 = next((r["top1"] for r in record.evaluations if r["what"] == "recovered"), None)
    if top1 is not None:
        if record.base != plain(job.source.to_dict()):
            raise KnapsackError(f"{folder} holds a point of another network ({record.base}); write to another folder")
        network = ModelSource(str(folder)).load().to(job.device)
        counted = next(line["counted"] for line in record.pruning["costs"] if line["name"] == "macs")
        job.say(f"{folder}: there already, top-1 {top1:.2f} %")
        return {**row, "macs": counted, "top1": top1}, network
    try:
        one = prune_again(job, budget_of(cost, share, table), "save", folder=folder)
    except BudgetError as error:
        job.say(f"note: no point at {share:.0%}: {error}")
        return None, None
    counted = one["student"].result.report.line("macs").counted
    job.say(f"{folder}: top-1 {_top1(one, 'recovered'):.2f} %, {counted / job['groups'].macs():.1%} of the MACs")
    return {**row, "macs": counted, "top1": _top1(one, "recovered")}, one["student"].model


# ---- time, and what is written ------------------------------------------------------------------------------------


def _conditions(asked: MeasuringConditions | None, table: Any, cost: str) -> MeasuringConditions:
    """As asked; for a budget of time as the table was measured, and nothing else."""
    if not COSTS[cost].needs_table or table is None:
        return asked or MeasuringConditions()
    own = table.conditions
    if asked is not None and (asked.runtime, asked.int8) != (own.runtime, own.int8):
        raise KnapsackError(f"the table is of the runtime {own.kind!r}, not of {asked.runtime!r}; measure another one")
    given = {name: getattr(own, name) for name in ("batch_size", "threads", "timer", "runtime", "int8")}
    return MeasuringConditions(**given, max_seconds=None if asked is None else asked.max_seconds)


def _time(
    rows: list[dict[str, Any]], networks: Sequence[tuple[nn.Module, int | None]], asked: MeasuringConditions
) -> None:
    """Measure all networks in turns, each on images of its own size; fills ``seconds``, ``ratio`` and ``error``."""
    runs, first = [], None
    for network, side in networks:
        size = None if side is None else (example_input(network)[1], side, side)
        conditions = Conditions.of(network, asked, input_size=size)
        first = first or conditions
        with conditions.active():
            runs.append(on_images(conditions.started(network), conditions.images()))
    found = time_in_turns(first, runs, precision=asked.precision, max_seconds=asked.seconds(10.0 * len(runs)))
    for row, latency, ratio, error in zip(rows, found.latencies, found.ratios, found.uncertainty, strict=True):
        row |= {"seconds": latency.median, "ratio": ratio, "error": error}


def _write(job: Job, rows: Sequence[Mapping[str, Any]]) -> None:
    """sweep.json, two pictures, and a report in the folder of every point."""
    folder = Path(job.folder)
    write_json(folder / RECORD, {"model": job.source.to_dict(), "data": job.eval_name, "rows": list(rows)})
    if find_spec("matplotlib") is None:
        job.say("note: pictures need matplotlib: pip install 'timm-knapsack[report]'")
    else:
        for cost, scale, label, title, file in PICTURES:
            series = trade_off_series(rows, cost, scale)
            chart(series, x_label=label, y_label="top-1, %", title=title, path=folder / file)
    for row in rows:
        if "folder" in row:
            record = RunRecord.load(folder / row["folder"])
            record.sweep = [dict(one) for one in rows]
            record.save(folder / row["folder"])
            write_report(folder / row["folder"])


# ---- the smallest network that loses at most so much --------------------------------------------------------------


def smallest_within(
    job: Job, drop: float, *, cost: str = "macs", table: Any = None
) -> tuple[Job, list[dict[str, Any]]]:
    """The smallest network that loses at most ``drop`` points of top-1 on held-out images; and all that were tried.

    Budgets are halved in on, to 2 % of the original's cost: accuracy falls with the budget, as far as noise lets it.

    Raises:
        BudgetError: where none loses so little.
    """
    if drop < 0:
        raise BudgetError(f"target_drop={drop}: points of top-1 that may be lost, such as 1.0")
    start(job)
    original = _top1(job, ORIGINAL)
    high, low, best = 1.0, LEAST, None
    tries: list[dict[str, Any]] = []
    while high - low > FINEST:
        share = round((high + low) / 2, 3)
        try:
            one = prune_again(job, budget_of(cost, share, table))
        except BudgetError as error:
            job.say(f"{share:.1%}: {error}")
            low = share
            continue
        lost = original - _top1(one, "recovered")
        tries.append({"share": share, "top1": original - lost, "lost": lost})
        job.say(f"{share:.1%} of the {COSTS[cost].label}: top-1 {original - lost:.2f} %, {lost:.2f} points lost")
        if lost <= drop + 1e-9:
            high, best = share, one
        else:
            low = share
    if best is None:
        least = min((row["lost"] for row in tries), default=float("nan"))
        raise BudgetError(
            f"no network loses at most {drop:g} points of top-1 (the least was {least:.2f}); allow for more, give "
            "more images to recover with, or fine-tune a larger one"
        )
    return replace(best, say=job.say, folder=job.folder), tries
