"""Judge the readings of a machine: what stands in the way of overlap, what it means and how to fix it.

One file per subject (gpus, links, software); `machine/checkup.py` runs them all. verdict.py makes the records, so that
texts from outside are safe to print. Checks are pure functions of `Readings`.
"""
