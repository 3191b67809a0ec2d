"""Say what a person can act on: each finding has a cost, its evidence and an advice.

findings.py lists and ranks what the finders yield, and gives the verdict. advice.py says what to change.
"""
