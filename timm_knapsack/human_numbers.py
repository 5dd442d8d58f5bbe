"""Numbers as people read them: 2.05 G, 25.6 M, 12.3 ms."""

from collections.abc import Mapping
from typing import Any


def human(value: float | None, unit: str = "") -> str:
    """A number with three to four digits.

    Example:
        >>> human(4089184256), human(0.0123, "s"), human(None)
        ('4.09 G', '12.3 ms', '')
    """
    if value is None:
        return ""
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{0 if value >= 100 * size else 1 if value >= 10 * size else 2}f} {letter}"
    return f"{value:.4g}"


def cost_text(line: Mapping[str, Any]) -> list[str]:
    """A row of a cost table: name, original, asked, counted, left, measured."""
    unit = "s" if line["name"] == "latency" else ""
    measured = line.get("measured")
    if measured is not None and line.get("original_measured"):
        measured = f"{human(measured, unit)} ({measured / line['original_measured']:.1%})"
    name = {"macs": "MACs", "params": "parameters", "latency": "time"}.get(line["name"], line["name"])
    return [
        name,
        human(line["original"], unit),
        human(line.get("asked"), unit) or "–",
        human(line["counted"], unit),
        f"{line['counted'] / line['original']:.1%}",
        measured or "–",
    ]
