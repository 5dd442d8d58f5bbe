"""Room recovery: rebuild by least squares what was lost, without labels.

In: a pruned student, its teacher, a few hundred images.
Out: the same student with better weights, or with new BatchNorm statistics alone.
"""
