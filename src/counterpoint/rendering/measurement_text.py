"""Show a measurement as text: on a terminal, as a Markdown page next to `--out`, and as a line of JSON.

On a terminal there is a table for each pair, `hidden` first, then each mechanism over all pairs:

hidden  step                         order              ms  × serial
        compute alone                                 1.42
        nccl alone                                    1.38
  0.00  serial                                        2.80      1.00
 -0.04  nccl                         together         2.86      0.98
  1.00  ideal                                         1.42      1.97
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.records.measurement import BlockRow, Measurement, Row
from counterpoint.rendering import formatting as say

SUMMARY_SCHEMA = "counterpoint.measurement-summary/1"
MARKED = "red"
LEFT = {"step", "order", "mechanism", "what"}
STEPS = ("hidden", "step", "order", "ms", "× serial", "of ideal", "compute\nkept", "comm\nkept")
ON_GPUS = ("MFU", "waves", "CTAs")  # of the computation; of its longest kernel; of the collective, 0 for copies


def render(measurement: Measurement, console: Console) -> None:
    """Print a table for each pair, then one over all mechanisms; times in milliseconds."""
    console.print(say.text(_scope(measurement), say.QUIET))
    for rows in _by_scenario(measurement.rows).values():
        _print_pair(rows, console)
    for blocks in _by_matmul(measurement.blocks).values():
        _print_matmul(blocks, console)
    _print_matmul_mechanisms(measurement.blocks, console)
    _blocks([block for block in measurement.blocks if block.can_hide is None], console)
    _print_mechanisms(measurement.rows, console)
    if measurement.unavailable:
        say.heading(console, "Not measured")
        for mechanism, reason in measurement.unavailable.items():
            console.print(say.text(f"· {mechanism}: {reason}", limit=600), soft_wrap=True)


def _scope(measurement: Measurement) -> str:
    where = measurement.environment
    versions = [f"torch {where.torch}", *([f"NCCL {where.nccl}"] if where.nccl else [])]
    parts = [f"suite {measurement.suite}", f"{where.world_size} × {where.gpu or where.device}", *versions]
    return " · ".join([*parts, f"{measurement.rounds} rounds, the first {measurement.dropped_rounds} dropped"])


def _print_pair(rows: Sequence[Row], console: Console) -> None:
    first = rows[0]
    compute_us, comm_us = first.compute_alone.us, first.best_comm_alone_us
    size = f"{first.collective} {say.size(first.size_bytes)}"
    say.heading(console, f"{first.workload} + {size}", f"{first.pair_class}, T_c/T_g {comm_us / compute_us:.2f}")
    on_gpus = first.usage is not None
    table = say.new_table((*STEPS, *ON_GPUS) if on_gpus else STEPS, left=LEFT)
    alone = ("", "", "", say.percent(first.mfu_alone), _maybe(first.usage.waves_alone)) if first.usage else ()
    _add_reference(table, "", "compute alone", compute_us, more=alone)
    for mechanism, us in {row.mechanism: row.comm_alone.us for row in rows}.items():
        _add_reference(table, "", f"{mechanism} alone", us)
    _add_reference(table, "0.00", "serial", compute_us + comm_us, speedup=1.0)
    for row in rows:
        table.add_row(*_cells(row), style=MARKED if row.marked else "")
    ideal_us = max(compute_us, comm_us)
    _add_reference(table, "1.00", "ideal", ideal_us, speedup=(compute_us + comm_us) / ideal_us)
    console.print(table)
    for row in rows:
        if row.marked:
            console.print(say.text(f"  ! {row.mechanism}, {_order(row.order)}: {row.marked}", MARKED), soft_wrap=True)


def _cells(row: Row) -> list[Text]:
    numbers = (say.milliseconds(row.together.us, 3), f"{row.speedup:.2f}", say.percent(row.ideal_fraction))
    kept = (say.percent(row.compute_kept), say.percent(row.comm_kept))
    hidden = f"{'! ' if row.marked else ''}{say.ratio(row.hidden)}"
    return [say.text(cell) for cell in (hidden, row.mechanism, _order(row.order), *numbers, *kept, *_on_gpus(row))]


def _on_gpus(row: Row) -> tuple[str, ...]:
    if row.usage is None:
        return ()
    return (say.percent(row.mfu_together), _maybe(row.usage.waves_together), _maybe(row.usage.comm_ctas))


def _add_reference(
    table: Table, hidden: str, step: str, us: float, *, speedup: float | None = None, more: Sequence[str] = ()
) -> None:
    cells = (hidden, step, "", say.milliseconds(us, 3), "" if speedup is None else f"{speedup:.2f}", *more)
    table.add_row(*map(say.text, cells), style=say.QUIET)


def _by_matmul(blocks: Iterable[BlockRow]) -> dict[str, list[BlockRow]]:
    """Return the rows of each matmul that depends on communication, in the order in which they were measured."""
    found: dict[str, list[BlockRow]] = {}
    for block in blocks:
        if block.can_hide is not None:
            found.setdefault(block.what, []).append(block)
    return found


def _print_matmul(blocks: Sequence[BlockRow], console: Console) -> None:
    rule = f"its communication {'can' if blocks[0].can_hide else 'cannot'} hide"
    say.heading(console, blocks[0].what, rule)
    table = say.new_table(
        ("over\nlonger", "step", "ms", "× torch", "TFLOP/s", "GB/s", "ran as"), left={"step", "ran as"}
    )
    for block in blocks:
        over = f"{'! ' if block.marked else ''}{_over(block.over_longer)}"
        cells = (
            over, block.mechanism, say.milliseconds(block.time.us, 3), _speed(_times_torch(block, blocks)),
            _maybe(block.tflops), _maybe(block.gb_per_s), block.path or "",
        )  # fmt: skip
        quiet = say.QUIET if block.over_longer is None else ""
        table.add_row(*map(say.text, cells), style=MARKED if block.marked else quiet)
    console.print(table)
    for block in blocks:
        if block.marked:
            console.print(say.text(f"  ! {block.mechanism}: {block.marked}", MARKED), soft_wrap=True)
        elif block.mechanism == "auto":
            console.print(say.text(f"  · auto: {block.why}", say.QUIET, limit=400), soft_wrap=True)


def _over(share: float | None) -> str:
    return "" if share is None else f"{share:+z.1%}"


def _speed(times_torch: float | None) -> str:
    return "" if times_torch is None else say.ratio(times_torch)


def _times_torch(block: BlockRow, blocks: Iterable[BlockRow]) -> float | None:
    """Return how many times as fast as torch's collective and one matmul; None if that was not measured."""
    stock = next((one.time.us for one in blocks if one.mechanism == "torch" and one.marked is None), None)
    return None if stock is None or block.over_longer is None else stock / block.time.us


