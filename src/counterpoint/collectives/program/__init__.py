"""Describe collectives as data, without torch: a `Call`, and the `Program` of steps that each rank runs for it.

`calls.py` defines calls; `operations.py` has a row for each collective (add new ones to it), and `plan`, which makes
programs; `steps.py` defines their steps, and cuts programs for a caller that works piece by piece; `direct.py`,
`reductions.py` and `messages.py` build them; `coalesced.py` puts them on several tensors; `tuning.py` chooses chunks;
`clock.py` simulates how long a program takes.
"""
