"""report.html: one self-contained file about a pruned model, and pictures of it for its card.

No script, no font and no picture is loaded from anywhere; it follows the reader's light or dark setting, and the bars
are plain HTML, so that they can be read on a phone.
"""

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import KnapsackError
from ..files.atomic import write_text
from ..human_numbers import cost_text, human
from ..models.rebuild import base_on_meta
from ..slim.channel_config import ChannelConfig
from ..slim.cutting import resize_model
from .pictures import EXTRA, FAINT, GONE, KEPT, chart, draw_kept_channels, trade_off_series
from .run_record import RunRecord

STYLE = Path(__file__).with_name("report.css")


def write_report(folder: str | os.PathLike, out: str | os.PathLike | None = None) -> list[Path]:
    """Write ``report.html`` and, where matplotlib is installed, the pictures; returns the files, the page first.

    Args:
        folder: a saved pruned model with its ``record.json``, as the command line writes it.
        out: folder for the files; ``folder`` itself by default.

    Example:
        >>> write_report("resnet20-half")[0].name
        'report.html'
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise KnapsackError(f"there is no folder {folder}; `prune`, `finetune`, `run` and `quickstart` write one")
    record = RunRecord.load(folder)
    if not record.pruning:
        raise KnapsackError(f"{folder} has no record of a pruning run (record.json); `timm-knapsack prune` writes one")
    out = folder if out is None else Path(out)
    out.mkdir(parents=True, exist_ok=True)
    record.pruning["layers"] = _in_network_order(record.pruning["layers"], folder)
    page, pictures = _page(record, stage_macs(folder), out)
    return [write_text(out / "report.html", page), *pictures]


def stage_macs(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """MACs of each stage before and after, counted on the meta device: rows with stage, original, counted.

    Example:
        >>> stage_macs("resnet20-half")[0]
        {'stage': 'conv1', 'original': 442368, 'counted': ...}
    """
    base, config, size = _architecture(Path(folder))
    if base is None:
        return []
    before, after = _macs_by_stage(base, size), _macs_by_stage(resize_model(base, config), size)
    return [{"stage": name, "original": macs, "counted": after.get(name, 0)} for name, macs in before.items() if macs]


def _architecture(folder: Path) -> tuple[Any, Any, Sequence[int]]:
    """The base on the meta device, the channel config and the input size; Nones where the folder has no model."""
    if not (folder / "channels.json").exists():
        return None, None, ()
    config = ChannelConfig.load(folder / "channels.json")
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = saved.get("pretrained_cfg", {}).get("input_size") or (3, 224, 224)
    return base_on_meta(config, {**config.base_args, "num_classes": saved.get("num_classes", 1000)}), config, size


def _in_network_order(layers: Sequence[Mapping[str, Any]], folder: Path) -> list[Mapping[str, Any]]:
    """A pruning report lists layers group by group; people look for them in the order of the network."""
    base, _, _ = _architecture(folder)
    order = {name: number for number, (name, _) in enumerate(base.named_modules())} if base is not None else {}
    return sorted(layers, key=lambda row: order.get(row["name"], len(order)))


def _macs_by_stage(model, size: Sequence[int]) -> dict[str, int]:
    stages = []
    for name, child in model.named_children():
        inner = [n for n, _ in child.named_children()] if isinstance(child, (nn.Sequential, nn.ModuleList)) else []
        several = inner and all(n.isdigit() for n in inner) and not name[-1].isdigit() and len(inner) <= 16
        stages += [f"{name}.{n}" for n in inner] if several else [name]
    with torch.no_grad(), FlopCounterMode(display=False, depth=None) as counter:
        model.eval()(torch.empty((1, *size), device="meta"))
    counts = counter.get_flop_counts()
    head = type(model).__name__
    return {stage: sum(counts.get(f"{head}.{stage}", {}).values()) // 2 for stage in stages}


# ---- the page -----------------------------------------------------------------------------------------------------


def _page(record: RunRecord, stages: list[dict[str, Any]], out: Path) -> tuple[str, list[Path]]:
    pruning = record.pruning
    charts, pictures = _charts(record, out)
    sections = [
        _section("Asked, counted, measured", _cost_table(record), _cost_note(pruning)),
        _section("Accuracy", _accuracy_table(record.evaluations)) if record.evaluations else "",
        _section("Training and trade-off", f'<div class="charts">{charts}</div>', _sweep_note(record))
        if charts
        else "",
        _section("MACs of each stage", _legend() + _bars(_stage_rows(stages))) if stages else "",
        _section("Output channels of each layer", _legend() + _bars(_layer_rows(pruning["layers"]))),
        _section("How it was made", _details(record)),
    ]
    title = f"{pruning['model']}, pruned"
    command = f"<p><code>{escape(record.command)}</code></p>" if record.command else ""
    body = f"<header><h1>{escape(title)}</h1>{command}{_cards(record)}</header>" + "".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>\n{STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    ), pictures


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _cards(record: RunRecord) -> str:
    cards = []
    first, last = _ends(record.evaluations)
    if first and last:
        cards.append(("top-1", f"{last['top1']:.2f} %", f"was {first['top1']:.2f} %"))
    elif last:
        cards.append(("top-1", f"{last['top1']:.2f} %", str(last["what"])))
    for line in record.pruning["costs"]:
        row = cost_text(line)
        cards.append((row[0], row[3], f"{row[4]} of {row[1]}"))
    time = record.latency
    if time:
        share = f"{time['pruned'] / time['original']:.1%} of {human(time['original'], 's')}"
        cards.append((f"time, batch {time['batch_size']}", human(time["pruned"], "s"), share))
    cells = (f"<div><b>{escape(n)}</b><strong>{escape(v)}</strong><span>{escape(t)}</span></div>" for n, v, t in cards)
    return f'<div class="cards">{"".join(cells)}</div>'


def _ends(rows: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    first = next((row for row in rows if row["what"] == "original"), None)
    last = next((row for row in reversed(rows) if row["what"] != "original"), None)
    return first, last


def _cost_table(record: RunRecord) -> str:
    rows = [cost_text(line) for line in record.pruning["costs"]]
    time = record.latency
    if time and not any(line["unit"] == "s" for line in record.pruning["costs"]):
        share = f"{human(time['pruned'], 's')} ({time['pruned'] / time['original']:.1%})"
        where = f"time, batch {time['batch_size']}, {time.get('device', '')}, {time.get('threads', '?')} threads"
        rows.append([where, human(time["original"], "s"), "–", "–", "–", share])
    return _table(("cost", "original", "asked", "counted", "left", "measured"), rows)


def _cost_note(pruning: Mapping[str, Any]) -> str:
    if not pruning.get("total_value"):
        return ""
    value, bound = pruning["value"], pruning.get("upper_bound")
    note = f"Importance kept: {value / pruning['total_value']:.2%}. The last knapsack's value is {value:.6g}"
    if bound is not None:  # an infinite one is null in JSON
        gap = max(bound - value, 0)
        note += f"; no choice at the final widths' costs could exceed {bound:.6g} (a gap of {gap:.2g})"
    return f"<p>{note}.</p>"


def _accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    first, _ = _ends(rows)
    cells = []
    for row in rows:
        change = f"{row['top1'] - first['top1']:+.2f}" if first and row is not first else "–"
        top5 = f"{row['top5']:.2f} %" if row.get("top5") is not None else "–"
        cells.append(
            [row["what"], f"{row['top1']:.2f} %", change, top5, f"{row.get('samples', '')}", row.get("data") or ""]
        )
    return _table(("network", "top-1", "change", "top-5", "images", "data"), cells)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for row in rows:  # on a narrow screen each cell shows its own heading, and empty ones are left out
        cells = (
            f'<td data-label="{name}" class="{"none" if cell in ("–", "") else "some"}">{escape(str(cell))}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend() -> str:
    return '<p class="legend"><i class="kept"></i> kept <i class="gone"></i> removed</p>'


def _layer_rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float, str]]:
    return [(row["name"], row["kept"], row["original"], f"{row['kept']} of {row['original']}") for row in layers]


def _stage_rows(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float, str]]:
    return [
        (row["stage"], row["counted"], row["original"], f"{human(row['counted'])} of {human(row['original'])}")
        for row in stages
    ]


def _bars(rows: Sequence[tuple[str, float, float, str]]) -> str:
    """Bars whose whole length is the original's, relative to the largest."""
    most = max(whole for _, _, whole, _ in rows)
    lines = []
    for name, kept, whole, text in rows:
        share, length = 100 * kept / whole if whole else 0, 100 * whole / most
        lines.append(
            f'<div class="bar"><span class="name">{escape(name)}</span><span class="track"><span class="whole" '
            f'style="width:{length:.2f}%"><span class="kept" style="width:{share:.2f}%"></span></span></span>'
            f'<span class="number">{escape(text)}<small> {share:.0f} %</small></span></div>'
        )
    return f'<div class="bars">{"".join(lines)}</div>'


def _sweep_note(record: RunRecord) -> str:
    if not record.sweep:
        return ""
    return (
        "<p>Every point of the trade-off was measured on the same images. The original on smaller images is the "
        "baseline that costs nothing to make.</p>"
    )


def _details(record: RunRecord) -> str:
    pruning = record.pruning
    facts = {
        "budget": ", ".join(f"{k}={v}" for k, v in pruning.get("options", {}).get("budget", {}).items()),
        "scores": ", ".join(f"{k} {v}" for k, v in pruning.get("scores", {}).items() if v not in ("", 0)),
        "input": " × ".join(str(n) for n in pruning.get("input_size", ())),
        "solver": f"{pruning.get('rounds', 0)} re-costed knapsacks, {pruning.get('seconds', 0):.2f} s",
        "frozen": "; ".join(f"{name}: {reason}" for name, reason in list(pruning.get("frozen", {}).items())[:12]),
    }
    for name, about in pruning.get("options", {}).items():
        if name.endswith(" conditions"):
            facts[name] = ", ".join(f"{key} {value}" for key, value in about.items())
    config = record.finetune.get("config") or {}
    if config:
        inner = config.get("distillation", {})
        facts["fine-tuning"] = (
            f"{config['epochs']} epochs, {config['optimizer']}, lr {config['lr']}, {config['scheduler']}; weights of "
            f"the losses: KD {inner.get('kd_weight')}, inner KD {inner.get('ikd_weight')} at {inner.get('ikd_at')}"
        )
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items() if value)
    return f"<dl>{rows}</dl>"


