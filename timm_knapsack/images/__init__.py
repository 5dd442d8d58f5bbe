"""Room images: loaders of one shape from any source.

In: a folder, a table, a Hub data set, a timm data set.
Out: batches of ``(images, labels)``.
"""
