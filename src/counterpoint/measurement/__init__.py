"""Measure a computation and a collective alone, in sequence and together, and how much each loses and why.

`counterpoint.measure` is `api.measure`. It makes a plan of names (suites.py, workloads.py, mechanisms.py, dependent.py,
dtypes.py) and starts a process per rank (launch.py, worker.py). On a rank, session.py joins the others and parts.py
measures one part of the plan after another: pairs.py, alone.py, tensor.py and expert.py prepare its experiments
(collective.py, open_mechanisms.py), trial.py times them, gpu_usage.py observes what ran, and rows.py makes the rows.
"""
