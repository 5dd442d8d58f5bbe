"""Which layers `tk.recover` fits in each timm family, which it leaves alone, and why: a section of docs/coverage.md.

    python benchmarks/fitted_layers.py [--models NAME …] [--images 1000] [--timeout 300]

One model of each family (those of benchmarks/coverage.csv), with random live weights, cut to about half of its MACs.
Nothing is fitted: each layer's plan is made as `recover` makes it, from runs of two images at the model's own size, for
the number of images given. Each model runs in a process of its own; rows go to benchmarks/fitted_layers.csv as they
come, and those that are there are left out of the next run. A row with an outcome says why the model could not be
tried.

fitted       weights and shift by ridge regression: to the residual sum that the layer ends, or to its own outputs
shifted      lost none of its inputs: its weights stay, and its shift is corrected (which layers these are depends on
             the cut; a layer that is fitted in another network may be among them)
left alone   with the reason
before       it runs before the first layer that lost anything
"""

import json
from collections import Counter
from pathlib import Path

from families import parser_of, read_rows, tried

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "fitted_layers.csv"
PAGE = ROOT / "docs" / "coverage.md"
TITLE = "## What recovery fits"
FIELDS = ["model", "layers", "to_sums", "to_outputs", "shifted", "before", "left_alone", "why", "images", "outcome"]


def plans_of(name: str, images: int) -> dict:
    """The row of one model, in this process."""
    import timm_knapsack as tk  # isort: skip  (before timm)
    import timm
    import torch
    from coverage import randomise

    from timm_knapsack.recovery.closed_form import planned_layers
    from timm_knapsack.slim.example_inputs import example_input

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    randomise(model)
    groups = tk.find_channel_groups(model, verify="none")
    least = groups.macs([1] * len(groups)) / groups.macs()
    scores = tk.taylor_scores(model, groups, criterion="random")
    result = tk.prune(model, scores=scores, groups=groups, budget=tk.Budget(macs=max(0.5, least * 1.02)))
    shape = example_input(model)
    probe = torch.randn(2, *shape[1:], generator=torch.Generator().manual_seed(1))
    found = planned_layers(result.model, model, probe, kept=result.kept_channels, images=images)
    how = Counter(found.values())
    known = ("to sums", "to outputs", "shifted", "before")
    why = {reason: count for reason, count in how.most_common() if reason not in known}
    row = {"model": name, "outcome": "", "layers": len(found), "left_alone": sum(why.values()), "why": json.dumps(why)}
    return row | {"images": images} | {word.replace(" ", "_"): how[word] for word in known}


def section(rows: list[dict]) -> str:
    """The part of the page, in Markdown."""
    layers, alone = (sum(int(row[key]) for row in rows) for key in ("layers", "left_alone"))
    fitted = sum(int(row["to_sums"]) + int(row["to_outputs"]) for row in rows)
    reasons = Counter()
    for row in rows:
        reasons.update(json.loads(row["why"]))
    images = " or ".join(sorted({row["images"] for row in rows}))
    lines = [
        TITLE,
        "",
        f"Of the {layers} convs and linears of {len(rows)} of these models, cut to about half of their MACs, `recover` "
        f"fits {fitted} by ridge regression, corrects the shift of those that lost no input, and leaves {alone} "
        f"({alone / max(1, layers):.1%}) alone. Plans for {images} images, by `python benchmarks/fitted_layers.py`. "
        "*to sums*: fitted to the residual sum that the layer ends (the output projection of attention, the last conv "
        "of a block); *to outputs*: to the original's own outputs at the channels that were kept (queries, keys and "
        "values among them: heads are turned before they are cut, so that what their products lose is least).",
        "",
        "| why a layer is left alone | layers |",
        "|---|---|",
        *(f"| {reason} | {count} |" for reason, count in reasons.most_common()),
        "",
        "| model | layers | to sums | to outputs | shift only | before the cut | left alone | why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        why = "; ".join(f"{reason} ({count})" for reason, count in json.loads(row["why"]).items())
        cells = (row[key] for key in ("model", "layers", "to_sums", "to_outputs", "shifted", "before", "left_alone"))
        lines.append(f"| {' | '.join(cells)} | {why} |")
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Put the section at the end of the page, in place of an earlier one."""
    if rows := [row for row in read_rows(ROWS) if not row["outcome"]]:
        PAGE.write_text(PAGE.read_text().split(TITLE)[0].rstrip() + "\n\n" + section(rows))


def main() -> None:
    tried(plans_of, parser_of(__doc__, images=1000, timeout=300).parse_args(), ROWS, FIELDS)
    write_page()


if __name__ == "__main__":
    main()
