"""The registry of costs: what a budget may ask for, its unit, how it is read, made and counted.

`Budget`, the command line, recipes, the report page and the model card all read it: a call of `register_cost` is all
that a new cost needs. The built-in costs are added in ``kinds``, which is what others import.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import BudgetError
from ..files.plain_json import is_number, shortened
from ..registry import Registry
from ..slim.channel_groups import ChannelGroups
from .cost import Cost


@dataclass(frozen=True)
class Amount:
    """How much of a cost may be left: a number in the cost's unit, or a fraction of the original's.

    Example:
        >>> Amount(0.5, fraction=True).of(4e9), Amount(2.05e9).of(4e9)
        (2000000000.0, 2050000000.0)
    """

    value: float
    fraction: bool = False

    def of(self, original: float) -> float:
        return float(self.value * original if self.fraction else self.value)


def parse_number(name: str, value: Any) -> Amount:
    """A fraction up to 1, or an absolute number above it.

    Example:
        >>> parse_number("macs", 0.5), parse_number("macs", 2.05e9)
        (Amount(value=0.5, fraction=True), Amount(value=2050000000.0, fraction=False))
    """
    if not is_number(value):
        raise BudgetError(f"budget {name}={shortened(value)} is not a number; give a fraction such as 0.5")
    if value <= 0:
        raise BudgetError(f"budget {name}={value} leaves nothing; give a fraction above 0, such as 0.5")
    return Amount(float(value), fraction=value <= 1)


def parse_count(name: str, value: Any) -> Amount:
    """Like `parse_number`, for what comes in thousands: 1.5 is then a slip, and not a number of them."""
    amount = parse_number(name, value)
    if not amount.fraction and amount.value < 1000:
        raise BudgetError(
            f"budget {name}={value}: a fraction is at most 1, and {value} {name} are no network; "
            f"give a fraction such as 0.5, or an absolute number such as 2.05e9"
        )
    return amount


@dataclass(frozen=True)
class CostKind:
    """A kind of cost that budgets can limit.

    Attributes:
        name: as in ``Budget(name=0.5)``, ``--budget name=0.5`` and the ``budget`` of a recipe.
        label: what people call it, in tables: "time".
        unit: of its numbers: "s"; the same as the label for things that are counted ("MACs").
        make: ``make(model, groups, table) -> Cost``; ``table`` is what the budget carries for it, or None.
        parse: ``parse(name, value) -> Amount`` of the number or text that a user writes; raises BudgetError.
        count: ``count(model, input_size) -> number`` of the physical network; without, the `Cost`'s own number stands.
        always: whether every report shows it, asked for or not.
        needs_table: what ``make`` needs as its table and how to get one, in words; empty if it needs none.

    Example:
        >>> energy = CostKind("energy", "energy", "J", make=lambda model, groups, table: ...)
        >>> energy.parse("energy", 0.5).fraction
        True
    """

    name: str
    label: str
    unit: str
    make: Callable[[nn.Module, ChannelGroups, Any], Cost]
    parse: Callable[[str, Any], Amount] = parse_number
    count: Callable[[nn.Module, Sequence[int] | None], float] | None = None
    always: bool = False
    needs_table: str = ""

    def __post_init__(self):
        if self.always and self.count is None:
            raise BudgetError(f"cost {self.name!r}: what every report shows must be counted; give a count")

    def cost(self, model: nn.Module, groups: ChannelGroups, table: Any = None) -> Cost:
        """The cost as a function of this model's widths."""
        cost = self.make(model, groups, table)
        if not isinstance(cost, Cost) or cost.name != self.name:
            raise BudgetError(f"cost {self.name!r}: make must give a Cost with this name, got {cost!r:.80}")
        return cost


COSTS: Registry[CostKind] = Registry("cost", BudgetError)


def register_cost(kind: CostKind, *, replace: bool = False) -> CostKind:
    """Add a kind of cost: `Budget`, the command line, recipes, reports and cards know it from then on, by its name.

    Args:
        replace: whether it may take the place of one with the same name.

    Example:
        >>> from timm_knapsack.costs.counted import macs_cost
        >>> def energy(model, groups, table):
        ...     cost = macs_cost(groups)
        ...     cost.name, cost.unit = "energy", "J"
        ...     return cost
        >>> register_cost(CostKind("energy", "energy", "J", make=energy)).label
        'energy'
        >>> COSTS.remove("energy").unit
        'J'
    """
    if not isinstance(kind, CostKind):
        raise BudgetError(f"register_cost takes a CostKind, got {kind!r:.80}")
    if kind.name == "table":
        raise BudgetError("a cost can't be called 'table': Budget(table=…) is what a cost is made with")
    return COSTS.add(kind, replace)
