"""Fit NCCL's protocols to measured collectives: what `plan/network/fits/` was made by.

protocols.py        protocols fitted to rows, and their error on rows that were held out
measured.py         the rows of `measure_suites.py blocks`
nccl_tables.py      NCCL's own model from its log
"""
