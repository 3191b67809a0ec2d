"""Describe a machine: its GPUs and links, what was measured on it, and whether it is set up to overlap.

gpus.py has the data sheets, occupancy.py how many blocks of a kernel fit on an SM, profile.py the figures measured,
matmul.py what a matrix product takes by them, bus_bandwidth.py the formula of nccl-tests, driver.py calls the CUDA
driver. doctor/ is what `doctor` reads and judges; nothing but the command imports it.
"""
