"""Format names and numbers for the texts of findings."""

from __future__ import annotations

from counterpoint.diagnosis.reading.traced_job import TracedJob

_ABOUT_SHARE = 0.9  # if cost / exposed time is below this share, or above its inverse, the text says so


def short_name(name: str, most: int = 80) -> str:
    """Return a name, cut to `most` characters if it is longer; a cut name ends with …."""
    return name if len(name) <= most else name[: most - 3] + "…"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 kernel`, `2 kernels`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_parentheses(*names: str | None) -> str:
    """Return the names that are not None in parentheses, as ` (dp, backward)`; empty if all are None."""
    known = [name for name in names if name]
    return f" ({', '.join(known)})" if known else ""


def saves_otherwise(job: TracedJob, cost: float, exposed: float) -> str:
    """Return text on how much shorter a step without a problem is, if that differs from its exposed time; else ""."""
    what = "a step" if job.has_steps else "the recording"
    if cost * _ABOUT_SHARE > exposed:
        return f"; without it {what} would take {cost / 1e3:.2f} ms less, for other work waits for it"
    if cost >= _ABOUT_SHARE * exposed:
        return ""
    return f"; without it {what} would take only {cost / 1e3:.2f} ms less, for it waits for something else meanwhile"
