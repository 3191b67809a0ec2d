"""Run a script with many ranks on one GPU, or on CPUs, to see values and order before GPUs are booked.

In the parent process: `api.py`, by the launcher of `tuning/script_launch.py`. On each rank: `rank.py` runs the script,
and `witness.py` keeps what it makes. `counterpoint/rehearsed.py` says whether this process is such a rank.
"""