# ---- charts -------------------------------------------------------------------------------------------------------


def _charts(record: RunRecord, out: Path) -> tuple[str, list[Path]]:
    if find_spec("matplotlib") is None:
        return "<p>Charts need matplotlib: pip install 'timm-knapsack[report]'</p>", []
    pictures = [out / "kept_channels.png", out / "kept_channels.svg"]
    for path in pictures:
        draw_kept_channels(record.pruning["layers"], path)
    charts = []

    def add(file: str, caption: str, series: list[dict[str, Any]], **options) -> None:
        path = out / file
        svg = chart(series, title=caption, path=path, **options)
        pictures.append(path)
        charts.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")

    history = record.finetune.get("history") or []
    if len(history) > 1:
        steps = [row["update"] for row in history]
        names = {
            "total": ("total", KEPT),
            "ce": ("cross-entropy", GONE),
            "kd": ("KD", EXTRA),
            "ikd": ("inner KD", FAINT),
        }
        series = [
            {"x": steps, "y": [row[key] for row in history], "label": label, "color": color}
            for key, (label, color) in names.items()
            if any(row.get(key) for row in history)
        ]
        caption = "Loss terms in fine-tuning (KD and inner KD without their weights)"
        add("training.png", caption, series, x_label="update", y_label="loss", log_y=True)
    tested = record.finetune.get("evaluations") or []
    if tested:
        series = [
            {
                "x": [r["epoch"] for r in tested],
                "y": [r["top1"] for r in tested],
                "label": "fine-tuned",
                "style": "both",
            }
        ]
        first, _ = _ends(record.evaluations)
        if first:
            ends = [tested[0]["epoch"], max(tested[-1]["epoch"], tested[0]["epoch"] + 1)]
            series.append({"x": ends, "y": [first["top1"]] * 2, "label": "original", "color": FAINT})
        add("accuracy.png", "Accuracy after each epoch of fine-tuning", series, x_label="epoch", y_label="top-1, %")
    if record.sweep:
        series = trade_off_series(record.sweep, "macs", 1e-6)
        add("accuracy_macs.png", "Accuracy against MACs", series, x_label="million MACs", y_label="top-1, %")
        if series := trade_off_series(record.sweep, "seconds", 1e3):
            add("accuracy_time.png", "Accuracy against time", series, x_label="ms for one batch", y_label="top-1, %")
    return "".join(charts), pictures
