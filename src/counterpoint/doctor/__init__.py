"""Read a machine and judge its readings: which settings prevent overlap, their meaning and their remedy.

checkup.py collects the readings (the records of readings.py) and runs all checks on them. probe.py runs cuda.py (CUDA
and links), nvml.py and system.py (torch, NCCL) in child processes; system.py also reads /sys. check_gpus.py,
check_links.py and check_software.py are functions of `Readings`; verdict.py makes their records.
"""
