"""What is installed, what works, and a fix for torchvision's missing operators in this one environment."""

import site
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from .. import _torchvision_operators
from ..errors import KnapsackError
from ..files.atomic import write_text
from ..files.versions import versions
from .console import print_json, stdout
from .options import JsonOption

PACKAGES = (
    "timm-knapsack",
    "timm",
    "torch",
    "torchvision",
    "huggingface-hub",
    "accelerate",
    "safetensors",
    "datasets",
    "numpy",
    "scipy",
    "matplotlib",
    "scikit-learn",
)
HOOK = "_timm_knapsack_torchvision"


@dataclass(frozen=True)
class Diagnosis:
    """Versions, devices, and whether ``import timm`` works by itself (as ``accelerate launch`` needs)."""

    versions: dict[str, str]
    devices: list[str]
    operators_missing: bool
    plain_timm_imports: bool
    bfloat16_cure: str = ""  # what to set where bfloat16 ends the process


def doctor(
    fix: Annotated[bool, typer.Option(help="Repair torchvision's missing operators in this environment.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Report versions, devices and known faults.

    Example: timm-knapsack doctor
    """
    from rich.table import Table

    found = diagnose()
    if fix and found.operators_missing and not found.plain_timm_imports:
        path = install_torchvision_hook()
        found = diagnose()
        if not as_json:
            stdout().print(f"wrote {path}: `import timm` works by itself in this environment now")
    if as_json:
        print_json(asdict(found))
        return
    table = Table("what", "found", title="timm-knapsack doctor")
    for name, version in found.versions.items():
        table.add_row(name, version)
    table.add_row("devices", "; ".join(found.devices))
    table.add_row("torchvision operators", "missing" if found.operators_missing else "there")
    table.add_row("`import timm` alone, `accelerate launch`", "yes" if found.plain_timm_imports else "no")
    table.add_row("bfloat16 on this CPU", "ends the process" if found.bfloat16_cure else "works, or is not used")
    stdout().print(table)
    stdout().print(verdict(found), markup=False)


def verdict(found: Diagnosis) -> str:
    """One sentence: all is well, or what to do.

    Example:
        >>> verdict(Diagnosis({}, ["cpu, 2 threads"], operators_missing=False, plain_timm_imports=True))
        'All is well: pruning, fine-tuning and `accelerate launch` work here, on cpu, 2 threads.'
    """
    if found.plain_timm_imports:
        needed = f" mixed_precision='bf16' needs {found.bfloat16_cure} in the environment first."
        cure = needed if found.bfloat16_cure else ""
        where = next((d for d in found.devices if not d.startswith("cpu")), found.devices[0])
        return f"All is well: pruning, fine-tuning and `accelerate launch` work here, on {where}.{cure}"
    if found.operators_missing:
        return (
            "`import timm_knapsack` works, but timm and `accelerate launch` by themselves do not, since this "
            "torchvision lacks its compiled operators: run `timm-knapsack doctor --fix`, or install a matching pair "
            "of torch and torchvision."
        )
    return "`python -c 'import timm'` fails in this environment; run it to see why, and install timm again."


def diagnose() -> Diagnosis:
    """Look at this environment; changes nothing.

    Example:
        >>> diagnose().versions["timm"]
        '1.0.30'
    """
    import torch

    from ..maps.precision import CURE, bfloat16_kills

    threads = torch.get_num_threads()
    devices = [f"cpu, {threads} thread{'s' if threads > 1 else ''}"]
    devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    alone = subprocess.run([sys.executable, "-c", "import timm"], capture_output=True)
    return Diagnosis(
        versions=versions(*PACKAGES),
        devices=devices,
        operators_missing=_torchvision_operators.operators_are_missing(),
        plain_timm_imports=alone.returncode == 0,
        bfloat16_cure=CURE if bfloat16_kills() else "",
    )


def install_torchvision_hook() -> Path:
    """Let ``import timm`` work by itself in this environment, where torchvision lacks its compiled operators.

    Writes ``_timm_knapsack_torchvision.py`` and ``.pth`` into this environment's site-packages; remove both to undo it.
    Outside a virtual environment it refuses.
    """
    if sys.prefix == sys.base_prefix:
        raise KnapsackError(
            f"{sys.executable} is not in a virtual environment; the fix is only for one: python -m venv .venv first"
        )
    folder = _pth().parent
    try:
        write_text(folder / f"{HOOK}.py", Path(_torchvision_operators.__file__).read_text(encoding="utf-8"))
        write_text(_pth(), f"import {HOOK}; {HOOK}.install_hook()\n")
    except OSError as error:
        raise KnapsackError(f"{folder} can't be written: {error.strerror or error}") from None
    return _pth()


def _pth() -> Path:
    return Path(site.getsitepackages()[0]) / f"{HOOK}.pth"
