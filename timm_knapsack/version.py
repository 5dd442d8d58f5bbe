"""The version, and where this version is to be had: pyproject.toml and everything that is written read it here."""

__version__ = "0.1.0"

ON_PYPI = False  # True from the first release on
REPOSITORY = ""  # https address of the public repository, as soon as there is one


def install_command() -> str:
    """What whoever reads a model card types first; empty as long as there is no public place to install from.

    Example:
        >>> install_command() in ("", "pip install timm-knapsack", f"pip install git+{REPOSITORY}")
        True
    """
    if ON_PYPI:
        return "pip install timm-knapsack"
    return f"pip install git+{REPOSITORY}" if REPOSITORY else ""
