"""``python -m timm_knapsack …`` and ``accelerate launch -m timm_knapsack …``."""

from .cli.app import main

main()
