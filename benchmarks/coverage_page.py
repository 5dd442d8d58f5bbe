"""docs/coverage_all.md, from the rows of benchmarks/coverage_all.csv: a summary, and a table with a filter box."""

import csv
import json
from collections import Counter
from pathlib import Path
from statistics import median

BEFORE = Path(__file__).with_name("attention_before.csv")  # `make sweep` of 2026-11-16, at fdbf9b1

FILTER = """<input id="filter" type="search" placeholder="a name or a family, such as swin or efficientnet_b"
  style="width: 100%; padding: .5em; border: 1px solid; border-radius: .2em">
<script>
  document.getElementById("filter").addEventListener("input", event => {
    const words = event.target.value.toLowerCase().split(" ").filter(Boolean)
    for (const row of document.querySelectorAll("article table:last-of-type tbody tr"))
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word))
  })
</script>"""


def numbers(rows: list[dict], names: int) -> dict:
    """What the summary says, as numbers."""
    done = [row for row in rows if row["status"] != "crash"]
    frozen = Counter()
    for row in done:
        frozen.update(reason for reason in json.loads(row["frozen"] or "{}") if reason != "the model's output")
    return {
        "names": names,
        "rows": len(rows),
        "crash": sum(row["status"] == "crash" for row in rows),
        "wrong": sum(row["status"] == "wrong" for row in rows),
        "half": sum(row["status"] == "pass" for row in rows),
        "values": sum(row.get("values") == "values" for row in rows),
        "median": median(float(row["removable"]) for row in done) if done else 0,
        "hours": sum(float(row["cpu_s"] or 0) for row in rows) / 3600,
        "codes": Counter(row["code"] for row in rows).most_common(),
        "frozen": frozen.most_common(),
    }


def summary(rows: list[dict], names: int) -> str:
    """In plain lines, for the terminal."""
    n = numbers(rows, names)
    lines = [
        f"{n['rows']} of {n['names']} names; crashed {n['crash']}, wrong {n['wrong']}; {n['half']} reach 50 % of the "
        f"MACs ({n['half'] / max(1, n['rows']):.1%}); median removable {n['median']:.4f}; {n['values']} by values; "
        f"{n['hours']:.1f} CPU hours; rows by code: {n['codes']}",
        *(f"{count:>5} names  {reason}" for reason, count in n["frozen"]),
    ]
    return "\n".join(lines)


def attention(rows: list[dict]) -> list[str]:
    """Families with attention: what could go before their widths were left open, and what can go now."""
    now = {row["model"]: row for row in rows}
    with open(BEFORE, newline="") as file:
        before = [row for row in csv.DictReader(file) if row["model"] in now]
    lines = ["## Attention, before and after", "", "| name | groups | removable | oracle |", "|---|---|---|---|"]
    for row in before:
        new = now[row["model"]]
        groups, removable = (f"{row[key]} → {new[key]}" for key in ("groups", "removable"))
        lines.append(f"| {row['model']} | {groups} | {removable} | {new['oracle']} |")
    return [*lines, ""]


def page(rows: list[dict], names: int, code: str) -> str:
    """The page in Markdown; ``code`` is the digest of the code as it is now."""
    n = numbers(rows, names)
    lines = [
        "# Every name of timm",
        "",
        f"{n['rows']} of the {n['names']} names of the installed timm were run by `make sweep-all`: {n['crash']} "
        f"crash, {n['wrong']} come out wrong, **{n['half']} ({n['half'] / max(1, n['rows']):.1%}) reach 50 % of their "
        f"MACs**. The median share of the MACs that can go is {n['median']:.4f}. {n['values']} of them were compared "
        "by values, trained a step, saved and loaded; the others were tried on the meta device. The checks are "
        "described at the top of benchmarks/coverage_all.py, the rows with all columns are in "
        "benchmarks/coverage_all.csv.",
        "",
        f"The code that finds and cuts channels (channels/ and slim/) has the digest {code}; rows by the digest of the "
        f"code that made them: {', '.join(f'{digest} {count}' for digest, count in n['codes'])}.",
        "",
        "*removable*: share of the MACs gone when each group keeps a single unit. *left*: MACs at budgets of 70, 50 "
        "and 30 %, or of the smallest network there is. *oracle*: largest relative difference between slim and masked.",
        "",
        "| names | why something in them is frozen |",
        "|---|---|",
        *(f"| {count} | {reason.replace('|', '/')} |" for reason, count in n["frozen"]),
        "",
        *attention(rows),
        "## All rows",
        "",
        FILTER,
        "",
        "| name | file | params, M | groups | removable | left | oracle | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["model"]):
        left = " ".join(f"{float(row[f'left_{b}']):.2f}" for b in (70, 50, 30) if row[f"left_{b}"])
        result = row["status"] + (f": {row['error']}" if row["error"] else "")
        cells = (
            row["model"],
            row["module"],
            row["params_m"],
            row["groups"],
            row["removable"],
            left,
            row["oracle"],
            result,
        )
        lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"
