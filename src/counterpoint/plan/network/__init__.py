"""Predict how long a collective takes on a cluster, by the algorithm and protocol that NCCL would choose.

group.py        the groups of ranks of a mesh, and the levels of a cluster that a group crosses
algorithms.py   hops and bytes of every algorithm, by level, and which NCCL takes with which protocol
network.py      what LL, LL128 and Simple reach on a link; named networks (networks.toml, protocols.toml, fits/)
nccl_tests.py   what nccl-tests printed, checked, as rows
fit.py          one's own network: a latency and a rate per operation, from files of nccl-tests (`plan --fit`)
estimate.py     `estimate`, one collective; `CollectiveTimes` and `MeshTimes`, which remember what was asked

Other packages call `axes`, `levels`, `network_of`, `estimate` and `CollectiveTimes`.
"""
