"""Check a diagnosis against bounds such as `--gate 'exposed_comm<8%'`, and against an earlier diagnosis."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from counterpoint.errors import Misconfigured
from counterpoint.records.diagnosis import Diagnosis

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
_MORE_IS_BETTER = ("hidden", "mfu", "compute", "overlapped")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_FORM = re.compile(r"^\s*([a-z_]+)\s*(<=|>=|<|>)\s*([0-9]+(?:\.[0-9]+)?)\s*(%|ms|us|µs|s)?\s*$")
_UNIT_US = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Describes one bound: times are per step; `%` is a share of the step for times, and hundredths for ratios."""

    text: str
    metric: str
    compare: str
    bound: float
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """Says whether a diagnosis passed a gate, and why."""

    text: str
    passed: bool
    reason: str


def parse_gate(text: str) -> Gate:
    """Return the gate described by text of the form `METRIC OP NUMBER[UNIT]`; raise `Misconfigured` for other text."""
    found = _FORM.match(text)
    if found is None or found.group(1) not in METRICS:
        raise Misconfigured(
            f"gate {text!r}; expected METRIC OP NUMBER[UNIT] as in 'exposed_comm<8%' or 'step<=160ms', with METRIC one "
            f"of {', '.join(METRICS)}, OP one of < <= > >=, UNIT one of % us ms s"
        )
    metric, compare, number, unit = found.group(1), found.group(2), float(found.group(3)), found.group(4) or ""
    if metric in _TIMES and (not unit or (unit == "%" and metric == "step")):
        raise Misconfigured(
            f"gate {text!r}: {metric} is a time; give us, ms or s" + (" or % of the step" * (metric != "step"))
        )
    if metric not in _TIMES and unit not in ("", "%"):
        raise Misconfigured(f"gate {text!r}: {metric} has no unit of time; give a number or %")
    return Gate(text=text.strip(), metric=metric, compare=compare, bound=number, unit=unit)


def check_gate(gate: Gate, new: Diagnosis, baseline: Diagnosis | None, tolerance: float) -> GateResult:
    """Check a diagnosis against a gate; the metric may be worse than the baseline's by a share of `tolerance`."""
    value = _value(gate, new)
    bound = gate.bound / 100 if gate.unit == "%" else gate.bound
    if value is None:
        return GateResult(text=gate.text, passed=False, reason=f"{gate.metric} is not known from these traces")
    passed = _OPERATORS[gate.compare](value, bound)
    reason = f"{gate.metric} is {_shown(gate, value)}"
    before = _value(gate, baseline) if baseline is not None else None
    if before is not None:
        reason += f", was {_shown(gate, before)}"
        worse = (before - value) if gate.metric in _MORE_IS_BETTER else (value - before)
        if worse > tolerance * abs(before) and worse > 1e-9:
            passed = False
            reason += f": worse than the baseline by more than {tolerance:.0%}"
    elif baseline is not None:
        reason += "; the baseline does not know it"
    return GateResult(text=gate.text, passed=passed, reason=reason)


def _value(gate: Gate, d: Diagnosis) -> float | None:
    if gate.metric == "stragglers":
        return float(len(d.stragglers))
    if gate.metric in _RATIOS:
        value = getattr(d.totals, gate.metric)
        return None if value is None else float(value)
    found = getattr(d.totals, _TIMES[gate.metric])
    if found is None:
        return None
    total = float(found)
    if gate.unit == "%":
        return total / d.totals.duration_us if d.totals.duration_us > 0 else None
    return total / max(len(d.steps), 1) / _UNIT_US[gate.unit]


def _shown(gate: Gate, value: float) -> str:
    return f"{100 * value:.2f} %" if gate.unit == "%" else f"{value:.3f} {gate.unit}".strip()
