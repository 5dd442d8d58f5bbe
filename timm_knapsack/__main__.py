"""``python -m timm_knapsack …`` and ``accelerate launch -m timm_knapsack …``."""

from .cli import main

main()
