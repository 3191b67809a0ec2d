"""Fit the groups of a machine's profile to what was measured; `fitted.py` has what all fits share.

`collectives.py` fits what collectives alone tell, with `rates.py` for the steps of zero-SM programs; `pairs.py` what
pairs tell, with `contention.py` for the division of SMs; `compute.py` what computations alone tell.
"""
