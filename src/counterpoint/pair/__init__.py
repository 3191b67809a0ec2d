"""One model of GEMMs and a collective that share a GPU: how long both take, and how to divide the SMs. No torch.

`together.py`: three models of the time of both, which one is right for which pair, and what overlap is worth.
`choice.py`: SMs for each side. `sm_split.py`: divisions of the SMs, and who finds room. `curves.py`: measured times
alone, and what lies between them. Figures come from `machine/profile.py`. From outside, all of these may be used.
"""
