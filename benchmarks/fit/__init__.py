"""Read what `counterpoint.plan.network.fit` is given.

measured.py         the rows of `measure_suites.py blocks`
nccl_tables.py      NCCL's own model from its log
"""
