"""Model GEMMs and a collective that share a GPU: how long both take, and how to divide the SMs between them.

`together.py`: three models of the time of both, which one is right for which pair, and how much overlap hides.
`choice.py`: SMs for each side. `sm_split.py`: divisions of the SMs, and which blocks fit. `curves.py`: measured times
alone, interpolated. Figures come from `machine/profile.py`. Other packages may import all of these files.

A matmul that depends on its communication: `curves.py` has its time by rows, `arrivals.py` says whose rows are
where, when they come and whether that can hide, `matmul_choice.py` has the best pieces and chooses how it runs.
`expert_choice.py`: how tokens travel to their experts and back.
"""