def _print_matmul_mechanisms(blocks: Sequence[BlockRow], console: Console) -> None:
    found = matmul_summaries(blocks)
    if not found:
        return
    say.heading(console, "Over all matmuls", "mean over the longer of matmul and collective; without marked rows")
    columns = ("mechanism", "can hide", "cannot hide", "× torch", "lowest", "rows", "marked")
    cells = (
        (
            it.mechanism, _over(it.over_hiding), _over(it.over_others), _speed(it.times_torch),
            _speed(it.lowest), it.rows, it.marked or "",
        )
        for it in found
    )  # fmt: skip
    say.print_table(console, columns, cells, left=LEFT)


def _blocks(blocks: Sequence[BlockRow], console: Console) -> None:
    if not blocks:
        return
    say.heading(console, "Building blocks", "each alone")
    columns = ("what", "mechanism", "size", "CTAs", "SMs", "ms", "GB/s", "TFLOP/s")
    table = say.new_table(columns, left=LEFT)
    for block in blocks:
        cells = (
            block.what, block.mechanism, "" if block.size_bytes is None else say.size(block.size_bytes),
            _maybe(block.num_ctas), _maybe(block.num_sms), say.milliseconds(block.time.us, 3),
            _maybe(block.gb_per_s), _maybe(block.tflops),
        )  # fmt: skip
        table.add_row(*map(say.text, cells), style=MARKED if block.marked else "")
    console.print(table)
    for block in blocks:
        if block.marked:
            console.print(say.text(f"  ! {block.what}, {block.mechanism}: {block.marked}", MARKED), soft_wrap=True)


