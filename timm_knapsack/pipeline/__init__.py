"""Room pipeline: the whole job.

In: a recipe, or a command's options.
Out: a folder for each stage, the last of them a published-ready model.
"""
