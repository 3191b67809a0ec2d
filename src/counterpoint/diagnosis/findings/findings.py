"""List the findings (problems that a person can act on), causes before symptoms, and write the verdict.

Costs come from the replay (the step without the problem), and are split among causes by the time that each kernel
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.findings.advice import remedy_of
from counterpoint.diagnosis.findings.communication import (
    LEAST_EXPOSED_SHARE,
    find_exposed,
    find_odd_payloads,
    find_slow_links,
    find_suspected_waits,
)
from counterpoint.diagnosis.findings.compute import (
    LEAST_SHARE,
    find_fsdp2_copies,
    find_late_ranks,
    find_launch_order,
    find_slow_kernels,
    find_stream_order,
)
from counterpoint.diagnosis.findings.copies import find_copies
from counterpoint.diagnosis.findings.data_parallel import find_buckets, find_late_gathers, find_one_unit
from counterpoint.diagnosis.findings.idle import find_idle
from counterpoint.diagnosis.findings.imbalance import find_expert_imbalance, find_pipeline_bubbles, find_turns
from counterpoint.diagnosis.findings.operators import compute_in_words, find_compute_losses
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.diagnosis import Finding, in_sentence

FINDERS: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (  # in this order where costs are equal
    find_late_ranks,
    find_slow_kernels,
    find_launch_order,
    find_stream_order,
    find_one_unit,
    find_late_gathers,
    find_buckets,
    find_odd_payloads,
    find_fsdp2_copies,
    find_idle,
    find_copies,
    find_compute_losses,
    find_turns,
    find_suspected_waits,
    find_pipeline_bubbles,
    find_expert_imbalance,
    find_slow_links,
    find_exposed,
)
_LEAST_US = 5.0  # a smaller cost would print as 0.00 ms
_SYMPTOMS = ("exposed_comm", "fsdp2_copies")  # kinds that healthy jobs have too: causes come before them, ...
_CAUSE_SHARE = 0.2  # ... if they cost at least this share of the costliest finding
_UNEVEN_FACTOR = 1.25  # times the median step: where the mean step is longer, the verdict names both


def find_findings(a: Analysis) -> tuple[Finding, ...]:
    """Return the findings in the order of `in_order`; none if only hosts were recorded."""
    if not a.job.gpu_recorded or a.step_us <= 0:
        return ()
    return in_order(
        msgspec.structs.replace(f, remedy=f.remedy or remedy_of(f.advice))
        for finder in FINDERS
        for f in finder(a)
        if f.cost_us >= _LEAST_US
    )


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings by falling cost, but causes before symptoms.

    A cause that costs little beside the costliest finding stands among the symptoms.
    """
    found = tuple(findings)
    least = _CAUSE_SHARE * max((f.cost_us for f in found), default=0.0)
    return tuple(sorted(found, key=lambda f: (f.kind in _SYMPTOMS or f.cost_us < least, -f.cost_us)))


def verdict(a: Analysis, findings: tuple[Finding, ...]) -> str:
    """Return the verdict: how long a step takes, how much communication is hidden, and which finding is the first."""
    job, account, step = a.job, a.totals, a.step_us
    what = "A step" if job.has_steps else "The recording (no steps were found in it)"
    takes = f"{step / 1e3:.1f} ms" if step >= 100.0 else f"{step:.3g} µs"
    if not job.gpu_recorded:
        return (
            f"{what} takes {takes} on the host. GPU activity was not recorded, so nothing can be said of what "
            "the GPUs did: record with ProfilerActivity.CUDA beside ProfilerActivity.CPU."
        )
    takes += _usually(job, step / 1e3)
    if account.hidden is None:
        head = f"{what} takes {takes}; no communication was seen."
    else:
        exposed = account.exposed_comm_us / account.duration_us if account.duration_us else 0.0
        head = (
            f"{what} takes {takes}; {account.hidden:.0%} of the communication is hidden, {exposed:.0%} of the "
            f"{job.whole} waits for it."
        )
        cost = max((f.cost_us for f in findings if f.kind == "exposed_comm"), default=0.0)
        if exposed >= LEAST_EXPOSED_SHARE and a.replay and cost < LEAST_SHARE * step:
            head += (
                " Without communication it would take as long, by the replay: it waits for something else meanwhile."
            )
    if not findings:
        return f"{head} Nothing stands out.{compute_in_words(a)}"
    first = findings[0]
    said = f" ({_cost(first)} {job.each})"
    if first.kind == "exposed_comm" and a.waits_untold:
        said = "; how much of it is waiting for ranks without a trace is unknown"
    elif first.kind in ("exposed_comm", "copies"):  # the title gives the duration, which differs from the cost
        said = f"; at most {_cost(first)} {'of it ' if first.kind == 'exposed_comm' else ''}can be saved"
    what = "Main loss" if first.kind in _SYMPTOMS else "Main cause"
    return f"{head} {what}: {in_sentence(first.title)}{said}."


def _cost(finding: Finding) -> str:
    return f"{finding.cost_us / 1e3:.{1 if finding.cost_us >= 1000 else 2}f} ms"


def _usually(job: TracedJob, mean_ms: float) -> str:
    """Return text on the median step if a few long steps make the mean much longer than the median; else ""."""
    each = (job.step_end - job.step_start).mean(axis=1) / 1e3
    usual, longest = float(np.median(each)), int(each.argmax())
    if mean_ms <= _UNEVEN_FACTOR * usual:
        return ""
    return f" on average, usually {usual:.1f} (longest: {job.step_names[longest][:60]}, {each[longest]:.1f} ms)"
