"""Room costs.latency: measured time as a cost.

In: a model, its groups, a device. Out: a table of layer times over widths, and whole networks timed in turns.
"""
