"""Name what a GPU waited for while it ran nothing, and which names of host ranges say so."""

from __future__ import annotations

from functools import lru_cache

from counterpoint.diagnosis.reading import host_names

CATEGORIES = (
    "operation",  # the host spent long in one operation or Python function
    "launch",  # host-bound: the host launches more slowly than the GPU runs, without a single long pause
    "allocator",
    "garbage_collection",
    "late_input",
    "synchronise",  # the host had waited for the GPU, so nothing was queued
    "copy",  # a copy blocked the host
    "start_up",  # CUDA was starting, kernels were loaded or compiled, or a graph was captured
    "profiler",  # the profiler's own work
    "queued",  # the next operation was launched in time, but waited for an event, another stream or another rank
    "between_kernels",  # the next operation was launched in time: the few µs from one kernel to the next
    "no_launch_recorded",  # the trace does not say when the next operation was launched, nor what the host did
    "unrecorded",  # the host launched nothing, and no range of any thread says what it did
    "nothing_recorded",  # before the first event of the trace or after its last
    "earlier_work",  # the first operation of its stream, launched long ago, waits: for work that was not recorded
    "page_migration",  # between migrations of unified memory: no call launches them, the host touches pages
    "other_gpu",  # another GPU of the same process works: no gap of all its GPUs
)
_NUMBER = {name: number for number, name in enumerate(CATEGORIES)}
OPERATION, LAUNCH = _NUMBER["operation"], _NUMBER["launch"]
QUEUED, BETWEEN = _NUMBER["queued"], _NUMBER["between_kernels"]
SYNCHRONISE, COPY, START_UP = _NUMBER["synchronise"], _NUMBER["copy"], _NUMBER["start_up"]
ALLOCATOR, NO_LAUNCH, UNRECORDED = _NUMBER["allocator"], _NUMBER["no_launch_recorded"], _NUMBER["unrecorded"]
NOTHING, EARLIER_WORK = _NUMBER["nothing_recorded"], _NUMBER["earlier_work"]
GARBAGE_COLLECTION, PROFILER, PAGES = _NUMBER["garbage_collection"], _NUMBER["profiler"], _NUMBER["page_migration"]
NOT_RECORDED = ("unrecorded", "no_launch_recorded", "nothing_recorded")  # the trace does not hold the cause
_PATTERNS = (
    ("allocator", (host_names.ALLOCATION,)),
    ("garbage_collection", (host_names.GARBAGE_COLLECTION,)),
    ("start_up", (host_names.START_UP, host_names.CAPTURE, host_names.COMPILATION)),
    ("profiler", (host_names.PROFILER,)),
    ("late_input", (host_names.INPUT,)),
    ("synchronise", (host_names.SYNCHRONISATION,)),
    ("copy", (host_names.COPY,)),
)


@lru_cache(maxsize=1 << 13)  # the ranks of a job share their names
def category_of(name: str) -> int:
    """Return the category, a place in CATEGORIES, of a host range of this name."""
    return next((_NUMBER[c] for c, patterns in _PATTERNS if any(p.search(name) for p in patterns)), OPERATION)
