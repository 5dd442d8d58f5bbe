"""Room channels: which channels hang together.

In: a model.
Out: channel groups with every slice of every parameter they own, verified, and what is frozen, with why.
"""
