"""Fit the protocols of `plan/network/fits/` to measured collectives.

collective_fit.py   protocols from rows, and their error on rows that were held out
measured.py         a measured row, and the rows of `counterpoint measure blocks`
nccl_tables.py      the rows that nccl-tests prints, and NCCL's own model from its log

Start from `fit_protocols` and `held_out`; `benchmarks/collective_model.py` calls both.
"""
