"""Show a measurement as tables on a terminal, or as a Markdown page next to `--out`.

There is a table for each pair, `hidden` first, then each mechanism over all pairs:

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
from typing import TYPE_CHECKING, TypeVar

from counterpoint.records.measurement import BlockRow, Measurement, Row
from counterpoint.rendering import formatting as say
from counterpoint.rendering import table as tables
from counterpoint.rendering.table import Column, Table, environment_table, machine_line, row

if TYPE_CHECKING:
    from rich.console import Console

ORDERS = {"compute_first": "compute first", "together": "together", "comm_first": "comm first"}
STEPS = (
    Column("hidden", say.ratio),
    Column("step"),
    Column("order"),
    Column("ms", say.fine_milliseconds),
    Column("× serial", say.ratio),
    Column("of ideal", say.percent),
    Column("compute\nkept", say.percent),
    Column("comm\nkept", say.percent),
)
ON_GPUS = (  # of the computation; of its longest kernel; of the collective, 0 for copies
    Column("MFU", say.percent, optional=True),
    Column("waves", say.count, optional=True),
    Column("CTAs", say.count, optional=True),
)
SUMMARY_SCHEMA = "counterpoint.measurement-summary/1"
T = TypeVar("T")


def summary(measurement: Measurement, out: str | None) -> dict[str, object]:
    """Return what `counterpoint measure` prints last: each mechanism's figures, and the file with all results."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MechanismSummary:
    """Summarizes one mechanism over its valid (not marked) rows; without valid rows, all figures are None."""

    mechanism: str
    hidden: float | None  # mean
    lowest: float | None  # the worst pair and order: a mechanism that works in one order only does not work
    speedup: float | None  # over serial, geometric mean
    compute_kept: float | None  # the lowest
    rows: int
    marked: int


def mechanism_summaries(rows: Sequence[Row]) -> list[MechanismSummary]:
    """Return a summary of every mechanism, the one that hides most first."""
    found = [_summarize(mechanism, of) for mechanism, of in grouped(rows, lambda row: row.mechanism).items()]
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
    """Summarizes one mechanism over its valid (not marked) dependent matmuls; without any, all figures are None."""

    mechanism: str
    over_hiding: float | None  # mean of `over_longer` where the communication can hide
    over_others: float | None  # and where it cannot
    times_torch: float | None  # speed over that of torch's collective and one matmul, geometric mean
    lowest: float | None  # of them: below 1 it is slower somewhere
    rows: int
    marked: int


def matmul_summaries(blocks: Iterable[BlockRow]) -> list[MatmulSummary]:
    """Return a summary of every mechanism that ran dependent matmuls, in the order in which they were measured."""
    by_mechanism: dict[str, list[tuple[BlockRow, float | None]]] = {}
    for matmul in by_matmul(blocks).values():
        for block in matmul:
            if block.over_longer is not None:
                by_mechanism.setdefault(block.mechanism, []).append((block, times_of_torch(block, matmul)))
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
    """Return the mean `hidden` of valid rows by mechanism and by `of(row)`, for instance the collective."""
    found: dict[str, dict[str, list[float]]] = {}
    for each in rows:
        if each.marked is None:
            found.setdefault(each.mechanism, {}).setdefault(of(each), []).append(each.hidden)
    return {mechanism: {key: fmean(values) for key, values in by.items()} for mechanism, by in found.items()}


def grouped(rows: Iterable[T], of: Callable[[T], str]) -> dict[str, list[T]]:
    """Return the rows by key `of(row)`, in the order in which they were measured."""
    found: dict[str, list[T]] = {}
    for each in rows:
        found.setdefault(of(each), []).append(each)
    return found


def by_matmul(blocks: Iterable[BlockRow]) -> dict[str, list[BlockRow]]:
    """Return the rows of each dependent matmul, in the order in which they were measured."""
    return grouped((block for block in blocks if block.can_hide is not None), lambda block: block.what)


def times_of_torch(block: BlockRow, blocks: Iterable[BlockRow]) -> float | None:
    """Return a matmul's speed-up over torch's collective and one matmul; None if torch's time was not measured."""
    stock = next((one.time.us for one in blocks if one.mechanism == "torch" and one.marked is None), None)
    return None if stock is None or block.over_longer is None else stock / block.time.us


