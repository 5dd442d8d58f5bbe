"""One model of each timm family, each tried in a process of its own; rows of a CSV file that come as they are made.

A script gives `tried` a function of a model's name and options that returns a row. Called with --one NAME, as this
module calls it, the script prints that row as its last line.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

FAMILIES = Path(__file__).resolve().parent / "coverage.csv"


def parser_of(description: str, images: int, timeout: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="these, also where they have rows; by default all without a row")
    parser.add_argument("--images", type=int, default=images)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds for each model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def read_rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def tried(row_of: Callable[[str, int], dict], options, path: Path, fields: Sequence[str]) -> list[dict]:
    """All rows of the file, after every family that has none was tried (a model that raises has one that says so)."""
    if options.one:
        print(json.dumps(row_of(options.one, options.images)))
        sys.exit()
    rows = {row["model"]: row for row in read_rows(path)}
    for name in options.models or [row["model"] for row in read_rows(FAMILIES)]:
        if name in rows and not options.models:
            continue
        rows[name] = {"model": name, "images": options.images} | _in_own_process(name, options)
        print(json.dumps(rows[name]), flush=True)
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows.values())
    return list(rows.values())


def _in_own_process(name: str, options) -> dict:
    command = [sys.executable, "-W", "ignore", sys.argv[0], "--one", name, "--images", str(options.images)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"outcome": f"did not end in {options.timeout:.0f} s"}
    except (IndexError, ValueError):
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"outcome": f"raised: {errors[-1][:300]}"}