def _print_mechanisms(rows: Sequence[Row], console: Console) -> None:
    if not rows:
        return
    say.heading(console, "Over all pairs", "mean of hidden, geometric mean of × serial; without marked rows")
    columns = ("hidden", "mechanism", "lowest", "× serial", "compute\nkept, lowest", "rows", "marked")
    cells = (
        (
            say.ratio(it.hidden), it.mechanism, say.ratio(it.lowest), say.ratio(it.speedup),
            say.percent(it.compute_kept), it.rows, it.marked or "",
        )
        for it in mechanism_summaries(rows)
    )  # fmt: skip
    say.print_table(console, columns, cells, left=LEFT)
    _means(rows, "by collective", lambda row: row.operation, console)
    _means(rows, "by order", lambda row: _order(row.order), console)


def _means(rows: Sequence[Row], title: str, of: Callable[[Row], str], console: Console) -> None:
    """Print the mean of hidden, with a column for each collective or order; print nothing if there is only one."""
    names = list(dict.fromkeys(of(row) for row in rows))
    if len(names) < 2:
        return
    say.heading(console, f"Mean of hidden {title}")
    means = mean_hidden(rows, of).items()
    cells = ((mechanism, *(say.ratio(by.get(name)) for name in names)) for mechanism, by in means)
    say.print_table(console, ("mechanism", *names), cells, left=LEFT)


def _order(order: str) -> str:
    return order.replace("comm_first", "comm first").replace("compute_first", "compute first")


