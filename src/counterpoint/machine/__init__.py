"""Describe a machine: its GPUs and links, and the figures that were measured on them.

gpus.py has the data sheets, bus_bandwidth.py its formula, occupancy.py how many blocks of a kernel fit on an SM,
profile.py the figures measured, matmul.py what a matrix product takes by them, driver.py calls the CUDA driver.
"""
