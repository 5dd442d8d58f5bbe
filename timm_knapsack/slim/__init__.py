"""Room slim: the only place that cuts weights.

In: a model, its channel groups, which units stay (or a ChannelConfig alone).
Out: a smaller ordinary model.
"""
