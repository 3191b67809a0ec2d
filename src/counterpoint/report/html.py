"""The diagnosis as one self-contained page: no network, no script but its own, nothing of a trace interpreted.

Three locks keep a hostile name inert: the template escapes everything, the data for the timeline is JSON without `<`,
and the page's own Content-Security-Policy lets run only the scripts whose SHA-256 it names and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import printable
from counterpoint.records import Account, Collective, Diagnosis, Kernel, Lane
from counterpoint.report import wording as say
from counterpoint.report.files import replacing
from counterpoint.report.timeline import Packed, pack

__all__ = ["write_html"]

PAGE = Path(__file__).parent / "page"
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
    import jinja2
    from markupsafe import Markup
    from plotly.offline.offline import get_plotlyjs

    plotly: str = get_plotlyjs()
    scripts = {"plotly": _script(plotly), "page": _script((PAGE / "page.js").read_text("utf-8"))}
    packed = pack(diagnosis, lanes)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clean": _clean, "ms": say.milliseconds, "pct": say.percent, "size": say.size}
    page = environment.get_template("page.html").render(
        d=diagnosis,
        say=say,
        policy=_policy(scripts.values()),
        version=_version(),
        css=Markup((PAGE / "page.css").read_text("utf-8")),
        data=Markup(_json(_data(diagnosis, packed))),
        scripts={name: Markup(text) for name, text in scripts.items()},
        timeline=packed,
        kinds=_kinds(packed),
        **_context(diagnosis),
    )
    with replacing(path) as file:
        file.write(page.encode("utf-8", "replace"))  # a lone surrogate in a name must not stop the report


def _policy(scripts: Iterable[str]) -> str:
    """The Content-Security-Policy: these scripts, inline styles, no request at all."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            "style-src 'unsafe-inline'",  # plotly writes style rules; text of a trace never reaches them
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
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
        {"number": number, "title": _clean(f.title), "rank": f.rank, "start": f.start_us, "end": f.end_us}
        for number, f in enumerate(diagnosis.findings, start=1)
        if f.start_us is not None and f.end_us is not None
    ]
    steps = [{"name": _clean(step.name, 40), "start": step.start_us} for step in diagnosis.steps]
    labels = [_clean(label) for label in packed.data["labels"]]
    return {**packed.data, "labels": labels, "marks": marks, "steps": steps}


def _clean(text: object, limit: int = 600) -> str:
    return printable(str(text), limit)


def _json(value: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or a line of script."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _script(text: str) -> str:
    """A script as the browser will see it (line ends normalised), so that its hash agrees."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _version() -> str:
    try:
        return metadata.version("counterpoint")
    except metadata.PackageNotFoundError:
        return "unknown"
