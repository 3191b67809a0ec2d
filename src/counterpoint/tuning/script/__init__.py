"""Tune a training script unchanged: record its steps, choose for their pairs, and confirm the choices by whole steps.

In the parent process: `api.py` does all of it, `launch.py` finds the script in a command, starts it, and says what both
sides exchange. On each rank: `rank.py` runs the script, and `steps.py` acts between its steps.
"""
