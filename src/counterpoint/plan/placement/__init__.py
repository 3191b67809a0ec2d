"""Find which rank of a job should run on which host, and write it as launchers read it.

topology.py                hosts below a tree of switches, or with measured distances
read_topology.py           reads a file of any kind; those of Slurm by read_slurm.py
traffic.py                 the bytes that ranks exchange in a step
place.py                   what an order costs; hosts along the tree, then swaps (swaps.py) while they help
launch_files.py            rankfile, hostfile, SLURM_HOSTFILE, DeviceMesh

`plan/answer.py` calls all of it.
"""
