"""Judge the readings of a machine: what stands in the way of overlap, what it means and how to fix it.

`checkup.examine` runs every check; one file per subject (gpus, links, software, environment). verdict.py makes
the records, so that texts from outside are safe to print. Checks are pure functions of `Readings`.
"""
