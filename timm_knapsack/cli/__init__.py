"""Room cli: the command line; nothing imports it.

In: words typed by a user.
Out: calls of the rooms above, errors in one line.
"""
