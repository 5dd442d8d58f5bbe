"""Tables as people read them: as HTML where a notebook shows a result, and how much of it."""

from collections.abc import Sequence
from html import escape
from typing import Any

MOST_ROWS = 24  # of a table in a notebook; a network has hundreds of layers


def html_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "", most: int = MOST_ROWS
) -> str:
    """A plain HTML table for a notebook, in its own style; the first column is text, the others are figures.

    Args:
        note: a line below it.
        most: rows that are shown; what is left out is counted.

    Example:
        >>> html_table("groups", ["name", "units"], [["conv1", 16], ["a<b", 8]], most=1)
        '<table><caption>groups</caption><thead><tr><th ...>name</th>...<td colspan="2">… and 1 more</td>...</table>'
    """
    sides = ["left", *["right"] * (len(head) - 1)]
    top = "".join(f'<th style="text-align:{side}">{escape(cell)}</th>' for cell, side in zip(head, sides, strict=True))
    body = ""
    for row in rows[:most]:
        cells = (f'<td style="text-align:{s}">{escape(str(cell))}</td>' for cell, s in zip(row, sides, strict=True))
        body += f"<tr>{''.join(cells)}</tr>"
    if len(rows) > most:
        body += f'<tr><td colspan="{len(head)}">… and {len(rows) - most} more</td></tr>'
    below = f"<p>{escape(note)}</p>" if note else ""
    caption = f"<caption>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{below}"
