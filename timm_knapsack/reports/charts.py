"""The charts of a report: what training did, what each width costs, accuracy against MACs."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .pictures import EXTRA, FAINT, GONE, KEPT, chart, draw_kept_channels, trade_off_series
from .run_record import RunRecord

MOST_CURVES = 6
TERMS = {"total": ("total", KEPT), "ce": ("cross-entropy", GONE), "kd": ("KD", EXTRA), "ikd": ("inner KD", FAINT)}


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw_charts(record: RunRecord, out: Path) -> tuple[dict[str, str], list[Path]]:
    """Figures by name (training, accuracy, curves, sweep, time) as HTML, those that there is data for; and files."""
    if not can_draw():
        return {}, []
    pictures = [out / "kept_channels.png", out / "kept_channels.svg"]
    for path in pictures:
        draw_kept_channels(record.pruning["layers"], path)
    figures = {}
    for name, file, made in (
        ("accuracy", "accuracy.png", _accuracy(record)),
        ("training", "training.png", _training(record)),
        ("curves", "value_curves.png", _curves(record.curves)),
        ("sweep", "accuracy_macs.png", sweep_chart(record.sweep)),
        ("time", "accuracy_time.png", time_chart(record.sweep)),
    ):
        if made is not None:
            figures[name] = figure(made, out / file)
            pictures.append(out / file)
    return figures, pictures


def figure(made: Mapping[str, Any], path: Path) -> str:
    """A chart, drawn into a file and as HTML."""
    return f"<figure>{chart(**made, path=path)}<figcaption>{escape(made['title'])}</figcaption></figure>"


def _training(record: RunRecord) -> dict[str, Any] | None:
    history = record.finetune.get("history") or []
    if len(history) < 2:
        return None
    steps = [row["update"] for row in history]
    series = [
        {"x": steps, "y": [row[key] for row in history], "label": label, "color": color}
        for key, (label, color) in TERMS.items()
        if any(row.get(key) for row in history)
    ]
    title = "Loss terms in fine-tuning (KD and inner KD without their weights)"
    return {"series": series, "title": title, "x_label": "update", "y_label": "loss", "log_y": True}


def _accuracy(record: RunRecord) -> dict[str, Any] | None:
    """From the start on, which is epoch 0: a single epoch is a line then, not a lonely dot."""
    points = {row["epoch"]: row["top1"] for row in record.finetune.get("evaluations") or () if "top1" in row}
    known = {row["what"]: row["top1"] for row in record.evaluations}
    start = known.get("recovered", known.get("pruned"))
    if points and 0 not in points and start is not None:
        points = {0: start, **points}
    if len(points) < 2:
        return None
    series = [{"x": list(points), "y": list(points.values()), "label": "pruned", "style": "both"}]
    if "original" in known:
        ends = [min(points), max(points)]
        series.append({"x": ends, "y": [known["original"]] * 2, "label": "original", "color": FAINT})
    title = "Accuracy after each epoch of fine-tuning; epoch 0 is where it starts"
    return {"series": series, "title": title, "x_label": "epoch", "y_label": "top-1, %", "percent": True}


def _curves(curves: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """What each width of the groups that lose most would cost, and which width was chosen."""
    if not curves:
        return None
    most = sorted(curves, key=lambda name: -_loss_at(curves[name]))[:MOST_CURVES]
    colors = (KEPT, GONE, EXTRA, FAINT, "#8a5fb0", "#b0485f")
    series = []
    for name, color in zip(most, colors, strict=False):
        curve = curves[name]
        shares = [100 * n / curve["size"] for n in curve["counts"]]
        inside = [(x, y) for x, y in zip(shares, curve["loss"], strict=True) if y > 0]
        series.append({"x": [x for x, _ in inside], "y": [y for _, y in inside], "label": name, "color": color})
        if curve["chosen"] < curve["size"]:
            point = {"x": [100 * curve["chosen"] / curve["size"]], "y": [_loss_at(curve)], "label": ""}
            series.append({**point, "color": color, "style": "points"})
    title = "The groups that lose most: what each width of one alone would cost, and the width that was chosen (dots)"
    return {
        "series": series, "title": title, "x_label": "channels kept, %", "y_label": "loss (KL divergence)",
        "log_y": True,
    }  # fmt: skip


def _loss_at(curve: Mapping[str, Any]) -> float:
    """The loss at the chosen width, between the widths that the record has."""
    counts, losses = curve["counts"], curve["loss"]
    for (left, high), (right, low) in zip(
        zip(counts, losses, strict=True), zip(counts[1:], losses[1:], strict=True), strict=False
    ):
        if left <= curve["chosen"] <= right:
            return high + (low - high) * (curve["chosen"] - left) / (right - left)
    return losses[-1]


def sweep_chart(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Accuracy against MACs, with the network that was chosen: from the original's dot to its own."""
    if not rows:
        return None
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    unit, word = (1e9, "billion") if max(row["macs"] for row in rows) >= 1e9 else (1e6, "million")
    colors = {"original": FAINT, "fine-tuned": EXTRA, "original, smaller images": GONE}
    markers = {"original": "s", "fine-tuned": "*", "original, smaller images": "^"}
    series = []
    for kind in kinds:
        points = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["macs"])
        series.append(
            {
                "x": [row["macs"] / unit for row in points], "y": [row["top1"] for row in points], "label": kind,
                "style": "both" if len(points) > 1 else "points", "marker": markers.get(kind, "o"),
                "color": colors.get(kind, KEPT), "size": 12 if markers.get(kind) == "*" else 5,
                "names": [row["what"] for row in points] if len(points) > 1 else [],
            }
        )  # fmt: skip
    ends = [next((row for row in rows if row["kind"] == kind), None) for kind in ("original", "fine-tuned")]
    arrow, title = None, "Top-1 of each network against its MACs"
    if all(ends):
        arrow = [(row["macs"] / unit, row["top1"]) for row in ends]
        title += "; the arrow leads from the original to the one that was chosen"
    return {
        "series": series, "title": title, "x_label": f"{word} MACs", "y_label": "top-1, %",
        "percent": True, "arrow": arrow,
    }  # fmt: skip


def time_chart(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Accuracy against measured time, where a sweep measured it."""
    series = trade_off_series(rows, "seconds", 1e3)
    labels = {"x_label": "ms for one batch", "y_label": "top-1, %"}
    return {"series": series, "title": "Accuracy against time", **labels, "percent": True} if series else None
