"""Pictures of a pruning run, with matplotlib (extra ``report``): files for model cards, inline SVG for report.html."""

import io
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import KnapsackError
from ..files.atomic import replacing_file
from ..human_numbers import human

KEPT, GONE, EXTRA, FAINT = (
    "#2a78b8",
    "#e0904a",
    "#3f9e63",
    "#8a8f98",
)  # told apart by light and dark, and by the colour-blind
BEND = 0.06  # of an arrow
INK = "#010203"  # stands for the page's own text colour, which follows light and dark


def _pyplot():
    try:
        import matplotlib
        import matplotlib.ticker
    except ImportError:
        raise KnapsackError("pictures need matplotlib: pip install 'timm-knapsack[report]'") from None
    from matplotlib.figure import Figure

    return matplotlib, Figure


def draw_kept_channels(layers: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Kept and removed output channels of every layer, as in the paper's supplement.

    Args:
        layers: rows with name, original and kept.
        path: its ending says the format: .png or .svg.

    Example:
        >>> draw_kept_channels([{"name": "conv1", "original": 64, "kept": 40}], "kept.png")
    """
    matplotlib, Figure = _pyplot()
    names = [row["name"] for row in layers]
    kept = [row["kept"] for row in layers]
    gone = [row["original"] - row["kept"] for row in layers]
    height = max(2.2, 0.17 * len(layers) + 1.0)
    with matplotlib.rc_context({"font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, height), layout="constrained")
        axes = figure.subplots()
        places = range(len(layers))
        axes.barh(places, kept, color=KEPT, label="kept")
        axes.barh(places, gone, left=kept, color=GONE, label="removed")
        axes.set_yticks(places, names)
        axes.set_ylim(len(layers) - 0.4, -0.6)
        axes.set_xlabel("output channels")
        axes.legend(loc="upper right", frameon=True)
        axes.spines[["top", "right"]].set_visible(False)
        with replacing_file(path) as new:
            figure.savefig(new, dpi=120, facecolor="white")


def chart(
    series: Sequence[Mapping[str, Any]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    log_y: bool = False,
    percent: bool = False,
    arrow: Sequence[tuple[float, float]] | None = None,
    path: str | os.PathLike | None = None,
) -> str:
    """Lines or points as inline SVG that takes the colours of its page; with ``path`` also as a picture.

    Args:
        series: mappings with x, y, label, and optionally color, style ("line", "points", "both"), marker, size, and
            names of points, which are left out where there is no room for them.
        percent: the y axis is in percent and ends at 100.
        arrow: from one point to another.
    """
    matplotlib, Figure = _pyplot()
    settings = {
        "font.size": 10, "svg.fonttype": "none", "font.family": "sans-serif", "text.color": INK, "axes.labelcolor": INK,
        "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK, "svg.hashsalt": title,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.subplots()
        for number, one in enumerate(series):
            color = one.get("color", (KEPT, GONE, EXTRA, FAINT)[number % 4])
            style = one.get("style", "line")
            axes.plot(
                one["x"], one["y"], label=one["label"] or "_", color=color, linewidth=1.6,
                linestyle="none" if style == "points" else "-",
                marker=one.get("marker", "o") if style != "line" else None,
                markersize=one.get("size", 5), clip_on=not percent, zorder=3,
            )  # fmt: skip
        if arrow is not None:
            style = {"arrowstyle": "->", "color": FAINT, "shrinkA": 6, "shrinkB": 9}
            style["connectionstyle"] = f"arc3,rad={BEND}"
            axes.annotate("", arrow[1], xytext=arrow[0], arrowprops=style)
        if log_y and all(value > 0 for one in series for value in one["y"]):
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            subs = (1, 2, 5) if high / low < 300 else (1,)  # labels of every step would overlap
            axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs))
            axes.yaxis.set_major_formatter(_plain_numbers)
            axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        if all(float(value).is_integer() for one in series for value in one["x"]):  # there is no epoch 0.5
            axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color=FAINT, alpha=0.25, linewidth=0.6)
        if percent:
            low = min(value for one in series for value in one["y"])
            axes.set_ylim(max(0.0, low - 0.15 * (100 - low) - 0.5), 100)
        if sum(bool(one["label"]) for one in series) > 1:
            place = {"loc": "outside upper left", "ncols": 2}
            figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, **place)
        _name_points(figure, axes, series, arrow)
        if path is not None:
            with replacing_file(path) as new:
                figure.savefig(new, dpi=140, facecolor="white")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _inline(text.getvalue(), title)


def _plain_numbers(value: float, place: int) -> str:
    """Ticks of a logarithmic axis: 0.001, and 10⁻⁵ where the zeros would have to be counted."""
    if value >= 1e-3:
        return f"{value:g}"
    digits, power = f"{value:.0e}".split("e")
    power = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if digits == "1" else f"{digits}·10{power}"


# Where the name of a point may stand: offset in points, and what of it is nearest to the point.
PLACES = (
    *(((5, -4), "left", "top"), ((5, 4), "left", "bottom"), ((-5, 4), "right", "bottom"), ((-5, -4), "right", "top")),
)


def _name_points(
    figure: Any, axes: Any, series: Sequence[Mapping[str, Any]], arrow: Sequence[tuple[float, float]] | None = None
) -> None:
    """Write names beside points, each where it covers no point, other name or arrow; else not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    named = [(x, y, n) for one in series for x, y, n in zip(one["x"], one["y"], one.get("names", ()), strict=False)]
    if not named:
        return
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # the layout is known from here on
    renderer, inside = canvas.get_renderer(), axes.get_window_extent()
    dots = [axes.transData.transform(p) for one in series for p in zip(one["x"], one["y"], strict=True)]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    if arrow is not None:
        first, last = (axes.transData.transform(end) for end in arrow)
        (x, y), (width, height) = (first + last) / 2, last - first
        bend = np.array([x + BEND * height, y - BEND * width])  # as matplotlib has it in "arc3"
        for t in np.linspace(0, 1, 60):
            x, y = (1 - t) ** 2 * first + 2 * t * (1 - t) * bend + t**2 * last
            taken.append(Bbox.from_extents(x - 1, y - 1, x + 1, y + 1))
    for x, y, name in named:
        for offset, side, edge in PLACES:
            words = axes.annotate(
                name, (x, y), xytext=offset, textcoords="offset points", ha=side, va=edge, fontsize=8
            )  # fmt: skip
            box = words.get_window_extent(renderer)
            whole = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if whole and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            words.remove()


def trade_off_series(rows: Sequence[Mapping[str, Any]], cost: str, scale: float = 1.0) -> list[dict[str, Any]]:
    """Series for `chart` of the rows of a sweep: top-1 against a cost, one series for each kind of network.

    Example:
        >>> row = {"what": "50%", "kind": "pruned", "macs": 2e6, "top1": 70.0}
        >>> trade_off_series([row], "macs", 1e-6)[0]["x"], trade_off_series([row], "seconds")
        ([2.0], [])
    """
    rows = [row for row in rows if row.get(cost) is not None]
    series = []
    for marker, kind in zip("*Dos^v", dict.fromkeys(row["kind"] for row in rows), strict=False):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row[cost])
        series.append(
            {
                "x": [row[cost] * scale for row in own], "y": [row["top1"] for row in own], "label": kind,
                "style": "both" if len(own) > 1 else "points", "marker": marker,
                "names": [row["what"] for row in own] if len(own) > 1 else [],
            }
        )  # fmt: skip
    return series


def _inline(svg: str, title: str) -> str:
    """One SVG element without the XML head, sized by its page, in its page's text colour, with unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    mark = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{mark}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{mark}-\1)", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("font: ", "font-family: inherit; font: ")
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def stage_of(layer: str) -> str:
    """The part of the network a layer is in: ``layer2.0.conv1`` → ``layer2``, ``blocks.3.1.conv_pw`` → ``blocks.3``.

    Example:
        >>> stage_of("layer2.0.conv1"), stage_of("blocks.3.1.conv_pw"), stage_of("fc")
        ('layer2', 'blocks.3', 'fc')
    """
    parts = layer.split(".")
    if len(parts) == 1:
        return layer
    return ".".join(parts[:2]) if parts[1].isdigit() and not parts[0][-1:].isdigit() else parts[0]


__all__ = ["chart", "draw_kept_channels", "human", "stage_of", "trade_off_series"]
