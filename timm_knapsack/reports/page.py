"""report.html: one self-contained file about a pruned model, and pictures of it for its card.

No script, no font and no picture is loaded from anywhere; it follows the reader's light or dark setting, and the bars
are plain HTML, so that they can be read on a phone.
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import KnapsackError, first_line
from ..files.atomic import write_text
from ..human_numbers import COST_COLUMNS, cost_text, human
from ..models.foreign_config import check_arguments, check_pretrained_cfg, read_saved_config
from ..models.rebuild import base_on_meta
from ..slim.channel_config import ChannelConfig
from ..slim.cutting import resize_model
from .charts import can_draw, draw_charts, figure, sweep_chart
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
    stages = stage_macs(folder)
    try:
        record.pruning["layers"] = _in_network_order(record.pruning["layers"], folder)
        page, pictures = _page(record, stages, out)
    except KnapsackError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise KnapsackError(
            f"the record of {folder} can't be shown (record.json: {first_line(error)}); is it damaged?"
        ) from error
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
    saved = read_saved_config(folder / "config.json")
    cfg = saved.get("pretrained_cfg", {})
    check_pretrained_cfg(cfg)
    classes = {"num_classes": saved.get("num_classes", 1000)}
    check_arguments(classes)
    return base_on_meta(config, {**config.base_args, **classes}), config, cfg.get("input_size") or (3, 224, 224)


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
    figures, pictures = draw_charts(record, out)
    rows = accuracy_rows(record)
    both = "".join(figures.get(name, "") for name in ("accuracy", "training"))
    if not can_draw():
        both = "<p>Charts need matplotlib: pip install 'timm-knapsack[report]'</p>"
    trade_off = figures.get("sweep", "") + figures.get("time", "")
    sections = [
        _section("Asked, counted, measured", _cost_table(record), _cost_note(pruning)),
        _section("Accuracy", _accuracy_table(rows)) if rows else "",
        _section("Accuracy against MACs", *_sweep_parts(record.sweep, trade_off)) if record.sweep else "",
        _section("Fine-tuning", _charts_of(both)) if both else "",
        _section("What each width would cost", _charts_of(figures["curves"])) if "curves" in figures else "",
        _section("MACs of each stage", _legend() + _bars(_stage_rows(stages))) if stages else "",
        _section("Output channels of each layer", _legend() + _bars(_layer_rows(pruning["layers"]))),
        _section("How it was made", _details(record)),
    ]
    title = f"{pruning['model']}, pruned"
    command = f"<p><code>{escape(record.command)}</code></p>" if record.command else ""
    body = f"<header><h1>{escape(title)}</h1>{command}{_cards(record)}</header>" + "".join(sections)
    return _document(title, body), pictures


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>\n{STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _cards(record: RunRecord) -> str:
    cards = []
    first, last = _ends(accuracy_rows(record))
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


def accuracy_rows(record: RunRecord) -> list[dict[str, Any]]:
    """What was evaluated; where nothing was, what pruning saw on the images it was given, if they have labels."""
    loss = record.pruning.get("loss") or {}
    if record.evaluations or loss.get("top1_before") is None:
        return record.evaluations
    about = {"samples": loss["images"], "data": "the images given, which the refit has seen"}
    after = "recovered" if loss["recovered"] else "pruned"
    found = {"original": loss["top1_before"], after: loss["top1_after"]}
    return [{"what": what, "top1": top1, **about} for what, top1 in found.items()]


def _ends(rows: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    first = next((row for row in rows if row["what"] == "original"), None)
    last = next((row for row in reversed(rows) if row["what"] != "original"), None)
    return first, last


def _cost_table(record: RunRecord) -> str:
    rows = [cost_text(line) for line in record.pruning["costs"]]
    time = record.latency
    if time and not any(line["unit"] == "s" for line in record.pruning["costs"]):
        share = f"{human(time['pruned'], 's')} ({time['pruned'] / time['original']:.1%})"
        where = f"time, batch {time['batch_size']}, {time.get('device', '')}, {_threads(time.get('threads'))}"
        rows.append([where, human(time["original"], "s"), "–", "–", "–", share])
    return _table(COST_COLUMNS, rows)


def _threads(count: int | None) -> str:
    return "? threads" if count is None else f"{count} thread{'s' if count > 1 else ''}"


def _cost_note(pruning: Mapping[str, Any]) -> str:
    """How good the choice is, and how sure that is: what the solver has proved, in words."""
    value, bound, whole = pruning["value"], pruning.get("upper_bound"), pruning.get("total_value")
    if pruning.get("predicted_loss") is not None:
        predicted, gap = pruning["predicted_loss"], pruning.get("loss_gap")
        lost, note = pruning.get("loss") or {}, ""
        if isinstance(lost.get("measured"), (int, float)):
            kind = escape(str(lost.get("kind")))
            refit = "once recovered, " if lost.get("recovered") else ""
            note = f"Measured, {refit}it loses {lost['measured']:.3g} ({kind} from the original's outputs). "
        scale = "as a quick refit in its trial, on images held out" if pruning.get("trials") else "group by group"
        note += f"Predicted from the curves below ({scale}), this choice loses {predicted:.3g}"
        possible = None if bound is None or gap is None else f"{max(0.0, predicted - gap):.3g}"
        less = "lose less"
    elif whole:
        note = f"This choice keeps {value / whole:.2%} of the importance of all channels"
        possible = None if bound is None else f"{bound / whole:.2%}"
        less = "keep more"
    else:
        return ""
    if possible is None:  # an infinite bound is null in JSON
        return f"<p>{note}.</p>"
    if bound - value <= 1e-6 * max(abs(value), 1e-12):
        return f"<p>{note}. By these values no other choice at this cost would {less}: the solver has proved it.</p>"
    best = f"no choice at this cost can do better than {possible}: the solver has proved it"
    return f"<p>{note}. By these values {best}.</p>"


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


def _charts_of(*figures: str) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _sweep_parts(rows: Sequence[Mapping[str, Any]], figure: str | None) -> tuple[str, ...]:
    """Chart, table and a note about them."""
    whole = next((row["macs"] for row in rows if row["kind"] == "original"), None)
    cells = [
        [
            row["what"] if row["what"] == row["kind"] else f"{row['kind']}, {row['what']}", human(row["macs"]),
            f"{row['macs'] / whole:.1%}" if whole else "–", f"{row['top1']:.2f} %",
        ]
        for row in sorted(rows, key=lambda row: -row["macs"])
    ]  # fmt: skip
    note = "<p>Every point was measured on the same images.</p>"
    if any(row["kind"] == "original, smaller images" for row in rows):
        note = note.replace("</p>", " The original on smaller images is the baseline that costs nothing to make.</p>")
    return _charts_of(figure) if figure else "", _table(("network", "MACs", "left", "top-1"), cells), note


def write_sweep_page(rows: Sequence[Mapping[str, Any]], out: str | os.PathLike, title: str) -> Path:
    """A page of a sweep alone: one network at several budgets.

    Args:
        rows: as `RunRecord.sweep` has them: mappings with what, kind, macs and top1.
        out: folder for ``sweep.html`` and, where matplotlib is installed, ``accuracy_macs.png``.

    Example:
        >>> points = [{"what": "original", "kind": "original", "macs": 4e7, "top1": 91.7}]
        >>> points += [{"what": "50%", "kind": "pruned and recovered", "macs": 2e7, "top1": 87.4}]
        >>> write_sweep_page(points, "pages", "resnet20 at several budgets").name
        'sweep.html'
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    drawn = figure(sweep_chart(rows), out / "accuracy_macs.png") if rows and can_draw() else ""
    body = f"<header><h1>{escape(title)}</h1></header>{_section('Accuracy against MACs', *_sweep_parts(rows, drawn))}"
    return write_text(out / "sweep.html", _document(title, body))


def _label_weight(inner: Mapping[str, Any]) -> float:
    """As `DistillationConfig.label_weight`, of what a record holds."""
    given = inner.get("ce_weight")
    return given if given is not None else 0.0 if inner.get("kd_weight") else 1.0


def _details(record: RunRecord) -> str:
    pruning = record.pruning
    facts = {
        "budget": ", ".join(f"{k}={v}" for k, v in pruning.get("options", {}).get("budget", {}).items()),
        "scores": ", ".join(f"{k} {v}" for k, v in pruning.get("scores", {}).items() if v not in ("", 0)),
        "input": " × ".join(str(n) for n in pruning.get("input_size", ())),
        "solver": f"{pruning.get('rounds', 0)} re-costed knapsacks, {pruning.get('seconds', 0):.2f} s",
        "blocks removed": ", ".join(pruning.get("blocks", ())),
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
            f"the losses: labels {_label_weight(inner)}, KD {inner.get('kd_weight')}, inner KD "
            f"{inner.get('ikd_weight')} at {inner.get('ikd_at')}"
        )
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items() if value)
    return f"<dl>{rows}</dl>"
