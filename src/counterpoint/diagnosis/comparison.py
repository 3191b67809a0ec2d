"""Compare two diagnoses: which parts of the step and which findings grew, in µs per step."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

import msgspec

from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import (
    SCHEMA,
    Change,
    Comparison,
    Diagnosis,
    FindingChange,
    KernelChange,
    KernelComparison,
)

_LEAST_US = 5.0  # a smaller time would print as 0.00 ms
_SLOWER = 1.05
_NAMED = 0.3  # of the change of the step: the verdict names no finding that changed by less
_SAME = 0.02  # steps that differ by less than this share count as equally long
_KERNELS = 50
_WRITTEN = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"counterpoint\.diagnosis/')


def is_diagnosis(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a diagnosis written by `--json`."""
    try:
        with Path(path).open("rb") as file:
            return _WRITTEN.match(file.read(256)) is not None
    except OSError:
        return False


def read_diagnosis(path: Path) -> Diagnosis:
    """Return the diagnosis in a file that `--json` wrote; raise `BadTrace` for any other file."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Diagnosis)
    except OSError as error:
        raise BadTrace(f"the earlier run cannot be read: {error.strerror}", path=str(path)) from None
    except msgspec.DecodeError as error:
        raise BadTrace(f"not a diagnosis written by --json: {error}", path=str(path)) from None
    if found.schema != SCHEMA:
        raise BadTrace(f"schema {found.schema!r}; this version compares {SCHEMA}", path=str(path))
    return found


def compare(now: Diagnosis, before: Diagnosis) -> Comparison:
    """Return the changes of a mean step, in µs, from an earlier run to this one."""
    step = _change("step", _step_us(before), _step_us(now))
    findings = _findings(now, before)
    parts = _changes(_parts(before), _parts(now))
    return Comparison(
        verdict=_verdict(step, findings, parts),
        before=before.source.files,
        now=now.source.files,
        notes=_notes(now, before),
        step=step,
        hidden_before=before.totals.hidden,
        hidden_now=now.totals.hidden,
        parts=parts,
        findings=findings,
        idle=_changes(_idle(before), _idle(now)) if now.idle and before.idle else (),
        exposed=_changes(_exposed(before), _exposed(now)),
        late=_changes(_late(before), _late(now)),
        kernels=_kernels(now, before),
    )


def _steps(d: Diagnosis) -> int:
    return max(len(d.steps), 1)


def _step_us(d: Diagnosis) -> float:
    return d.totals.duration_us / _steps(d)


def _change(name: str, before: float | None, now: float | None) -> Change:
    return Change(name=name, before_us=before, now_us=now, change_us=(now or 0.0) - (before or 0.0))


def _changes(before: dict[str, float], now: dict[str, float]) -> tuple[Change, ...]:
    every = [_change(name, before.get(name), now.get(name)) for name in {**before, **now}]
    shown = [c for c in every if max(c.before_us or 0.0, c.now_us or 0.0) >= _LEAST_US]
    return tuple(sorted(shown, key=lambda c: -c.change_us))


def _parts(d: Diagnosis) -> dict[str, float]:
    t, steps = d.totals, _steps(d)
    copies = max(t.duration_us - t.compute_us - t.exposed_comm_us - t.idle_us, 0.0)
    parts = {"compute": t.compute_us, "exposed communication": t.exposed_comm_us, "copies": copies, "idle": t.idle_us}
    return {name: us / steps for name, us in parts.items()}


def _idle(d: Diagnosis) -> dict[str, float]:
    return {c.category: c.us for c in d.idle.causes} if d.idle else {}


def _exposed(d: Diagnosis) -> dict[str, float]:
    """Return the exposed µs per step by operation, scaled so that concurrent operations do not count twice."""
    by_op: dict[str, float] = defaultdict(float)
    for c in d.collectives:
        if c.step is not None:
            by_op[c.op] += c.exposed_us / _steps(d)
    whole = sum(by_op.values())
    scale = min(d.totals.exposed_comm_us / _steps(d) / whole, 1.0) if whole > 0 else 1.0
    return {op: us * scale for op, us in by_op.items()}


def _late(d: Diagnosis) -> dict[str, float]:
    return {f"rank {s.rank}": s.delay_us / _steps(d) for s in d.stragglers}


def _findings(now: Diagnosis, before: Diagnosis) -> tuple[FindingChange, ...]:
    """Match findings by kind (late ranks also by rank, stalls by title); of several that match, take the costliest."""
    old, new = (_by_key(d) for d in (before, now))
    out = []
    for key in {**new, **old}:
        title, rank, now_us = new.get(key, (None, None, None))
        old_title, old_rank, before_us = old.get(key, (None, None, None))
        out.append(
            FindingChange(
                name=title or old_title or key[0],
                kind=key[0],
                rank=rank if title else old_rank,
                before_us=before_us,
                now_us=now_us,
                change_us=(now_us or 0.0) - (before_us or 0.0),
            )
        )
    return tuple(sorted(out, key=lambda c: -c.change_us))


def _by_key(d: Diagnosis) -> dict[tuple[str, str], tuple[str, int | None, float]]:
    out: dict[tuple[str, str], tuple[str, int | None, float]] = {}
    for f in d.findings:
        which = f"rank {f.rank}" if f.kind == "straggler" else "" if f.kind != "host_stall" else f.title
        out.setdefault((f.kind, which), (f.title, f.rank, f.cost_us))
    return out


def _kernels(now: Diagnosis, before: Diagnosis) -> tuple[KernelChange, ...]:
    old = {_kind(k): k for k in before.kernels}
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for k in now.kernels:
        same = old.get(_kind(k))
        times = _mean(k), _mean(same) if same else None
        if times[0] is None or times[1] is None:
            continue
        a_step = (k.alone_count + k.overlapped_count) / max(len(now.ranks), 1) / _steps(now)
        sums[k.name][0] += times[1] * a_step
        sums[k.name][1] += times[0] * a_step
    slower = [
        KernelChange(name=name, before_us=b, now_us=n, change_us=n - b, slowdown=n / b)
        for name, (b, n) in sums.items()
        if b > 0 and n > _SLOWER * b and n - b >= _LEAST_US
    ]
    return tuple(sorted(slower, key=lambda k: -k.change_us)[:_KERNELS])


def _kind(k: KernelComparison) -> tuple[str, tuple[int, ...], tuple[int, ...], str | None]:
    return k.name, k.grid, k.block, k.shapes


def _mean(k: KernelComparison) -> float | None:
    """Return the mean µs of a kernel over its calls, alone and beside communication; None if it has no times."""
    parts = [(k.alone_us, k.alone_count), (k.overlapped_us, k.overlapped_count)]
    seen = [(us, count) for us, count in parts if us is not None and count > 0]
    count = sum(count for _, count in seen)
    return sum(us * count for us, count in seen) / count if count else None


def _notes(now: Diagnosis, before: Diagnosis) -> tuple[str, ...]:
    facts = (
        ("ranks recorded", len(before.ranks), len(now.ranks)),
        ("ranks in the job", before.world_size, now.world_size),
        ("GPU", before.gpu, now.gpu),
    )
    notes = [f"{what}: {b} before, {n} now" for what, b, n in facts if b != n]
    if any(d.steps and not d.has_steps for d in (now, before)):
        notes.append("no steps were found in one of the two: its whole recording counts as one")
    return tuple(notes)


def _verdict(step: Change, findings: tuple[FindingChange, ...], parts: tuple[Change, ...]) -> str:
    before, now = step.before_us or 0.0, step.now_us or 0.0
    if abs(step.change_us) <= _SAME * before:
        head = f"A step takes {now / 1e3:.1f} ms, about as long as before ({before / 1e3:.1f} ms)."
    else:
        more = "longer" if step.change_us > 0 else "less"
        share = f", {step.change_us / before:+.0%}" if before > 0 else ""
        size = abs(step.change_us) / 1e3
        head = f"A step takes {now / 1e3:.1f} ms, {size:.1f} ms {more} than before ({before / 1e3:.1f} ms{share})."
    sign = 1.0 if step.change_us >= 0 else -1.0
    causes = [f for f in findings if f.kind != "exposed_comm"]
    named: Change | None = max(causes, key=lambda f: sign * f.change_us, default=None)
    least = max(_NAMED * abs(step.change_us), _SAME * before)
    if named is None or sign * named.change_us < least:
        named = max(parts, key=lambda p: sign * p.change_us, default=None)
    if named is None or sign * named.change_us < least:
        return head
    what = "grew most" if sign > 0 else "shrank most"
    if isinstance(named, FindingChange) and (named.before_us is None or named.now_us is None):
        what = "is new" if named.before_us is None else "is gone"
    name = named.name[:1].lower() + named.name[1:]
    return f"{head} What {what}: {name} ({named.change_us / 1e3:+.2f} ms a step)."
