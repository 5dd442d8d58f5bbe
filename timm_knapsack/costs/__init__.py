"""Room costs: what a network costs as a function of its widths.

In: channel groups, and for time a device.
Out: a `Cost` for each limit of a budget: MACs, parameters, measured time.
"""
