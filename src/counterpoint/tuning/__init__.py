"""Measure a machine, choose a mechanism for each pair of a step, and prove that it helped: `counterpoint tune`.

`counterpoint.tune` is `api.tune`. pairs_file.py reads the pairs of a step, parts.py says how each is measured and what
its times are, predictions.py what the model expects of each mechanism, shortlist.py which of them are measured, and
decide.py which one is chosen. The records are in `records/tuning.py`; `pair/tuned_file.py` reads and writes
`counterpoint.toml`.
"""
