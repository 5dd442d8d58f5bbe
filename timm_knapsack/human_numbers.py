"""Numbers as people read them: 2.05 G, 25.6 M, 12.3 ms."""

from collections.abc import Mapping
from typing import Any


def human(value: float | None, unit: str = "") -> str:
    """A number with three to four digits, and its unit.

    Example:
        >>> human(4089184256), human(0.0123, "s"), human(6422528, "B"), human(None)
        ('4.09 G', '12.3 ms', '6.42 MB', '')
    """
    if value is None:
        return ""
    if unit and abs(value) < 1:
        return f"{value * 1e3:.3g} m{unit}"
    if unit == "s":
        return f"{value:.3g} s"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{0 if value >= 100 * size else 1 if value >= 10 * size else 2}f} {letter}{unit}"
    return f"{value:.4g} {unit}".rstrip()


COST_COLUMNS = ("cost", "original", "asked", "counted", "left", "measured")


def cost_text(line: Mapping[str, Any]) -> list[str]:
    """A row of a cost table, a text for each of `COST_COLUMNS`."""
    name = line.get("label") or line["name"]
    unit = "" if line["unit"] == name else line["unit"]  # what is counted has its unit for a name
    measured = line.get("measured")
    if measured is not None and line.get("original_measured"):
        measured = f"{human(measured, unit)} ({measured / line['original_measured']:.1%})"
    return [
        name,
        human(line["original"], unit),
        human(line.get("asked"), unit) or "–",
        human(line["counted"], unit),
        f"{line['counted'] / line['original']:.1%}",
        measured or "–",
    ]
