"""Room values: what a channel is worth.

In: a model, its groups, images.
Out: a number for every unit, saved and loaded as safetensors.
"""
