"""The latency cost in the registry: how a budget of time is read, and what it needs."""

import re
from typing import Any

from ...errors import BudgetError
from ..registry import Amount, CostKind, parse_number


def parse_time(name: str, value: Any) -> Amount:
    """A fraction of the original's time, or a time with its unit.

    Example:
        >>> parse_time("latency", "12ms"), parse_time("latency", 0.6)
        (Amount(value=0.012, fraction=False), Amount(value=0.6, fraction=True))
    """
    if not isinstance(value, str):
        amount = parse_number(name, value)
        if not amount.fraction:
            raise BudgetError(f"budget {name}={value}: a fraction is at most 1; write a time as '12ms'")
        return amount
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(us|ms|s)\s*", value)
    try:
        seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match else 0.0
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise BudgetError(f"budget {name}={value!r}: expected a fraction such as 0.6, or a time such as '12ms'")
    return Amount(seconds)


KIND = CostKind(
    "latency",
    "time",
    "s",
    make=lambda model, groups, table: table.cost(model, groups),
    parse=parse_time,
    needs_table="a table of measured times: table=LatencyTable.load('cpu.json'); "
    "`timm-knapsack latency MODEL` makes one",
)
