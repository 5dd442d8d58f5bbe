"""Room models: pruned networks as timm models.

In: a ChannelConfig, or a name, folder or Hub id that leads to one.
Out: an ordinary timm model.
"""

import timm  # noqa: F401  (before any module of this room: timm's import registers our models, which imports them all)
