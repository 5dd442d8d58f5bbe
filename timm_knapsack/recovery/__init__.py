"""Room recovery: rebuild in closed form what was lost, without gradients.

In: a pruned student, its teacher, a few hundred images.
Out: the same student with better weights, or with new BatchNorm statistics alone.
"""
