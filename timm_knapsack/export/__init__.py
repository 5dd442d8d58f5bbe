"""Room export: networks as files for other runtimes.

In: a network, or the folder of a saved one, and images to check it on.
Out: a folder with the exported file and its preprocessing, checked against the original; in int8 with its accuracy.
"""
