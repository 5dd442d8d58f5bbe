"""Room reports: what happened, for people.

In: the record of a run.
Out: one HTML page and its pictures.
"""
