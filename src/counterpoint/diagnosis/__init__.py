"""Find out from the traces of one job where the time of a step goes, which operations wait or slow down, and why.

`counterpoint.diagnose` is api.py: it reads the ranks (reading/), analyses the job that they make (analysis/), and says
what to act on (findings/). comparison.py compares two diagnoses and checks one in CI; frames.py turns one into tables.
nccl_report.py says what NCCL's logs show, cost.py what exposed communication costs. summary.py writes digests to
files, many_ranks.py joins thousands of them. hang.py finds which ranks are missing in flight-recorder dumps.
"""
