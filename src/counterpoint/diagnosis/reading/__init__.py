"""Read the traces of all ranks, and join them into one job on one clock.

digest.py reads ranks, in processes or on a cluster, and reduces each to what the diagnosis needs, which also travels
from host to host (packing.py): its steps (steps.py; repetition.py finds those that nothing marks), its collectives
(comm_rows.py), the time its GPU idles and what its host did then (gaps.py, host_threads.py; host_categories.py knows
what names mean), and where in the program that was (modules.py). join.py matches collectives across ranks;
traced_job.py holds the job. intervals.py has sets of times, which all of this computes with.
"""
