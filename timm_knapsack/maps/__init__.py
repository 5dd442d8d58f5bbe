"""Room maps: a network's inner maps, and running it from the middle.

In: a model and images.
Out: the maps at chosen places, without leaving a trace in the model.
"""