def render(measurement: Measurement, console: Console) -> None:
    """Print a table for each pair of compute and collective and each matmul, then summaries over all mechanisms."""
    from counterpoint.rendering.print_table import QUIET, print_tables, text

    console.print(text(f"{scope(measurement)} · {_rounds(measurement)}", QUIET))
    print_tables([*detail_tables(measurement), *summary_tables(measurement)], console)


def markdown(measurement: Measurement) -> str:
    """Return a Markdown page: machine and command, every mechanism, every pair, every building block."""
    shown = (where_table(measurement), *summary_tables(measurement), *detail_tables(measurement))
    return (
        "\n\n".join([f"# counterpoint measure {tables.plain(measurement.suite)}", *map(tables.markdown, shown)]) + "\n"
    )


def scope(measurement: Measurement) -> str:
    """Return one line that names the suite and the machine."""
    return f"suite {measurement.suite} · {machine_line(measurement.environment)}"


def _rounds(measurement: Measurement) -> str:
    return f"{measurement.rounds} rounds, the first {measurement.dropped_rounds} dropped"


def where_table(measurement: Measurement) -> Table:
    """Return a table of the machine, the software and the call."""
    return environment_table(
        "Where it was measured", measurement.environment, rounds=_rounds(measurement).replace(" rounds", "", 1)
    )


def detail_tables(measurement: Measurement) -> list[Table]:
    """Return a table for each pair of compute and collective, each matmul, and one for all building blocks."""
    pairs = grouped(measurement.rows, lambda each: each.scenario)
    found = [*map(_pair, pairs.values()), *map(_matmul, by_matmul(measurement.blocks).values())]
    blocks = [block for block in measurement.blocks if block.can_hide is None]
    return [*found, _blocks(blocks)] if blocks else found


def summary_tables(measurement: Measurement) -> list[Table]:
    """Return tables of the mechanisms over all pairs and over all matmuls, and of what was not measured."""
    rows = measurement.rows
    found: list[Table] = []
    if measurement.blocks and (matmuls := _matmul_mechanisms(measurement.blocks)).rows:
        found.append(matmuls)
    if rows:
        found += [_mechanisms(rows), *_means(rows, "collective", lambda each: each.operation)]
        found += _means(rows, "order", lambda each: _order(each.order))
    if reasons := [f"{mechanism}: {reason}" for mechanism, reason in measurement.unavailable.items()]:
        found.append(Table(title="Not measured", notes=reasons))
    return found


def _pair(rows: Sequence[Row]) -> Table:
    """Return a pair's table: compute and collective alone, in sequence, together by mechanism and order; the ideal."""
    first = rows[0]
    compute_us, comm_us = first.compute_alone.us, first.best_comm_alone_us
    serial_us, ideal_us = compute_us + comm_us, max(compute_us, comm_us)
    usage = ON_GPUS if first.usage is not None else ()
    empty = ("",) * (3 + len(usage))
    alone = (first.mfu_alone, first.usage.waves_alone, "") if first.usage else ()
    parts = {each.mechanism: each.comm_alone.us for each in rows}
    return Table(
        title=f"{first.workload} + {first.collective} {say.size(first.size_bytes)}",
        unit=f"{first.pair_class}, T_c/T_g {comm_us / compute_us:.2f}",
        columns=(*STEPS, *usage),
        rows=[
            row("", "compute alone", "", compute_us, "", "", "", "", *alone, tone="quiet"),
            *(row("", f"{name} alone", "", us, "", *empty, tone="quiet") for name, us in parts.items()),
            row(0.0, "serial", "", serial_us, 1.0, *empty, tone="quiet"),
            *map(_step, rows),
            row(1.0, "ideal", "", ideal_us, serial_us / ideal_us, *empty, tone="quiet"),
        ],
        notes=[f"{each.mechanism}, {_order(each.order)}: {each.marked}" for each in rows if each.marked],
    )


def _step(each: Row) -> tables.TableRow:
    used = each.usage
    on_gpus = () if used is None else (each.mfu_together, used.waves_together, used.comm_ctas)
    return row(
        each.hidden,
        each.mechanism,
        _order(each.order),
        each.together.us,
        each.speedup,
        each.ideal_fraction,
        each.compute_kept,
        each.comm_kept,
        *on_gpus,
        tone="marked" if each.marked else "",
    )


def _order(name: str) -> str:
    return ORDERS.get(name, name)


