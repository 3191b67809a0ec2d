"""Report the problems that a person can act on: each finding has its cost, its evidence and advice.

findings.py lists and ranks what the finders yield, and gives the verdict. advice.py says what to change.
"""
