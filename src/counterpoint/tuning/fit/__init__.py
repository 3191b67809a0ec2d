"""Fit a machine's profile to measurements of that machine.

fitted.py       what the fit of a group returns, and the rows that fits go by
collectives.py  from collectives alone: `rates`, `nccl`, `nccl_rates`
matmuls.py      from matmuls, alone and beside collectives: `efficiency`, `sums`, `contention`, `mechanisms`
"""
