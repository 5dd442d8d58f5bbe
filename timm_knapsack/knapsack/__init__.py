"""Room knapsack: the pure solver, numpy only.

In: values, weights, a capacity.
Out: the best choice, and a bound that certifies it.
"""
