"""Put names and numbers into the words that findings share."""

from __future__ import annotations

from counterpoint.diagnosis.reading.traced_job import TracedJob

_ABOUT_SHARE = 0.9  # of what something takes; if it costs less than this share, or that much more, both are said


def short_name(name: str, most: int = 80) -> str:
    """Return a name of at most `most` letters; what is cut off shows as …."""
    return name if len(name) <= most else name[: most - 3] + "…"


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: `1 kernel`, `2 kernels`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_parentheses(*names: str | None) -> str:
    """Return the names that are known, as ` (dp, backward)`; empty if none is."""
    known = [name for name in names if name]
    return f" ({', '.join(known)})" if known else ""


def saves_otherwise(job: TracedJob, cost: float, exposed: float) -> str:
    """Say that a step without something would be shorter by less or more than it is exposed; empty if by as much."""
    what = "a step" if job.has_steps else "the recording"
    if cost * _ABOUT_SHARE > exposed:
        return f"; without it {what} would take {cost / 1e3:.2f} ms less, for other work waits for it"
    if cost >= _ABOUT_SHARE * exposed:
        return ""
    return f"; without it {what} would take only {cost / 1e3:.2f} ms less, for it waits for something else meanwhile"
