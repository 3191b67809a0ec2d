"""Choose which rank of a job runs on which host, and write the placement for launchers.

topology.py                hosts below a tree of switches, or with measured distances
read_topology.py           reads a file of any kind; those of Slurm by read_slurm.py
traffic.py                 the bytes that ranks exchange in a step
place.py                   what an order costs; hosts along the tree, then swaps while they help
launch_files.py            rankfile, hostfile, SLURM_HOSTFILE, DeviceMesh

`plan/answer.py` calls all of it.
"""
