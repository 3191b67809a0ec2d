"""Measure a machine, choose a mechanism for each pair of a step, and prove that it helped: `counterpoint tune`.

api.py               `counterpoint.tune`
pairs_file.py        the pairs of a step, from a file
check_pair.py        which pairs are refused
from_trace.py        the pairs of a step, from its traces
pair_classes.py      which pair stands for the calls of a trace that are alike
traced_exchanges.py  which all_to_alls are tokens that go to experts
parts.py             how each pair is measured, and its times in what was measured
rounds.py            how sure times over rounds are, and how two are compared
predictions.py       what the model expects of each mechanism
shortlist.py         which mechanisms are measured
planned_parts.py     which pairs are measured first
decide.py            which one is chosen
exporters.py         the choices as files of other programs
shared.py            one value for a setting that several pairs share
machine.py           measures a machine, and has a profile fitted to it by fit/
script/              a training script as it is: recorded, tuned, confirmed by whole steps

The records are in `records/tuning.py`; `tuned/file.py` reads and writes `counterpoint.toml`.
"""
