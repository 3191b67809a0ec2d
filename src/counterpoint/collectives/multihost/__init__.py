"""Run collectives over several hosts: this package's programs inside a host, another library (NCCL) between them.

`phases.py` cuts a call into phases inside and between hosts; `hierarchical.py` runs them: `HierarchicalCommunicator`.
"""
