"""A collective as data before it is action: no device, no torch.

`calls.py` what is asked for; `operations.py` the collectives, a row each: a new one begins there, and the way from a
call to its programs; `steps.py` what a program is made of; `direct.py`, `reductions.py` the programs, and how values
are combined; `coalesced.py` programs on several tensors; `tuning.py` which chunks; `clock.py` how long a program
takes. Other rooms may use all of it: everything is frozen.
"""
