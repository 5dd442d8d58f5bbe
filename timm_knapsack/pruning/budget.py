"""Budget: how much of what may be left."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..costs.kinds import COSTS
from ..costs.registry import Amount
from ..errors import BudgetError


@dataclass(frozen=True, init=False, repr=False)
class Budget:
    """What the pruned network may cost: an amount for one or several of the registered costs.

    Args:
        table: what a cost needs beside the model: a LatencyTable measured on the device that the network is for.
            Several costs that need one get theirs from a mapping by their names.
        amounts: ``macs``: a fraction of the original's MACs (``0.5`` or ``"50%"``), or a number of MACs (``2.05e9``).
            ``params``: likewise for parameters. ``latency``: a fraction of the original's measured time, or a time such
            as ``"12ms"``; needs ``table``. ``activations``: a fraction of the peak of its maps, or a size such as
            ``"4MB"``. And whatever else `register_cost` has added.

    Example:
        >>> Budget(macs=0.5)
        Budget(macs=0.5)
        >>> Budget(macs=2.05e9, params=0.5).limits({"macs": 4.1e9, "params": 25e6})
        {'macs': 2050000000.0, 'params': 12500000.0}
        >>> Budget(macs=0.5).params is None
        True
    """

    _asked: tuple[tuple[str, float | str], ...]
    table: Any = field(default=None, hash=False)

    def __init__(self, *, table: Any = None, **amounts: float | str | None):
        given = {name: value for name, value in amounts.items() if value is not None}
        read_amounts(given)
        object.__setattr__(self, "_asked", tuple((name, given[name]) for name in COSTS if name in given))
        object.__setattr__(self, "table", table)
        for name in given:
            kind = COSTS[name]
            if kind.needs_table and self.table_of(name) is None:
                raise BudgetError(f"budget {name}=… needs {kind.needs_table}")

    def __getattr__(self, name: str) -> Any:
        """The amount of a registered cost as it was given, None where it is not limited."""
        if name in COSTS:
            return self.asked.get(name)
        raise AttributeError(f"a Budget has no {name!r}; registered costs are {', '.join(COSTS)}")

    @property
    def asked(self) -> dict[str, float | str]:
        """The limits as they were given."""
        return dict(self._asked)

    @property
    def amounts(self) -> dict[str, Amount]:
        """The limits as they were read."""
        return read_amounts(self.asked)

    def table_of(self, name: str) -> Any:
        """What the cost of that name is made with; None where it needs nothing."""
        if not COSTS[name].needs_table:
            return None
        return self.table.get(name) if isinstance(self.table, Mapping) else self.table

    def limits(self, originals: Mapping[str, float]) -> dict[str, float]:
        """The limits as numbers, given what the original network costs."""
        return {name: amount.of(originals[name]) for name, amount in self.amounts.items()}

    @classmethod
    def parse(cls, text: str, table: Any = None) -> "Budget":
        """Read ``macs=0.5,params=0.6`` as the command line takes it."""
        values = parse_budget(text)
        return cls(**values, table=table if any(COSTS[name].needs_table for name in values) else None)

    def __repr__(self):
        return f"Budget({', '.join(f'{k}={v!r}' for k, v in self.asked.items())})"


def parse_budget(text: str) -> dict[str, float | str]:
    """The limits in ``macs=0.5,params=60%``, checked as far as that goes without tables.

    Example:
        >>> parse_budget("macs=0.5, latency=12ms")
        {'macs': 0.5, 'latency': '12ms'}
    """
    values: dict[str, float | str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise BudgetError(f"budget {text!r}: expected COST=AMOUNT, such as macs=50%, or several joined by commas")
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = value
    read_amounts(values)
    return values


def read_amounts(given: Mapping[str, Any]) -> dict[str, Amount]:
    """Each amount as its cost reads it, or an error that says what is wrong; tables are not asked for.

    Example:
        >>> read_amounts({"latency": "12ms"})
        {'latency': Amount(value=0.012, fraction=False)}
        >>> read_amounts({"macs": "50%"})
        {'macs': Amount(value=0.5, fraction=True)}
    """
    if not given:
        *names, last = COSTS
        raise BudgetError(f"a budget needs at least one of {', '.join(names)} and {last}, such as Budget(macs=0.5)")
    amounts = {}
    for name, value in given.items():
        try:
            kind = COSTS.find(name)
        except BudgetError as error:
            raise BudgetError(f"budget {name}={value!r}: {error}") from None
        amounts[name] = kind.parse(name, _without_percent(name, value))
    return amounts


def _without_percent(name: str, value: Any) -> Any:
    """``"50%"`` is 0.5, for every cost; what is no percentage stays as it is."""
    if not isinstance(value, str) or not value.rstrip().endswith("%"):
        return value
    try:
        percent = float(value.rstrip()[:-1])
    except ValueError:
        raise BudgetError(f"budget {name}={value!r} is not a number; give a part of the original, as 50%") from None
    if not 0 < percent <= 100:
        raise BudgetError(f"budget {name}={value!r}: give more than 0% and at most 100% of the original")
    return percent / 100
