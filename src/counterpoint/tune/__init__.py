"""Measure a machine, choose a mechanism for each pair of a step, and prove that it helped: `counterpoint tune`.

machine.py measures a machine and fits a profile to it: fit_collectives.py and rates.py, fit_pairs.py and contention.py,
fit_compute.py fit its groups, and fitted.py is what they share. The records are in `records/tuning.py`;
`pair/tuned_file.py` reads and writes `counterpoint.toml`.
"""
