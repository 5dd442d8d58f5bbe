"""The one reader of versions: what a file was written with, and what is installed."""

import platform
from importlib import metadata

from ..version import __version__

OURS = frozenset({"timm-knapsack", "timm_knapsack"})
MISSING = "not installed"


def versions(*packages: str) -> dict[str, str]:
    """The versions of these packages, as they are installed; ``python`` is the interpreter. Nothing is imported.

    Example:
        >>> versions("no-such-package")
        {'no-such-package': 'not installed'}
    """
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    if package == "python":
        return platform.python_version()
    if package in OURS:  # also where it runs from a checkout
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING
