"""Describe a machine: its GPUs and links, what was measured on it, and whether it is set up to overlap.

gpus.py has the data sheets, occupancy.py how many blocks of a kernel fit on an SM, profile.py the figures measured,
matmul.py what a matrix product takes by them, bus_bandwidth.py the formula of nccl-tests. `call_bindings` of driver.py
calls the CUDA driver.

`doctor` reads a machine by checkup.py into the records of readings.py: probe.py runs driver.py (CUDA, links), nvml.py
and system.py (torch, NCCL) in child processes, and system.py reads /sys. Then checks/ judges the readings.
"""
