"""The verbs of the command line; each is thin over the Python interface."""
