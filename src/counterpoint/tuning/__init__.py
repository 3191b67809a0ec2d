"""Measure a machine, choose a mechanism for each pair of a step, and prove that it helped: `counterpoint tune`.

The records are in `records/tuning.py`; `pair/tuned_file.py` reads and writes `counterpoint.toml`. exporters.py writes
it for other programs; where pairs share a setting, shared.py chooses it.
"""
