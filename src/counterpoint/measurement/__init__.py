"""Measure a computation and a collective alone, one after the other and together, and what each loses and why.

`counterpoint.measure` is `api.measure`. It makes a plan of names (suites.py, workloads.py, mechanisms.py, dtypes.py),
starts a process per rank (launch.py, worker.py), and keeps finished results (resume.py). On a rank, session.py joins
the others and scenarios.py measures one part of the plan: collective.py and open_mechanisms.py prepare it, trial.py
times it, gpu_usage.py observes what ran, and rows.py computes the result. dependent.py names what depends on
communication: tensor.py measures such matmuls, expert.py the tokens that travel to their experts and back
(sample_tokens.py, exchange_mechanisms.py). costs.py has launches, sums and lasting load.
"""
