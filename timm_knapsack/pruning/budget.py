"""Budget: how much of what may be left."""

import math
import re
from dataclasses import dataclass
from typing import Any

from ..errors import BudgetError


@dataclass(frozen=True)
class Budget:
    """What the pruned network may cost.

    Args:
        macs: a fraction of the original's MACs (``0.5``), or a number of MACs (``2.05e9``).
        params: likewise for parameters.
        latency: a fraction of the original's measured time, or a time such as ``"12ms"``; needs ``table``.
        table: a LatencyTable measured on the device that the network is for.

    Example:
        >>> Budget(macs=0.5)
        Budget(macs=0.5)
        >>> Budget(macs=2.05e9, params=0.5).limits({"macs": 4.1e9, "params": 25e6})
        {'macs': 2050000000.0, 'params': 12500000.0}
    """

    macs: float | None = None
    params: float | None = None
    latency: float | str | None = None
    table: Any = None

    def __post_init__(self):
        if not self.asked:
            raise BudgetError("a budget needs at least one of macs, params and latency, such as Budget(macs=0.5)")
        for name in ("macs", "params"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 1000)
        if self.latency is not None:
            if isinstance(self.latency, str):
                _seconds(self.latency)
            elif _check_number("latency", self.latency, 1) > 1:
                raise BudgetError(f"budget latency={self.latency}: a fraction is at most 1; write a time as '12ms'")
            if self.table is None:
                raise BudgetError(
                    "budget latency=… needs a table of measured times: table=LatencyTable.load('cpu.json'); "
                    "`timm-knapsack latency MODEL` makes one"
                )

    @property
    def asked(self) -> dict[str, float | str]:
        """The limits as they were given."""
        return {n: getattr(self, n) for n in ("macs", "params", "latency") if getattr(self, n) is not None}

    def limits(self, originals: dict[str, float]) -> dict[str, float]:
        """The limits as numbers, given what the original network costs."""
        result = {}
        for name, value in self.asked.items():
            if isinstance(value, str):
                result[name] = _seconds(value)
            else:
                result[name] = float(value * originals[name] if value <= 1 else value)
        return result

    @classmethod
    def parse(cls, text: str, table: Any = None) -> "Budget":
        """Read ``macs=0.5,params=0.6`` as the command line takes it."""
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in ("macs", "params", "latency"):
                raise BudgetError(
                    f"budget {text!r}: expected macs=…, params=… or latency=…, joined by commas; got {part!r}"
                )
            try:
                values[name] = float(value)
            except ValueError:
                if name != "latency":
                    raise BudgetError(f"budget {part!r}: {value!r} is not a number; try {name}=0.5") from None
                values[name] = value
        return cls(**values, table=table if "latency" in values else None)

    def __repr__(self):
        return f"Budget({', '.join(f'{k}={v!r}' for k, v in self.asked.items())})"


def _check_number(name: str, value: Any, smallest_absolute: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BudgetError(f"budget {name}={value!r} is not a number; give a fraction such as 0.5")
    if value <= 0:
        raise BudgetError(f"budget {name}={value} leaves nothing; give a fraction above 0, such as 0.5")
    if 1 < value < smallest_absolute:
        raise BudgetError(
            f"budget {name}={value}: a fraction is at most 1, and {value} {name} are no network; "
            f"give a fraction such as 0.5, or an absolute number such as 2.05e9"
        )
    return float(value)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(us|ms|s)\s*", text)
    try:
        value = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise BudgetError(f"budget latency={text!r}: expected a fraction such as 0.6, or a time such as '12ms'")
    return value
