"""groups: which channels of a model can be removed together."""

from . import console
from .options import ArchitectureOptions, JsonOption, verb


@verb()
def groups(network: ArchitectureOptions, as_json: JsonOption = False) -> None:
    """Show which channels of a model can be removed together, and what is frozen.

    Example: timm-knapsack groups resnet18
    """
    from rich.table import Table

    from ..channels.find_groups import find_channel_groups
    from ..human_numbers import human

    found = find_channel_groups(network.source().on_meta())
    if as_json:
        rows = [
            {
                "name": g.name,
                "units": g.size,
                "crosses_norm": g.crosses_norm,
                "slices": [[s.param, s.dim] for s in g.slices],
            }
            for g in found
        ]
        verified = {"by": found.verified, "note": found.verified_note}
        facts = {"model": network.model, "macs": found.macs(), "verified": verified}
        console.print_json({**facts, "groups": rows, "frozen": dict(found.frozen)})
        return
    table = Table("group", "units", "layers that make it", title=f"{network.model}: {human(found.macs())} MACs")
    for group in found:
        table.add_row(group.name, str(group.size), group.makers)
    console.stdout().print(table)
    note = f" ({found.verified_note})" if found.verified_note else ""
    console.stdout().print(f"verified by {found.verified}{note}", markup=False)
    for name, reason in found.frozen.items():
        console.stdout().print(f"frozen: {name}: {reason}", markup=False)
