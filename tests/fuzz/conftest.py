"""The engine's modules are imported by their own names, also by the program that runs through the night."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