def _maybe(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:,.1f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MechanismSummary:
    """Summarizes one mechanism over its rows that are not marked; figures are None if there are no such rows."""

    mechanism: str
    hidden: float | None  # mean
    lowest: float | None  # the worst pair and order: a mechanism that works in one order only does not work
    speedup: float | None  # over serial, geometric mean
    compute_kept: float | None  # the lowest
    rows: int
    marked: int


def mechanism_summaries(rows: Sequence[Row]) -> list[MechanismSummary]:
    """Return a summary of every mechanism, the one that hides most first."""
    by_mechanism: dict[str, list[Row]] = {}
    for row in rows:
        by_mechanism.setdefault(row.mechanism, []).append(row)
    found = [_summarize(mechanism, of) for mechanism, of in by_mechanism.items()]
    return sorted(found, key=lambda it: -math.inf if it.hidden is None else it.hidden, reverse=True)


def _summarize(mechanism: str, rows: Sequence[Row]) -> MechanismSummary:
    good = [row for row in rows if row.marked is None]
    return MechanismSummary(
        mechanism=mechanism,
        hidden=fmean(row.hidden for row in good) if good else None,
        lowest=min((row.hidden for row in good), default=None),
        speedup=geometric_mean(row.speedup for row in good) if good else None,
        compute_kept=min((row.compute_kept for row in good), default=None),
        rows=len(good),
        marked=len(rows) - len(good),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulSummary:
    """Summarizes one mechanism over its matmuls that are not marked; figures are None if there are no such rows."""

    mechanism: str
    over_hiding: float | None  # mean of `over_longer` where the communication can hide
    over_others: float | None  # and where it cannot
    times_torch: float | None  # speed over that of torch's collective and one matmul, geometric mean
    lowest: float | None  # of them: below 1 it is slower somewhere
    rows: int
    marked: int


def matmul_summaries(blocks: Iterable[BlockRow]) -> list[MatmulSummary]:
    """Return a summary of every mechanism that ran matmuls which depend on communication, in their order."""
    by_mechanism: dict[str, list[tuple[BlockRow, float | None]]] = {}
    for matmul in _by_matmul(blocks).values():
        for block in matmul:
            if block.over_longer is not None:
                by_mechanism.setdefault(block.mechanism, []).append((block, _times_torch(block, matmul)))
    return [_summarize_matmuls(mechanism, of) for mechanism, of in by_mechanism.items()]


def _summarize_matmuls(mechanism: str, found: Sequence[tuple[BlockRow, float | None]]) -> MatmulSummary:
    good = [(block, times) for block, times in found if block.marked is None]
    times_torch = [times for _, times in good if times is not None]

    def over(can_hide: bool) -> float | None:
        shares = [one.over_longer for one, _ in good if one.can_hide == can_hide and one.over_longer is not None]
        return fmean(shares) if shares else None

    return MatmulSummary(
        mechanism=mechanism,
        over_hiding=over(True),
        over_others=over(False),
        times_torch=geometric_mean(times_torch) if times_torch else None,
        lowest=min(times_torch, default=None),
        rows=len(good),
        marked=len(found) - len(good),
    )


def mean_hidden(rows: Sequence[Row], of: Callable[[Row], str]) -> dict[str, dict[str, float]]:
    """Return the mean of `hidden` by mechanism and by `of(row)`, such as its collective; without marked rows."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.marked is None:
            found.setdefault(row.mechanism, {}).setdefault(of(row), []).append(row.hidden)
    return {mechanism: {key: fmean(values) for key, values in by.items()} for mechanism, by in found.items()}


def _by_scenario(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each scenario, in the order in which they were measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.scenario, []).append(row)
    return found


def summary(measurement: Measurement, out: str | None) -> dict[str, object]:
    """Return the last line of `counterpoint measure`: figures of every mechanism, and the file with all results."""
    where = measurement.environment
    found, matmuls = mechanism_summaries(measurement.rows), matmul_summaries(measurement.blocks)
    times_torch = {it.mechanism: _rounded(it.times_torch) for it in matmuls}
    own: dict[str, object] = {"times_torch": times_torch} if times_torch else {}
    return {
        "schema": SUMMARY_SCHEMA,
        "suite": measurement.suite,
        "device": where.device,
        "gpu": where.gpu,
        "world_size": where.world_size,
        "rows": len(measurement.rows),
        "marked": sum(one.marked is not None for rows in (measurement.rows, measurement.blocks) for one in rows),
        "blocks": len(measurement.blocks),
        "hidden": {it.mechanism: _rounded(it.hidden) for it in found},
        "lowest_hidden": {it.mechanism: _rounded(it.lowest) for it in found},
        "speedup": {it.mechanism: _rounded(it.speedup) for it in found},
        "out": out,
    } | own


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def markdown(measurement: Measurement) -> str:
    """Return the Markdown page: machine and command, every mechanism, every row, every building block."""
    parts = [f"# counterpoint measure {_cell(measurement.suite)}", _where(measurement)]
    if measurement.rows:
        means = [_mean_table(measurement, of) for of in (lambda row: row.operation, lambda row: row.order)]
        parts += ["## Mechanisms", _mechanism_table(measurement), *means, "## Pairs", _pair_table(measurement)]
    if matmuls := matmul_summaries(measurement.blocks):
        parts += ["## Mechanisms", _matmul_mechanism_table(matmuls), "## Matmuls", _matmul_table(measurement)]
    if any(block.can_hide is None for block in measurement.blocks):
        parts += ["## Building blocks", _block_table(measurement)]
    if measurement.unavailable:
        parts += ["## Not measured", _markdown_table(("mechanism", "why"), measurement.unavailable.items())]
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
    return _markdown_table(("", ""), ((name, value) for name, value in facts.items() if value))


def _mechanism_table(measurement: Measurement) -> str:
    columns = (
        "mechanism", "hidden, mean", "hidden, lowest", "speed-up over serial, geometric mean", "compute kept, lowest",
        "rows", "marked",
    )  # fmt: skip
    return _markdown_table(
        columns,
        (
            (
                it.mechanism, *(say.ratio(value) for value in (it.hidden, it.lowest, it.speedup)),
                say.percent(it.compute_kept), it.rows, it.marked,
            )
            for it in mechanism_summaries(measurement.rows)
        ),
    )  # fmt: skip


def _pair_table(measurement: Measurement) -> str:
    columns = (
        "hidden", "workload", "collective", "size", "mechanism", "order", "class", "compute alone, ms",
        "collective alone, ms", "best collective, ms", "serial, ms", "together, ms", "speed-up", "of ideal",
        "compute kept", "comm kept", "MFU alone", "MFU together", "waves alone", "waves together", "CTAs", "marked",
    )  # fmt: skip
    return _markdown_table(
        columns,
        (
            (
                say.ratio(r.hidden), r.workload, r.collective, say.size(r.size_bytes), r.mechanism, r.order,
                r.pair_class,
                *(say.milliseconds(us, 3) for us in (
                    r.compute_alone.us, r.comm_alone.us, r.best_comm_alone_us, r.serial_us, r.together.us,
                )),
                say.ratio(r.speedup), say.percent(r.ideal_fraction), say.percent(r.compute_kept),
                say.percent(r.comm_kept), say.percent(r.mfu_alone), say.percent(r.mfu_together),
                *((u.waves_alone, u.waves_together, u.comm_ctas) if (u := r.usage) else (None,) * 3),
                r.marked or "",
            )
            for r in measurement.rows
        ),
    )  # fmt: skip


def _mean_table(measurement: Measurement, of: Callable[[Row], str]) -> str:
    names = list(dict.fromkeys(of(row) for row in measurement.rows))
    found = mean_hidden(measurement.rows, of)
    return _markdown_table(
        ("hidden, mean", *(_cell(name) for name in names)),
        ((mechanism, *(say.ratio(means.get(name)) for name in names)) for mechanism, means in found.items()),
    )


def _block_table(measurement: Measurement) -> str:
    columns = ("what", "mechanism", "size", "CTAs", "SMs", "ms", "GB/s", "TFLOP/s", "marked")
    return _markdown_table(
        columns,
        (
            (
                b.what, b.mechanism, say.size(b.size_bytes), b.num_ctas, b.num_sms, say.milliseconds(b.time.us, 3),
                None if b.gb_per_s is None else f"{b.gb_per_s:.1f}", None if b.tflops is None else f"{b.tflops:.1f}",
                b.marked or "",
            )
            for b in measurement.blocks
            if b.can_hide is None
        ),
    )  # fmt: skip


def _matmul_mechanism_table(found: Sequence[MatmulSummary]) -> str:
    columns = (
        "mechanism", "over longer where it can hide, mean", "where it cannot, mean", "× torch, geometric mean",
        "× torch, lowest", "rows", "marked",
    )  # fmt: skip
    return _markdown_table(
        columns,
        (
            (
                it.mechanism, _over(it.over_hiding), _over(it.over_others), _speed(it.times_torch),
                _speed(it.lowest), it.rows, it.marked,
            )
            for it in found
        ),
    )  # fmt: skip


def _matmul_table(measurement: Measurement) -> str:
    columns = (
        "what", "can hide", "step", "ms", "over longer", "× torch", "TFLOP/s", "GB/s", "ran as", "why", "marked",
    )  # fmt: skip
    return _markdown_table(
        columns,
        (
            (
                b.what, "yes" if b.can_hide else "no", b.mechanism, say.milliseconds(b.time.us, 3),
                _over(b.over_longer), _speed(_times_torch(b, blocks)), _maybe(b.tflops), _maybe(b.gb_per_s),
                b.path or "", b.why or "", b.marked or "",
            )
            for blocks in _by_matmul(measurement.blocks).values()
            for b in blocks
        ),
    )  # fmt: skip


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    """Return a value as text with Markdown's characters escaped, so that it stays plain text in its cell."""
    text = say.UNKNOWN if value is None else printable(str(value))
    for character in "\\`*_<>[]|&#":
        text = text.replace(character, "\\" + character)
    return text
