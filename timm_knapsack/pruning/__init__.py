"""Room pruning: the choice.

In: values, costs, a budget.
Out: widths that fit, the model cut to them, not refitted, and a report of what was asked, counted and lost.
"""
