"""A measurement as a Markdown page: the table that lies beside `--out`, readable where it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from counterpoint.errors import printable
from counterpoint.records import Measurement, Row, Usage
from counterpoint.report import wording as say
from counterpoint.report.standing import mean_hidden, standings

__all__ = ["markdown"]


def markdown(measurement: Measurement) -> str:
    """Where it was measured, every mechanism's standing, every row, every building block."""
    parts = [f"# counterpoint measure {_cell(measurement.suite)}", _where(measurement)]
    if measurement.rows:
        means = [_means(measurement, of) for of in (lambda row: row.collective, lambda row: row.order)]
        parts += ["## Mechanisms", _standings(measurement), *means, "## Pairs", _rows(measurement)]
    if measurement.blocks:
        parts += ["## Building blocks", _blocks(measurement)]
    if measurement.unavailable:
        parts += ["## Not measured", _table(("mechanism", "why"), measurement.unavailable.items())]
    return "\n\n".join(parts) + "\n"


def _where(measurement: Measurement) -> str:
    it = measurement.environment
    facts = {
        "device": f"{it.world_size} × {it.gpu or it.device}",
        "software": ", ".join(
            f"{name} {version}"
            for name, version in (
                ("driver", it.driver), ("torch", it.torch), ("NCCL", it.nccl), ("counterpoint", it.counterpoint),
                ("commit", it.commit),
            )
            if version
        ),
        "command": " ".join(it.command),
        "date": it.date,
        "rounds": f"{measurement.rounds}, the first {measurement.dropped_rounds} dropped",
        "variables": " ".join(f"{name}={value}" for name, value in sorted(it.variables.items())),
    }  # fmt: skip
    return _table(("", ""), ((name, value) for name, value in facts.items() if value))


def _standings(measurement: Measurement) -> str:
    columns = (
        "mechanism", "hidden, mean", "hidden, lowest", "speed-up over serial, geometric mean", "compute kept, lowest",
        "rows", "marked",
    )  # fmt: skip
    return _table(
        columns,
        (
            (
                it.mechanism, *(say.ratio(value) for value in (it.hidden, it.lowest, it.speedup)),
                say.percent(it.compute_kept), it.rows, it.marked,
            )
            for it in standings(measurement.rows)
        ),
    )  # fmt: skip


def _rows(measurement: Measurement) -> str:
    columns = (
        "hidden", "workload", "collective", "size", "mechanism", "order", "class", "compute alone, ms",
        "collective alone, ms", "best collective, ms", "serial, ms", "together, ms", "speed-up", "of ideal",
        "compute kept", "comm kept", "MFU alone", "MFU together", "waves alone", "waves together", "CTAs", "marked",
    )  # fmt: skip
    return _table(
        columns,
        (
            (
                say.ratio(r.hidden), r.workload, r.collective, say.size(r.size_bytes), r.mechanism, r.order,
                r.pair_class,
                *(say.milliseconds(us, 3) for us in (
                    r.compute_alone.us, r.comm_alone.us, r.best_comm_alone_us, r.serial_us, r.together.us,
                )),
                say.ratio(r.speedup), say.percent(r.ideal_fraction), say.percent(r.compute_kept),
                say.percent(r.comm_kept), say.percent(r.mfu_alone), say.percent(r.mfu_together), *_usage(r.usage),
                r.marked or "",
            )
            for r in measurement.rows
        ),
    )  # fmt: skip


def _usage(usage: Usage | None) -> tuple[int | None, ...]:
    return (None, None, None) if usage is None else (usage.waves_alone, usage.waves_together, usage.comm_ctas)


def _means(measurement: Measurement, of: Callable[[Row], str]) -> str:
    names = list(dict.fromkeys(of(row) for row in measurement.rows))
    found = mean_hidden(measurement.rows, of)
    return _table(
        ("hidden, mean", *(_cell(name) for name in names)),
        ((mechanism, *(say.ratio(means.get(name)) for name in names)) for mechanism, means in found.items()),
    )


def _blocks(measurement: Measurement) -> str:
    columns = ("what", "mechanism", "size", "CTAs", "SMs", "ms", "GB/s", "TFLOP/s", "marked")
    return _table(
        columns,
        (
            (
                b.what, b.mechanism, say.size(b.size_bytes), b.num_ctas, b.num_sms, say.milliseconds(b.time.us, 3),
                None if b.gb_per_s is None else f"{b.gb_per_s:.1f}", None if b.tflops is None else f"{b.tflops:.1f}",
                b.marked or "",
            )
            for b in measurement.blocks
        ),
    )  # fmt: skip


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    """Text that stays in its cell and is not markup, wherever the page is shown."""
    text = say.UNKNOWN if value is None else printable(str(value))
    for character in "\\`*_<>[]|&#":
        text = text.replace(character, "\\" + character)
    return text
