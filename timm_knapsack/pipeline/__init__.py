"""Room pipeline: the whole job, written once: `prune` in Python, and stages that say what they need and make.

In: a model, images and a budget; or a recipe, or a command's options.
Out: a smaller model, refitted, with what it lost, measured; of a recipe, a folder for each stage.
"""
