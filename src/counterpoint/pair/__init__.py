"""Model GEMMs and a collective that share a GPU: how long both take, and how to divide the SMs. No torch.

`together.py`: three models of the time of both, and which one is right for which pair. `hidden.py`: what overlap is
worth. `choice.py`: SMs for each side. `sm_split.py`: divisions of the SMs, and which blocks fit. `curves.py`: measured
times alone, interpolated. Figures come from `machine/profile.py`. Other packages may import all of these files.

A matmul that depends on its communication: `row_curves.py` has its time by rows, `sharded_rows.py` whose rows are
where, `arrivals.py` when rows come and whether that can hide, `cuts.py` the best pieces, `matmul_choice.py` how it runs
best. `expert_choice.py`: how tokens travel to their experts and back.
"""
