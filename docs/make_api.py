"""Writes docs/api.md from the docstrings of the public names; a test checks that it is current."""

import inspect
import sys
from pathlib import Path

import timm_knapsack

PAGE = Path(__file__).with_name("api.md")


def signature(value) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return text if len(text) < 400 else "(…)"


def page() -> str:
    made_by = "Made from the docstrings by `python docs/make_api.py`; `import timm_knapsack as tk`."
    lines = ["# API reference", "", made_by, ""]
    for name in timm_knapsack.__all__:
        value = getattr(timm_knapsack, name)
        if name.startswith("__"):
            continue
        kind = "class" if inspect.isclass(value) else "function"
        lines += [f"## `tk.{name}`", "", f"*{kind}* `{name}{signature(value)}`", ""]
        lines += ["```text", inspect.getdoc(value) or "", "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" in sys.argv:
        raise SystemExit(0 if PAGE.read_text() == page() else "docs/api.md is not current: run python docs/make_api.py")
    PAGE.write_text(page())
