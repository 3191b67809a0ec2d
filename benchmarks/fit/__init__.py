"""Read what `counterpoint.plan.network.fit` is given.

measured.py         the rows of `counterpoint measure blocks`
nccl_tables.py      NCCL's own model from its log
"""
