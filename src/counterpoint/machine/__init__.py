"""Describe a machine: its GPUs and links, what was measured on it, and whether it is set up to overlap.

gpus.py has the datasheets, occupancy.py how many blocks of a kernel fit on an SM. `doctor` reads a machine by
checkup.py: readings.py has what it gets, probe.py asks in child processes (driver.py CUDA and the links, nvml.py NVML,
software.py torch and NCCL), system.py in /sys. It judges the readings by checks/. Other rooms import none of those, but
for `driver.visible_gpus`.
"""
