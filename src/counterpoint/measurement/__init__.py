"""Measure a computation and a collective alone, in sequence and together: how much does each lose, and why?

`counterpoint.measure` is `api.measure`. It makes a plan of names (suites.py, workloads.py, mechanisms.py) and starts a
process per rank. On a rank, worker.py measures one part of the plan after another, and session.py joins the others:
pairs.py, alone.py, tensor.py and expert.py prepare its experiments (collective.py, open_mechanisms.py), rounds.py plays
them and makes the rows, trial.py times them, and gpu_usage.py observes what ran.
"""
