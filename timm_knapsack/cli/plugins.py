"""Code of a user that registers criteria, costs or op rules before a verb runs."""

import importlib
import importlib.util
import sys
from pathlib import Path

from ..errors import KnapsackError, first_line

OPTION = "--plugin"


def take_plugins(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The names after each ``--plugin``, and the arguments without them.

    Example:
        >>> take_plugins(["prune", "resnet18", "--plugin", "energy.py", "--budget", "energy=0.5"])
        (['energy.py'], ['prune', 'resnet18', '--budget', 'energy=0.5'])
    """
    found, rest = [], []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == OPTION:
            found.append(next(waiting, ""))
        elif argument.startswith(f"{OPTION}="):
            found.append(argument.partition("=")[2])
        else:
            rest.append(argument)
    return found, rest


def load_plugin(name: str) -> None:
    """Import a module by its name, or a file that ends in .py; once."""
    if not name:
        raise KnapsackError(f"{OPTION} needs the name of a module, or a file that ends in .py")
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        path = Path(name).resolve()
        key = f"timm_knapsack_plugin_{path.stem}"
        if getattr(sys.modules.get(key), "__file__", None) == str(path):
            return
        spec = importlib.util.spec_from_file_location(key, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[key] = module
    except KnapsackError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise KnapsackError(f"{OPTION} {name} can't be imported: {first_line(error)}") from error
