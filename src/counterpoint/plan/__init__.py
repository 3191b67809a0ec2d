"""Predict the step of a job on other machines, and place its ranks: formulas and measured constants, no torch.

answer.py      the records that `counterpoint plan` prints: step, curves, sensitivities, placement
confidence.py  how sure a prediction is, by measured_steps.json: interval, "validated", P(fits)
explain.py     the formula behind each number
goodput.py     days, GPU-hours, cost and losses of the whole training
from_trace.py  a measured step on other machines
job/, compute/, network/, step/, search/, placement/: see the docstring of each

Other packages import `job.job`, `job.changes`, `step.step.predict_step`, `search.search`, and the files above.
"""
