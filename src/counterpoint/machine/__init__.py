"""Describe a machine: its GPUs and links, and the figures that were measured on them.

gpus.py has the data sheets, occupancy.py how many blocks of a kernel fit on an SM, profile.py the figures measured,
matmul.py what a matrix product takes by them, bus_bandwidth.py the formula of nccl-tests, driver.py calls the CUDA
driver.
"""
