"""Run a computation and a collective alone, one after the other and together; say what each lost and why.

`counterpoint.measure` is `api.measure`. It reads suites.py, workloads.py and mechanisms.py (all by name) into a plan,
starts a process per rank (launch.py, worker.py), and keeps what is finished (resume.py). On a rank, session.py joins
the others, scenarios.py measures one part of the plan: collective.py and open_mechanisms.py make it ready, trial.py
times it, gpu_usage.py looks at what ran, and rows.py computes the result.
"""
