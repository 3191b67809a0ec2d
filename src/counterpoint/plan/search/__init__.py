"""Find the fastest division of a job that fits in memory.

space.py     the axes, their values, and those that were fixed; layers dealt unevenly among stages
rank.py      results ranked by an objective, their Pareto front, what keeps a choice from the first
search.py    `search(job) -> SearchResult`: the fastest first, by bounds; nothing that could win is left out
"""
