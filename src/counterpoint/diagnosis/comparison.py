"""Compare two diagnoses: which parts of the step and which findings grew, in µs per step.

Gates check a diagnosis against bounds: `--gate 'exposed_comm<8%'`, or `'step<against+5%'` of an earlier diagnosis.
"""

from __future__ import annotations

import operator
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from counterpoint.errors import BadTrace, Misconfigured
from counterpoint.records.diagnosis import (
    SCHEMA,
    Change,
    Comparison,
    Diagnosis,
    FindingChange,
    KernelChange,
    KernelComparison,
    OperatorChange,
)

_LEAST_US = 5.0  # a smaller time would print as 0.00 ms
_SLOWER = 1.05
_NAMED = 0.3  # of the change of the step: the verdict names no finding that changed by less
_SAME = 0.02  # steps that differ by less than this share count as equally long
_KERNELS = 50
_MOST_OPERATORS = 500  # kernels of operators
_WRITTEN = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"counterpoint\.diagnosis/')
_TIMES = {
    "step": "duration_us",
    "compute": "compute_us",
    "comm": "comm_us",
    "overlapped": "overlapped_us",
    "exposed_comm": "exposed_comm_us",
    "memcpy": "memcpy_us",
    "idle": "idle_us",
    "wait": "wait_us",
    "transfer": "transfer_us",
}
_RATIOS = ("hidden", "comm_to_compute", "mfu")
METRICS = (*_TIMES, *_RATIOS, "stragglers")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)\s*(%|ms|us|µs|s)?"
_FORM = re.compile(rf"^\s*([a-z_]+)\s*(<=|>=|<|>)\s*(?:{_NUMBER}|(against)(?:\s*([+-])\s*{_NUMBER})?)\s*$")
_UNIT_US = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0}


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
    """Return how a mean step changed from the diagnosis `before` to the diagnosis `now`, in µs."""
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
        operators=_operators(now, before),
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
    """Return the change of each finding, matched by kind, late ranks also by rank, and stalls by title.

    Of several findings that match, the costliest counts.
    """
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


def _operators(now: Diagnosis, before: Diagnosis) -> tuple[OperatorChange, ...]:
    """Return the change of each operator's kernels; nothing if one of the runs was diagnosed without operators."""
    old, new = (_by_operator(d) for d in (before, now))
    if not old or not new:
        return ()
    every = [
        OperatorChange(
            name=key[0],
            kernel=key[1],
            before_us=old.get(key),
            now_us=new.get(key),
            change_us=new.get(key, 0.0) - old.get(key, 0.0),
        )
        for key in {**old, **new}
    ]
    shown = [c for c in every if abs(c.change_us) >= _LEAST_US]
    return tuple(sorted(shown, key=lambda c: -abs(c.change_us))[:_MOST_OPERATORS])


def _by_operator(d: Diagnosis) -> dict[tuple[str, str], float]:
    """Return the µs per step and rank by operator and kernel; "" where one of the two is not known."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for row in d.operators:
        for kernel in row.kernels:
            sums[row.operator or "", kernel.name] += kernel.us
        if not row.kernels:
            sums[row.operator or "", ""] += row.us
    return sums


def _kind(k: KernelComparison) -> tuple[str, tuple[int, ...], tuple[int, ...], str | None]:
    return k.name, k.grid, k.block, k.shapes


def _mean(k: KernelComparison) -> float | None:
    """Return a kernel's mean µs over launches alone and launches beside communication; None if no times are known."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Describes one bound on a metric: a time per step or a ratio; `%` is a share of the step, or of 1 for ratios.

    Where `against` is true, `bound` is the allowed excess over the earlier diagnosis, and `%` is a share of its value.
    """

    text: str
    metric: str
    compare: str
    bound: float
    unit: str
    against: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """Says whether a diagnosis passed a gate, and why."""

    text: str
    passed: bool
    reason: str


def parse_gate(text: str) -> Gate:
    """Return the gate described by text as `METRIC OP NUMBER[UNIT]` or `METRIC OP against[+NUMBER[UNIT]]`.

    Raises:
        Misconfigured: the text has another form, or a unit that its metric does not have.
    """
    found = _FORM.match(text)
    if found is None or found.group(1) not in METRICS:
        raise Misconfigured(
            f"gate {text!r}; expected METRIC OP BOUND as in 'exposed_comm<8%', 'step<=160ms' or 'step<against+5%', "
            f"with METRIC one of {', '.join(METRICS)}, OP one of < <= > >=, BOUND a number with a unit "
            "of % us ms s, or against with what may be added or taken off"
        )
    metric, compare, number, unit, against, sign, more, more_unit = found.groups()
    number, unit = (more or "0", more_unit or "%" * (more is None)) if against else (number, unit or "")
    if metric in _TIMES and (not unit or (unit == "%" and metric == "step" and not against)):
        shares = " or % of the step" if metric != "step" else ""
        raise Misconfigured(f"gate {text!r}: {metric} is a time; give us, ms or s{shares}")
    if metric not in _TIMES and unit not in ("", "%"):
        raise Misconfigured(f"gate {text!r}: {metric} has no unit of time; give a number or %")
    bound = -float(number) if sign == "-" else float(number)
    return Gate(text=text.strip(), metric=metric, compare=compare, bound=bound, unit=unit, against=bool(against))


def check_gate(gate: Gate, now: Diagnosis, earlier: Diagnosis | None = None) -> GateResult:
    """Return whether the diagnosis `now` passes a gate; fail the gate if a diagnosis it needs lacks the metric."""
    unit = "ms" if gate.against and gate.unit == "%" and gate.metric in _TIMES else gate.unit
    value, before = _value(gate.metric, unit, now), _value(gate.metric, unit, earlier) if earlier else None
    if value is None or (gate.against and before is None):
        where = "these traces" if value is None else "the earlier run"
        return GateResult(text=gate.text, passed=False, reason=f"{gate.metric} is not known from {where}")
    bound = gate.bound / 100 if gate.unit == "%" else gate.bound
    if gate.against and before is not None:
        bound = before + (bound * abs(before) if gate.unit == "%" else bound)
    passed = _OPERATORS[gate.compare](value, bound)
    reason = f"{gate.metric} is {_shown(unit, value)}"
    if before is not None:
        reason += f", was {_shown(unit, before)}"
    return GateResult(text=gate.text, passed=passed, reason=reason)


def _value(metric: str, unit: str, d: Diagnosis) -> float | None:
    """Return a metric's value in `unit`; None if the diagnosis does not state the metric."""
    if metric == "stragglers":
        return float(len(d.stragglers))
    value: float | None = getattr(d.totals, _TIMES.get(metric, metric))
    if value is None or metric in _RATIOS:
        return value
    if unit == "%":
        return value / d.totals.duration_us if d.totals.duration_us > 0 else None
    return value / max(len(d.steps), 1) / _UNIT_US[unit]


def _shown(unit: str, value: float) -> str:
    return f"{100 * value:.2f} %" if unit == "%" else f"{value:.3f} {unit}".strip()
