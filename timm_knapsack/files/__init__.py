"""Room files: everything that is written to disk is whole or not there.

In: texts, plain data, folders half-written elsewhere.
Out: files and folders that were replaced in one step.
"""
