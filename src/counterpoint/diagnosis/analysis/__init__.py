"""Compute where the time of a traced job goes, and why, as numbers, which findings/ puts into words.

analysis.py names every result. accounts.py splits the time of each rank and of each collective; parallel_groups.py says
which parallelism a collective serves. kernels.py, stragglers.py, experts.py, idle.py and unrecorded.py find what holds
ranks up. replay.py plays the steps again without each cause (replay_graph.py, simulation.py), and with copy engines
(zero_sm.py).
"""