def _matmul(blocks: Sequence[BlockRow]) -> Table:
    """Return a table of one dependent matmul by each mechanism, and of matmul and collective alone."""

    def tone(block: BlockRow) -> tables.Tone:
        return "marked" if block.marked else "quiet" if block.over_longer is None else ""

    return Table(
        title=blocks[0].what,
        unit=f"its communication {'can' if blocks[0].can_hide else 'cannot'} hide",
        columns=(
            Column("over\nlonger", say.change, lambda block: _or_empty(block.over_longer)),
            Column("step", of=lambda block: block.mechanism),
            Column("ms", say.fine_milliseconds, lambda block: block.time.us),
            Column("× torch", say.ratio, lambda block: _or_empty(times_of_torch(block, blocks))),
            Column("TFLOP/s", say.decimal, lambda block: _or_empty(block.tflops)),
            Column("GB/s", say.decimal, lambda block: _or_empty(block.gb_per_s)),
            Column("ran as", of=lambda block: block.path or ""),
        ),
        rows=blocks,
        tone=tone,
        notes=[
            f"{block.mechanism}: {block.marked or block.why}"
            for block in blocks
            if block.marked or (block.mechanism == "auto" and block.why)
        ],
    )


def _or_empty(value: T | None) -> T | str:
    """Return `value`, or "" in place of None."""
    return "" if value is None else value


def _blocks(blocks: Sequence[BlockRow]) -> Table:
    return Table(
        title="Building blocks",
        unit="each alone",
        columns=(
            Column("what", of=lambda block: block.what),
            Column("mechanism", of=lambda block: block.mechanism),
            Column("size", say.size, lambda block: _or_empty(block.size_bytes)),
            Column("CTAs", say.count, lambda block: _or_empty(block.num_ctas)),
            Column("SMs", say.count, lambda block: _or_empty(block.num_sms)),
            Column("ms", say.fine_milliseconds, lambda block: block.time.us),
            Column("GB/s", say.decimal, lambda block: _or_empty(block.gb_per_s)),
            Column("TFLOP/s", say.decimal, lambda block: _or_empty(block.tflops)),
        ),
        rows=blocks,
        tone=lambda block: "marked" if block.marked else "",
        notes=[f"{block.what}, {block.mechanism}: {block.marked}" for block in blocks if block.marked],
    )


def _mechanisms(rows: Sequence[Row]) -> Table:
    return Table(
        title="Over all pairs",
        unit="mean of hidden, geometric mean of × serial; without marked rows",
        columns=(
            Column("hidden", say.ratio, lambda it: it.hidden),
            Column("mechanism", of=lambda it: it.mechanism),
            Column("lowest", say.ratio, lambda it: it.lowest),
            Column("× serial", say.ratio, lambda it: it.speedup),
            Column("compute\nkept, lowest", say.percent, lambda it: it.compute_kept),
            Column("rows", say.count, lambda it: it.rows),
            Column("marked", say.count, lambda it: it.marked or ""),
        ),
        rows=mechanism_summaries(rows),
    )


def _means(rows: Sequence[Row], title: str, of: Callable[[Row], str]) -> Iterable[Table]:
    """Yield a table of the mean `hidden` with a column per collective or order; nothing if all rows share one."""
    names = list(dict.fromkeys(map(of, rows)))
    if len(names) > 1:
        columns = (Column("mechanism"), *(Column(name, say.ratio) for name in names))
        means = mean_hidden(rows, of).items()
        cells = [row(mechanism, *(by.get(name) for name in names)) for mechanism, by in means]
        yield Table(title=f"Mean of hidden by {title}", columns=columns, rows=cells)


def _matmul_mechanisms(blocks: Sequence[BlockRow]) -> Table:
    return Table(
        title="Over all matmuls",
        unit="mean over the longer of matmul and collective; without marked rows",
        columns=(
            Column("mechanism", of=lambda it: it.mechanism),
            Column("can hide", say.change, lambda it: it.over_hiding),
            Column("cannot hide", say.change, lambda it: it.over_others),
            Column("× torch", say.ratio, lambda it: it.times_torch),
            Column("lowest", say.ratio, lambda it: it.lowest),
            Column("rows", say.count, lambda it: it.rows),
            Column("marked", say.count, lambda it: it.marked or ""),
        ),
        rows=matmul_summaries(blocks),
    )
