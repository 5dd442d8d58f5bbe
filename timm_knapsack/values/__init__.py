"""Room values: what a channel is worth.

In: a model, its groups, images.
Out: for every group what each width is worth (value curves, or scores of its units), saved and loaded as safetensors.
"""
