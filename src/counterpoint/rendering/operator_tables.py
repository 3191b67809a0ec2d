"""Make the table of operators for terminal and page, and the table of their changes between two runs."""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.records.diagnosis import Diagnosis, OperatorChange
from counterpoint.records.operators import OperatorTime
from counterpoint.rendering import formatting as say
from counterpoint.rendering.table import Cell, Column, Table

ON_TERMINAL = 20
ON_PAGE = 200


def operators_table(diagnosis: Diagnosis, most: int) -> Table | None:
    """Return a table of at most `most` operators, by the time lost against the card's rate; None: no GPU time."""
    rows = sorted(diagnosis.operators, key=lambda row: (-(row.lost_us or 0.0), -row.us))
    if not rows:
        return None
    card, per = diagnosis.card, "a step" if diagnosis.has_steps else "in the recording"
    kernels = any(row.kernels for row in rows)
    whole = sum(row.us for row in rows)
    unknown = sum(row.us for row in rows if row.of_card is None)
    left = rows[most:]
    notes = [f"{len(rows) - most:,} more take {say.milliseconds(sum(row.us for row in left))} ms."] if left else []
    notes += [f"Together {say.milliseconds(whole)} ms."]
    if card is not None:
        peaks = ", ".join(f"{name} {peak:,.0f}" for name, peak in card.tflops.items())
        memory = "" if card.gb_per_s is None else f", {card.gb_per_s:,.0f} GB/s"
        notes += [f"The card's rates ({card.gpu}, {card.source}): {peaks} TFLOP/s{memory}."]
        notes += [f"Of {say.milliseconds(unknown)} ms the rate is not known."] if unknown > 0 else []
    return Table(
        title="Operators and kernels" if kernels else "Operators",
        unit=f"ms {per} and rank; lost: against the card's rate" if card else f"ms {per} and rank",
        columns=(
            Column("operator", of=_operator, limit=120),
            Column("shapes", of=lambda row: row.shapes, limit=48, optional=True),
            Column("phase", of=lambda row: row.phase, optional=True),
            Column("calls", say.decimal, lambda row: row.calls, page_only=True),
            Column("time", say.milliseconds, lambda row: row.us),
            Column("TFLOP/s", _rate, lambda row: row.tflops),
            Column("GB/s", _rate, lambda row: row.gb_per_s),
            *((Column("of card", say.percent, lambda row: row.of_card),
               Column("lost", say.milliseconds, lambda row: row.lost_us)) if card else ()),
            *((Column("kernel", of=_kernel, limit=60, page_only=True),) if kernels else ()),
            Column("module", of=_module, limit=60, page_only=True),
        ),
        rows=rows[:most],
        notes=notes,
    )  # fmt: skip


def _rate(value: float | None) -> str:
    """Format a rate, which on a CPU may be small: `1234.56` as `1,235`, `0.01234` as `0.012`."""
    if value is None or value >= 100:
        return say.whole(value)
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _operator(row: OperatorTime) -> Cell:
    kernel = _short(row.kernels[0].name) if row.kernels else None
    return Cell(value=row.operator or kernel, note=row.dtypes or "")


def _kernel(row: OperatorTime) -> Cell:
    more = f"and {len(row.kernels) - 1} more" if len(row.kernels) > 1 else ""
    return Cell(value=_short(row.kernels[0].name) if row.kernels else None, note=more)


def _short(kernel: str) -> str:
    """Return a kernel's name without the words that most kernels of PyTorch begin with."""
    for word in ("void ", "(anonymous namespace)::", "at::native::"):
        kernel = kernel.replace(word, "")
    return kernel


def _module(row: OperatorTime) -> Cell:
    return Cell(value=row.module, note=row.stack or "")


def operator_changes_table(changes: Sequence[OperatorChange], most: int) -> Table:
    """Return a table of the largest changes of operators' kernels between two runs."""
    return Table(
        title="Operators and kernels",
        unit="ms a step and rank",
        columns=(
            Column("operator", of=lambda it: it.name, limit=60),
            Column("kernel", of=lambda it: _short(it.kernel), limit=60),
            Column("before", say.milliseconds, lambda it: it.before_us),
            Column("now", say.milliseconds, lambda it: it.now_us),
            Column("change", lambda us: f"{us / 1e3:+,.2f}", lambda it: it.change_us),
        ),
        rows=changes,
        most=most,
    )
