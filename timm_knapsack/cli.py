"""timm-knapsack: the command line, thin over the same functions as the Python interface."""

import typer
from rich.console import Console
from rich.table import Table

from .errors import KnapsackError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def doctor(fix: bool = typer.Option(False, help="Mend torchvision's missing operators in this environment.")) -> None:
    """Report versions, devices and known faults.

    Example: timm-knapsack doctor
    """
    from .doctor import diagnose, install_torchvision_hook

    found = diagnose()
    if fix and found.operators_missing and not found.plain_timm_imports:
        path = install_torchvision_hook()
        found = diagnose()
        Console().print(f"wrote {path}: `import timm` works by itself in this environment now")
    table = Table("what", "found", title="timm-knapsack doctor")
    for name, version in found.versions.items():
        table.add_row(name, version)
    table.add_row("devices", "; ".join(found.devices))
    table.add_row("torchvision operators", "missing" if found.operators_missing else "there")
    advice = "yes" if found.plain_timm_imports else "no: `timm-knapsack doctor --fix` mends it in this environment"
    table.add_row("`import timm` alone, `accelerate launch`", advice)
    Console().print(table)


@app.command()
def groups(
    model: str = typer.Argument(help="Name of a timm model."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for scripts."),
) -> None:
    """Show which channels of a model can be removed together, and what is frozen.

    Example: timm-knapsack groups resnet18
    """
    import json

    import timm
    import torch

    from .channel_groups import find_channel_groups

    with torch.device("meta"):
        network = timm.create_model(model)
    found = find_channel_groups(network)
    if as_json:
        rows = [
            {"name": g.name, "units": g.size, "crosses_norm": g.crosses_norm, "slices": [[s.param, s.dim] for s in g.slices]}
            for g in found
        ]
        print(json.dumps({"model": model, "macs": found.macs(), "groups": rows, "frozen": dict(found.frozen)}, indent=1))
        return
    table = Table("group", "units", "layers that make it", title=f"{model}: {found.macs() / 1e9:.3g} GMACs")
    for group in found:
        made_by = [s.param.rsplit(".", 1)[0] for s in group.slices if s.role == "out"]
        more = f" and {len(made_by) - 3} more" if len(made_by) > 3 else ""
        table.add_row(group.name, str(group.size), ", ".join(made_by[:3]) + more)
    Console().print(table)
    for name, reason in found.frozen.items():
        Console().print(f"frozen: {name}: {reason}")


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2."""
    try:
        app()
    except KnapsackError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}")
        raise SystemExit(2) from None
