"""Find why a rank is late: host work while the rank's GPU idled, exposed copies, or slow or additional kernels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.idle import time_in
from counterpoint.diagnosis.reading.gaps import Gaps
from counterpoint.diagnosis.reading.host_categories import CATEGORIES
from counterpoint.diagnosis.reading.modules import PHASES, Places, in_words, module_of
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.records.causes import IDLE_CAUSES
from counterpoint.records.diagnosis import StragglerCause
from counterpoint.trace.classify import is_matmul
from counterpoint.trace.timeline import F64, I64, Kind

EXPLAINED_SHARE = 0.3  # of the delay: a difference of less is not its cause
_ONE_KERNEL_SHARE = 0.8  # of the longer compute of a rank is in kernels of one name, while the others, ...
_OTHER_KERNELS_SHARE = 0.2  # ... of at least this share of its compute, ...
_AS_FAST_SHARE = 0.1  # ... are slower by no more than this share of the slowness of that one

_Signatures = dict[tuple[str, tuple[int, ...], str], F64]  # durations by name, grid and block, and shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Why:
    """Holds why a rank is late, where in the program, and, if idle time is the cause, the GPU's longest gap."""

    cause: StragglerCause
    evidence: str
    detail: str | None = None
    phase: str | None = None
    module: str | None = None
    gap: tuple[float, float] | None = None


def host_cause(job: TracedJob, column: int, late: I64, steps: I64) -> Why:
    """Return the cause of a rank's longer idle time: the category that exceeds the other ranks' median most.

    The evidence names a second category where the first makes up less than half of the excess.
    """
    gaps, names = job.digests[column].gaps, job.digests[column].names
    us = time_in(job, column, steps)
    if not (us > 0).any():
        return Why(cause="host_stall", evidence="its GPU had nothing to do; no single gap is long enough to say why")
    idle = _by_category(gaps, us)
    others = [_by_category(job.digests[c].gaps, time_in(job, c, steps)) for c in range(len(job.ranks)) if c not in late]
    longer = np.where(idle > 0, np.maximum(idle - np.median(others, axis=0), 0.0), -1.0)
    first, second = np.argsort(-longer, kind="stable")[:2].tolist()
    rows = np.flatnonzero((us > 0) & (gaps.category == first))
    operations, which = np.unique(gaps.operation[rows], return_inverse=True)
    most = int(np.bincount(which.ravel(), weights=us[rows]).argmax())
    own = rows[which.ravel() == most]
    gap = int(own[us[own].argmax()])
    category, operation = CATEGORIES[first], names[operations[most]] if operations[most] >= 0 else None
    host_ms, gap_ms = float(gaps.host_us[gap]) / 1e3, float(us[gap]) / 1e3
    phase, module = _place(job.digests[column].gap_places, gap, names)
    where = f" (inside {names[gaps.inside[gap]]})" if gaps.inside[gap] >= 0 else ""
    where += in_words(phase, module)
    on_host = job.digests[column].device.from_host
    dry = f"{'it paused' if on_host else 'its GPU had no work'} for {idle[first] / 1e3:.2f} ms{_within(job, steps)}"
    dry += f", {gap_ms:.2f} ms at once"
    if 2 * longer[first] < np.maximum(longer, 0).sum():
        dry += f" (and for {idle[second] / 1e3:.2f} ms: {IDLE_CAUSES[CATEGORIES[second]].short})"
    cause: StragglerCause = "host_stall"
    detail = operation
    if category == "late_input":
        cause = "late_input"
        evidence = f"{dry}, while its host waited {host_ms:.2f} ms for input in {operation}{where}"
    elif category == "launch":
        detail = "launch"
        evidence = f"{dry}: its host launches more slowly than the GPU works (host-bound){in_words(phase, module)}"
    elif category == "queued":
        cause, detail = "unknown", None
        evidence = f"{dry}, with work queued that waited for something else: an event, a stream, another rank"
    elif category == "nothing_recorded":
        cause, detail = "unknown", category
        evidence = f"{dry}, before the first event of its trace or after the last"
    elif not _host_was_recorded(job, column):
        cause, detail = "no_host_events", None
        evidence = dry
    elif operation is None:
        detail = None
        evidence = (
            f"{dry}; its host launched nothing for {host_ms:.2f} ms and no operation was recorded{where}: Python code, "
            "garbage collection or the system"
        )
    elif category in ("allocator", "garbage_collection", "start_up", "profiler", "copy"):
        detail = category
        evidence = f"{dry}, while its host sat {host_ms:.2f} ms in {category.replace('_', ' ')} ({operation}){where}"
    else:
        evidence = f"{dry}, while its host sat {host_ms:.2f} ms in {operation}{where}"
    at = (float(gaps.start[gap]), float(gaps.end[gap]))
    return Why(cause=cause, detail=detail, evidence=evidence, phase=phase, module=module, gap=at)


