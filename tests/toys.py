"""A criterion and a cost as a user would write them, registered from outside; also a file for ``--plugin``."""

import torch

import timm_knapsack as tk


class Energy(tk.Cost):
    """Two joules for every kept unit of the first group, one for those of the others, and three whatever is kept."""

    name, unit = "energy", "J"

    def __init__(self, groups):
        self.weights = torch.ones(len(groups), dtype=torch.float64).numpy()
        self.weights[0] = 2

    def at(self, kept):
        return float(self.weights @ kept) + 3

    def marginal(self, kept):
        return self.weights


ENERGY = tk.CostKind("energy", "battery", "J", make=lambda model, groups, table: Energy(groups))
LAST = tk.Criterion(
    "last_first",
    "the last units are worth most; no data",
    needs_data=False,
    needs_gradients=False,
    compute=lambda model, groups, loader, seed: {g.name: torch.arange(g.size).double() for g in groups},
)


def register():
    tk.register_cost(ENERGY)
    tk.register_criterion(LAST)


if __name__ == "timm_knapsack_plugin_toys":
    register()
