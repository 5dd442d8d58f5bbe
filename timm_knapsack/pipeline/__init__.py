"""Room pipeline: the whole job, written once as stages that say what they need and make.

In: a recipe, or a command's options.
Out: a folder for each stage, the last of them a published-ready model.
"""
