"""Run a script with many ranks on one GPU, or on CPUs, to check values and call order before renting many GPUs.

In the parent process: `api.py`, by the launcher of `tuning/script_launch.py`. On each rank: `rank.py` runs the script,
and `witness.py` records what the script makes. `counterpoint/rehearsed.py` says whether this process is such a rank.
"""
