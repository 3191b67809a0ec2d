"""Read what `counterpoint.plan.network.fit` is given, and fit what only pairs can tell.

contention.py       what a GEMM and NCCL lose beside each other
measured.py         the rows of `counterpoint measure blocks`
nccl_tables.py      NCCL's own model from its log
"""