def _within(job: TracedJob, steps: I64) -> str:
    """Return text on the steps over which a time is summed; empty if the job has one step."""
    return f" in {len(steps)} of {job.num_steps} steps" if job.num_steps > 1 else ""


def _by_category(gaps: Gaps, us: F64) -> F64:
    """Return the sum of the µs of a rank's gaps, by category of `CATEGORIES`."""
    return np.bincount(gaps.category, us, len(CATEGORIES)).astype(np.float64)


def _host_was_recorded(job: TracedJob, column: int) -> bool:
    """Return whether a rank's trace shows the host's activity in any gap, or any host call that waits for the GPU."""
    digest = job.digests[column]
    known = (IDLE_CAUSES[CATEGORIES[number]].recorded for number in np.unique(digest.gaps.category).tolist())
    return any(known) or bool(len(digest.waits.start))


def _place(places: Places, row: int, names: tuple[str, ...]) -> tuple[str | None, str | None]:
    module = int(places.module[row])
    return PHASES[places.phase[row]], module_of(names[module]) if module >= 0 else None


def copy_cause(copies_us: float, felt: float) -> Why:
    """Return late input as the cause of lateness by exposed copies."""
    evidence = f"copies that ran beside no compute explain {copies_us / 1e3:.2f} of its {felt / 1e3:.2f} ms"
    return Why(cause="late_input", detail="memcpy", evidence=evidence)


