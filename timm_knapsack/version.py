"""The version: pyproject.toml and everything that is written read it here."""

__version__ = "0.1.0"
