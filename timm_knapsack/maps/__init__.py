"""Room maps: a network's inner maps, running it from the middle, and how far its outputs are from another's.

In: a model and images.
Out: the maps at chosen places, and outputs of what lies behind them, without leaving a trace in the model.
"""
