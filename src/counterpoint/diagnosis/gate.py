"""Check a diagnosis against bounds: `--gate 'exposed_comm<8%'`, or `'step<against+5%'` of an earlier diagnosis."""

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
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)\s*(%|ms|us|µs|s)?"
_FORM = re.compile(rf"^\s*([a-z_]+)\s*(<=|>=|<|>)\s*(?:{_NUMBER}|(against)(?:\s*([+-])\s*{_NUMBER})?)\s*$")
_UNIT_US = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Describes one bound: times are per step; `%` means hundredths of the step for times, of 1 for ratios.

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
    """Return whether a diagnosis passes a gate; it fails if the metric is unknown in it or in the earlier one."""
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
    """Return the value of a metric in a unit; None if the diagnosis does not know it."""
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
