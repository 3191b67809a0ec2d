"""Find the fastest division of a job that fits in memory.

space.py     the axes, their values, and those that were fixed
stages.py    layers dealt unevenly, so that the busiest stage has least to do and every stage fits
search.py    `search(job) -> SearchResult`: the fastest first, by bounds; nothing that could win is left out
"""
