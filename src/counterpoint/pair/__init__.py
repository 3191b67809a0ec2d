"""Model GEMMs and a collective that share a GPU: how long both take, and how to divide the SMs between them.

`together.py`: three models of the time of both, which one is right for which pair, and how much overlap hides.
`choice.py`: SMs for each side. `sm_split.py`: divisions of the SMs, and which blocks fit. `curves.py`: measured times
alone, interpolated. Figures come from `machine/profile.py`. Other packages may import all of these files.

A matmul that depends on its communication: `curves.py` has its time by rows, `sharded_rows.py` says whose rows are
where, `arrivals.py` when rows come and whether that can hide, `cuts.py` has the best pieces, `matmul_choice.py` chooses
how it runs. `expert_choice.py`: how tokens travel to their experts and back.
"""
