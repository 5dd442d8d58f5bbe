"""Room pruning: the choice.

In: values, costs, a budget.
Out: widths that fit, the model cut to them, and a report of what was asked and counted.
"""
