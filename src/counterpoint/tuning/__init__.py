"""Measure a machine, choose a mechanism for each pair of a step, and prove that it helps: `counterpoint tune`.

api.py               `counterpoint.tune`
pairs.py             the pairs of a step from a file, which are refused, and how one runs where nothing is chosen
from_trace.py        the pairs of a step from its traces
traced_exchanges.py  which all_to_alls of a trace are tokens that go to experts
predictions.py       what the model expects of each mechanism
experiment.py        which mechanisms are measured, in which order, and the times that count
decide.py            how sure times are, and which mechanism is chosen
exporters.py         the choices as files of other programs
machine.py           measures a machine, and has a profile fitted to it by fit/
script/              a training script as it is: recorded, tuned, confirmed by whole steps
check/               proves from traces that choices took effect: `counterpoint doctor --check`

The records are in `records/tuning.py`; `tuned/file.py` reads and writes `counterpoint.toml`.
"""
