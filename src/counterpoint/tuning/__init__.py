"""Choose, by measuring, how to run each pair of a collective and a computation: `counterpoint tune`.

api.py            `counterpoint.tune`
pairs.py          the pairs of a step from a file, which pairs are refused, and how a pair runs where nothing is chosen
from_trace.py     the pairs of a step from its traces; traced_exchange.py finds those of tokens and experts
predictions.py    what the model expects of each mechanism
experiment.py     which mechanisms are measured, in which order, and the times that count
decide.py         the standard errors of times, and which mechanism is chosen
exporters.py      the choices as files of other programs
machine.py        measures a machine, and has a profile fitted to it by fit/
script.py         tunes a training script as it is: records it, chooses, and confirms the choices by whole steps
script_launch.py  finds the script in a command, starts it, and says what both sides exchange
script_rank.py    runs the script on a rank, where script_steps.py acts between its steps
check.py          proves from traces that choices took effect: `counterpoint doctor --check`, by check_knobs.py

The records are in `records/tuning.py` and `records/doctor.py`; `tuned/file.py` reads and writes `counterpoint.toml`.
"""
