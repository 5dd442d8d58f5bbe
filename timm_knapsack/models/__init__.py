"""Room models: pruned networks as timm models.

In: a ChannelConfig, or a name, folder or Hub id that leads to one. Out: an ordinary timm model.
"""
