"""Prove that programs are correct in every interleaving of the ranks; no device, no torch.

`check.py` makes one run with vector clocks; `symbolic.py` defines actions, memory that records the origin of each byte,
and the expected output of a call. Tests call `check`; nothing in the package depends on this folder.
"""