def compute_cause(job: TracedJob, column: int, late: I64, steps: I64, compute_us: float, felt: float) -> Why:
    """Return the cause of lateness: different, slower or more kernels, or unknown if these do not explain the delay.

    The kernels of a rank in some steps are compared, by name, grid, block and input shapes, with those of the peer that
    has the median kernel time. Times of kernels that both ran are compared mean by mean, weighted by the rank's counts.
    """
    mine = _signatures(job, column, steps)
    others_of = {c: _signatures(job, c, steps) for c in range(len(job.ranks)) if c not in late}
    by_time = sorted(others_of, key=lambda c: sum(float(v.sum()) for v in others_of[c].values()))
    peer_column = by_time[(len(by_time) - 1) // 2]
    peer, theirs = job.ranks[peer_column], others_of[peer_column]
    both = mine.keys() & theirs.keys()
    matched, count = sum(min(len(mine[s]), len(theirs[s])) for s in both), sum(map(len, mine.values()))
    expected = sum(float(np.mean(theirs[s])) * len(mine[s]) for s in both)
    measured = sum(float(np.mean(mine[s])) * len(mine[s]) for s in both)
    ratio, other_share = measured / expected if expected > 0 else 1.0, 1 - matched / count if count else 0.0
    others = {s: v for s, v in mine.items() if s not in theirs}
    lacking = {s: v for s, v in theirs.items() if s not in mine}
    extra_us = sum(float(v.sum()) for v in others.values()) - sum(float(v.sum()) for v in lacking.values())
    extra_us += sum(
        float(mine[s].sum()) * (1 - len(theirs[s]) / len(mine[s])) for s in both if len(mine[s]) > len(theirs[s])
    )
    example = None
    if others:
        example = max(others, key=lambda s: float(others[s].sum()))[0][:120]
    elif both:
        longer = {s: (float(np.mean(mine[s])) - float(np.mean(theirs[s]))) * len(mine[s]) for s in both}
        example = max(both, key=lambda s: longer[s])[0][:120]
    places = zip(*(_by_place(job, c, steps) for c in (column, peer_column)), strict=True)
    phase, module = (_mostly(*of_both) for of_both in places)
    where = in_words(phase, module).replace(", in", ", mostly in", 1)
    each = " a step" if len(steps) > 1 else ""
    text = f"it computes {compute_us / len(steps) / 1e3:.2f} ms{each} longer than the typical rank{where}"
    enough = EXPLAINED_SHARE * felt
    slower = ratio > 1.02 and measured - expected > enough
    slowest, slowest_ratio, other_ratio = _slowest(mine, theirs)
    cause: StragglerCause = "unknown"
    if other_share >= 0.1 and extra_us > enough:
        cause = "more_work"
        text += (
            f": {other_share:.0%} of its kernels differ in grid or shapes from rank {peer}'s, "
            f"{extra_us / 1e3:+.2f} ms of kernels{_within(job, steps)} (one of them: {example})"
        )
    elif slower and slowest:
        cause, example = "slow_kernel", slowest
        text += (
            f": {slowest} takes {slowest_ratio:.2f} x as long as on rank {peer}, in equal grids "
            f"and shapes, and all its other kernels {other_ratio:.2f} x: its work differs, not the GPU"
        )
    elif slower:
        cause = "slow_kernels"
        text += (
            f": the same kernels take {ratio:.2f} x as long as on rank {peer} "
            f"({matched} of {count} kernels compared, worst {example})"
        )
    elif extra_us > max(enough, 0.5 * compute_us):
        cause = "more_work"
        text += f": {extra_us / 1e3:.2f} ms of kernels{_within(job, steps)} that rank {peer} lacks"
    else:
        example = None
        text += f", but its kernels are as many and as fast as those of rank {peer}"
    return Why(cause=cause, detail=example, evidence=text, phase=phase, module=module)


def _slowest(mine: _Signatures, theirs: _Signatures) -> tuple[str | None, float, float]:
    """Return the kernel that explains most of the slowness (or None), its slowdown, and that of all other kernels.

    A slow GPU is slow in several kernels. If power limits the GPU, these may be its matrix products only; so a product
    is named only if there are other products and all other kernels are nearly as fast as on the peer.
    """
    measured, expected = defaultdict[str, float](float), defaultdict[str, float](float)
    for s in mine.keys() & theirs.keys():
        measured[s[0]] += float(mine[s].sum())
        expected[s[0]] += float(np.mean(theirs[s])) * len(mine[s])
    if not expected:
        return None, 1.0, 1.0
    name = max(measured, key=lambda n: measured[n] - expected[n])
    longer = sum(measured.values()) - sum(expected.values())
    rest = sum(expected.values()) - expected[name]
    if rest < _OTHER_KERNELS_SHARE * sum(expected.values()) or expected[name] <= 0:
        return None, 1.0, 1.0
    ratio, other = measured[name] / expected[name], (sum(measured.values()) - measured[name]) / rest
    alone = measured[name] - expected[name] >= _ONE_KERNEL_SHARE * longer > 0 and other - 1 <= _AS_FAST_SHARE * (
        ratio - 1
    )
    products = [n for n in expected if n != name and is_matmul(n)]
    if not alone or (is_matmul(name) and not products):
        return None, ratio, other
    return name, ratio, other


def _by_place(job: TracedJob, column: int, steps: I64) -> tuple[dict[str | None, float], dict[str | None, float]]:
    """Return a rank's compute µs in some steps, by phase and by module; the key None means unknown."""
    d = job.digests[column]
    rows = np.flatnonzero((d.gpu.kind == Kind.COMPUTE) & job.in_steps(column, steps))
    us, places = (d.gpu.end - d.gpu.start)[rows], d.op_places
    by_phase = np.bincount(places.phase[rows], us, len(PHASES))
    used, which = np.unique(places.module[rows], return_inverse=True)
    by_module: dict[str | None, float] = defaultdict(float)  # ranges of several names may name one module
    for i, t in zip(used.tolist(), np.bincount(which.ravel(), us, len(used)).tolist(), strict=True):
        by_module[module_of(d.names[i]) if i >= 0 else None] += t
    return dict(zip(PHASES, by_phase.tolist(), strict=True)), by_module


def _mostly(mine: dict[str | None, float], theirs: dict[str | None, float]) -> str | None:
    """Return the phase or module that makes up at least half of the excess of `mine` over `theirs`; else None."""
    longer = {place: us - theirs.get(place, 0.0) for place, us in mine.items()}
    whole = sum(mine.values()) - sum(theirs.values())
    most = max(longer, key=lambda place: longer[place], default=None)
    return most if most is not None and longer[most] >= 0.5 * whole > 0 else None


def _signatures(job: TracedJob, column: int, steps: I64) -> _Signatures:
    """Return the µs of a rank's compute kernels in some steps, by name, grid + block, and input shapes."""
    d, gpu = job.digests[column], job.digests[column].gpu
    rows = np.flatnonzero((gpu.kind == Kind.COMPUTE) & job.in_steps(column, steps))
    if not len(rows):
        return {}
    facts = np.column_stack([gpu.name[rows], gpu.shape[rows], gpu.grid[rows], gpu.block[rows]])
    kinds, which = np.unique(facts, axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    parts = np.split((gpu.end - gpu.start)[rows][order], np.cumsum(np.bincount(which.ravel()))[:-1])
    return {
        (d.names[k[0]], tuple(k[2:]), d.shapes[k[1]] if k[1] >= 0 else ""): part
        for k, part in zip(kinds.tolist(), parts, strict=True)
    }
