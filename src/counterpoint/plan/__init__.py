"""The step of a job on other machines, and the places of its ranks: formulas and measured constants, no torch.

answer.py      the records that `counterpoint plan` prints: step, curves, sensitivities, placement
explain.py     the formula behind each number
search.py      the fastest way to divide a job
from_trace.py  a measured step on other machines
job/, compute/, network/, step/, placement/: each says what it has

From outside: `job.job`, `job.what_if`, `step.step.predict_step`, and the four files above.
"""
