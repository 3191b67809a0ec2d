"""The diagnosis as one self-contained page: no network, no script but its own, nothing of a trace interpreted.

Three locks keep a hostile name inert: the template escapes everything, the data for the timeline is JSON without `<`,
and the page's own Content-Security-Policy lets run only the scripts whose SHA-256 it names and forbids every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoint.records import Account, Collective, Diagnosis, Kernel, Lane
from counterpoint.report import wording as say
from counterpoint.report.inert import clean, write_page
from counterpoint.report.timeline import Packed, pack

__all__ = ["write_html"]

MAX_BARS = 64  # ranks drawn
MAX_ROWS = 512  # ranks in tables
MAX_COLLECTIVES = 300
MAX_KERNELS = 100
MAX_HEAT = 16  # ranks whose wait gets a column of its own


def write_html(path: Path, diagnosis: Diagnosis, lanes: Sequence[Lane]) -> None:
    """Write the report; `path` appears whole or not at all (about 5 MB, most of it plotly.js).

    Raises:
        OSError: the folder is missing or may not be written to.
    """
    packed = pack(diagnosis, lanes)
    write_page(
        path,
        "diagnosis",
        data=_data(diagnosis, packed),
        own="diagnosis",
        plot=bool(packed.drawn),
        filters={"ms": say.milliseconds, "pct": say.percent, "size": say.size},
        d=diagnosis,
        say=say,
        timeline=packed,
        kinds=_kinds(packed),
        **_context(diagnosis),
    )


def _context(diagnosis: Diagnosis) -> dict[str, Any]:
    """What the template shows, as numbers it only formats. Sums become means per step here."""
    steps = say.steps_in(diagnosis)
    bars = say.worst_ranks(diagnosis.per_rank, MAX_BARS)
    slowed = sorted((k for k in diagnosis.kernels if k.cause != "none"), key=lambda kernel: -kernel.cost_us)
    collectives = say.by_exposed(diagnosis.collectives, MAX_COLLECTIVES)
    return {
        "steps": steps,
        "accounts": [(account, say.budget(account)) for account in say.worst_ranks(diagnosis.per_rank, MAX_ROWS)],
        "bars": [(account, _bar(account, max(a.duration_us for a in bars))) for account in bars],
        "total": say.budget(diagnosis.totals),
        "collectives": collectives,
        "heat": list(diagnosis.ranks) if len(diagnosis.ranks) <= MAX_HEAT else [],
        "longest_wait": max((us for c in collectives for us in c.wait_us.values()), default=0.0) or 1.0,
        "waits": _waits,
        "slowed": slowed[:MAX_KERNELS],
        "all_slowed": len(slowed),
        "undisturbed": len(diagnosis.kernels) - len(slowed),
        "blocks": _blocks,
        "late": {straggler.rank for straggler in diagnosis.stragglers},
        "notes": say.notes(diagnosis),
        "longest_step": _longest_step(diagnosis),
    }


def _kinds(packed: Packed) -> list[tuple[str, str, str]]:
    """Legend of the timeline: lane, colour, name; a lane of an unknown name is drawn as the host's."""
    kinds = [
        ("compute", "compute", "compute"),
        ("communication", "transfer", "communication"),
        ("wait", "wait", "of it waiting"),
        ("memcpy", "memcpy", "copies"),
    ]
    names = {lane.name for lane in packed.drawn}
    shown = [kind for kind in kinds if kind[0] in names]
    return shown + [("host", "host", "host")] * bool(names - {kind[0] for kind in kinds})


def _bar(account: Account, longest_us: float) -> list[tuple[say.Part, float, float]]:
    """Parts of a bar with their µs and their share of the longest bar in per cent; empty parts are left out."""
    scale = 100 / longest_us if longest_us > 0 else 0.0
    us = say.budget(account)
    return [(part, us[part.key], us[part.key] * scale) for part in say.PARTS if us[part.key] > 0]


def _waits(collective: Collective) -> tuple[float, float]:
    """Mean and longest wait, µs."""
    waits = list(collective.wait_us.values()) or [0.0]
    return sum(waits) / len(waits), max(waits)


def _blocks(kernel: Kernel) -> int:
    x, y, z = kernel.grid
    return x * y * z


def _longest_step(diagnosis: Diagnosis) -> float:
    if diagnosis.replay is None:
        return 1.0
    cases = (case.step_us for case in diagnosis.replay.what_if)
    return max(diagnosis.replay.measured_us, diagnosis.replay.replayed_us, *cases) or 1.0


def _data(diagnosis: Diagnosis, packed: Packed) -> dict[str, Any]:
    marks = [
        {"number": number, "title": clean(f.title), "rank": f.rank, "start": f.start_us, "end": f.end_us}
        for number, f in enumerate(diagnosis.findings, start=1)
        if f.start_us is not None and f.end_us is not None
    ]
    steps = [{"name": clean(step.name, 40), "start": step.start_us} for step in diagnosis.steps]
    labels = [clean(label) for label in packed.data["labels"]]
    return {**packed.data, "labels": labels, "marks": marks, "steps": steps}
