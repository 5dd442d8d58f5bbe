"""The registry with the built-in exporters in it."""

from .exporter import EXPORTERS, Exporter, register_exporter
from .files import KINDS

__all__ = ["EXPORTERS", "Exporter", "register_exporter"]

for _kind in KINDS:
    register_exporter(_kind)
