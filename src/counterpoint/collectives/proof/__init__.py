"""Proof that programs are right in every interleaving of the ranks; no device, no torch.

`check.py` makes one run with vector clocks; `symbolic.py` holds actions, memory whose bytes know their origin, and what
a call's output must be. Tests call `check`; nothing in the package depends on this folder.
"""
