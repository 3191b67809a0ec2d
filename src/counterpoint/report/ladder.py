"""A measurement on a terminal: one ladder per pair, `hidden` first, then what each mechanism is worth over all pairs.

hidden  step                         order              ms  × serial
        compute alone                                 1.42
        nccl alone                                    1.38
  0.00  serial                                        2.80      1.00
 -0.04  nccl                         together         2.86      0.98
  1.00  ideal                                         1.42      1.97
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.records import BlockRow, Measurement, Row
from counterpoint.report import wording as say
from counterpoint.report.standing import by_scenario, mean_hidden, standings

__all__ = ["render"]

QUIET = "bright_black"
MARKED = "red"
LEFT = {"step", "order", "mechanism", "what"}
STEPS = ("hidden", "step", "order", "ms", "× serial", "of ideal", "compute\nkept", "comm\nkept")
ON_GPUS = ("MFU", "waves", "CTAs")  # of the computation; of its longest kernel; of the collective, 0 for copies


def render(measurement: Measurement, console: Console) -> None:
    """Print every ladder, then the standings; times in milliseconds."""
    console.print(_text(_scope(measurement), QUIET))
    for rows in by_scenario(measurement.rows).values():
        _ladder(rows, console)
    _blocks(measurement.blocks, console)
    _standings(measurement.rows, console)
    if measurement.unavailable:
        _heading(console, "Not measured")
        for mechanism, reason in measurement.unavailable.items():
            console.print(_text(f"· {mechanism}: {reason}", limit=600), soft_wrap=True)


def _scope(measurement: Measurement) -> str:
    where = measurement.environment
    versions = [f"torch {where.torch}", *([f"NCCL {where.nccl}"] if where.nccl else [])]
    parts = [f"suite {measurement.suite}", f"{where.world_size} × {where.gpu or where.device}", *versions]
    return " · ".join([*parts, f"{measurement.rounds} rounds, the first {measurement.dropped_rounds} dropped"])


def _ladder(rows: Sequence[Row], console: Console) -> None:
    first = rows[0]
    compute_us, comm_us = first.compute_alone.us, first.best_comm_alone_us
    size = f"{first.collective} {say.size(first.size_bytes)}"
    _heading(console, f"{first.workload} + {size}", f"{first.pair_class}, T_c/T_g {comm_us / compute_us:.2f}")
    on_gpus = first.usage is not None
    table = _table((*STEPS, *ON_GPUS) if on_gpus else STEPS)
    alone = ("", "", "", say.percent(first.mfu_alone), _maybe(first.usage.waves_alone)) if first.usage else ()
    _rung(table, "", "compute alone", compute_us, more=alone)
    for mechanism, us in {row.mechanism: row.comm_alone.us for row in rows}.items():
        _rung(table, "", f"{mechanism} alone", us)
    _rung(table, "0.00", "serial", compute_us + comm_us, speedup=1.0)
    for row in rows:
        table.add_row(*_cells(row), style=MARKED if row.marked else "")
    ideal_us = max(compute_us, comm_us)
    _rung(table, "1.00", "ideal", ideal_us, speedup=(compute_us + comm_us) / ideal_us)
    console.print(table)
    for row in rows:
        if row.marked:
            console.print(_text(f"  ! {row.mechanism}, {_order(row.order)}: {row.marked}", MARKED), soft_wrap=True)


def _cells(row: Row) -> list[Text]:
    numbers = (say.milliseconds(row.together.us, 3), f"{row.speedup:.2f}", say.percent(row.ideal_fraction))
    kept = (say.percent(row.compute_kept), say.percent(row.comm_kept))
    hidden = f"{'! ' if row.marked else ''}{say.ratio(row.hidden)}"
    return [_text(cell) for cell in (hidden, row.mechanism, _order(row.order), *numbers, *kept, *_on_gpus(row))]


def _on_gpus(row: Row) -> tuple[str, ...]:
    if row.usage is None:
        return ()
    return (say.percent(row.mfu_together), _maybe(row.usage.waves_together), _maybe(row.usage.comm_ctas))


def _rung(
    table: Table, hidden: str, step: str, us: float, *, speedup: float | None = None, more: Sequence[str] = ()
) -> None:
    cells = (hidden, step, "", say.milliseconds(us, 3), "" if speedup is None else f"{speedup:.2f}", *more)
    table.add_row(*(_text(cell) for cell in cells), style=QUIET)


def _blocks(blocks: Sequence[BlockRow], console: Console) -> None:
    if not blocks:
        return
    _heading(console, "Building blocks", "each alone")
    columns = ("what", "mechanism", "size", "CTAs", "SMs", "ms", "GB/s", "TFLOP/s")
    table = _table(columns)
    for block in blocks:
        cells = (
            block.what, block.mechanism, "" if block.size_bytes is None else say.size(block.size_bytes),
            _maybe(block.num_ctas), _maybe(block.num_sms), say.milliseconds(block.time.us, 3),
            _maybe(block.gb_per_s), _maybe(block.tflops),
        )  # fmt: skip
        table.add_row(*(_text(cell) for cell in cells), style=MARKED if block.marked else "")
    console.print(table)
    for block in blocks:
        if block.marked:
            console.print(_text(f"  ! {block.what}, {block.mechanism}: {block.marked}", MARKED), soft_wrap=True)


def _standings(rows: Sequence[Row], console: Console) -> None:
    if not rows:
        return
    _heading(console, "Over all pairs", "mean of hidden, geometric mean of × serial; without marked rows")
    table = _table(("hidden", "mechanism", "lowest", "× serial", "compute\nkept, lowest", "rows", "marked"))
    for it in standings(rows):
        marked = str(it.marked) if it.marked else ""
        numbers = [say.ratio(value) for value in (it.hidden, it.lowest, it.speedup)]
        cells = (numbers[0], it.mechanism, *numbers[1:], say.percent(it.compute_kept), str(it.rows), marked)
        table.add_row(*(_text(cell) for cell in cells))
    console.print(table)
    _means(rows, "by collective", lambda row: row.collective, console)
    _means(rows, "by order", lambda row: _order(row.order), console)


def _means(rows: Sequence[Row], title: str, of: Callable[[Row], str], console: Console) -> None:
    """Mean of hidden, a column for each collective or order; nothing where there is one only."""
    names = list(dict.fromkeys(of(row) for row in rows))
    if len(names) < 2:
        return
    _heading(console, f"Mean of hidden {title}")
    table = _table(("mechanism", *names))
    for mechanism, means in mean_hidden(rows, of).items():
        table.add_row(*(_text(cell) for cell in (mechanism, *(say.ratio(means.get(name)) for name in names))))
    console.print(table)


def _order(order: str) -> str:
    return order.replace("comm_first", "comm first").replace("compute_first", "compute first")


def _maybe(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:,.1f}"


def _text(value: object, style: str = "", limit: int = 400) -> Text:
    return Text(printable(str(value), limit), style=style)


def _heading(console: Console, title: str, unit: str = "") -> None:
    console.print()
    console.print(
        Text.assemble((printable(title, 120), "bold underline"), (f"  {printable(unit)}" if unit else "", QUIET))
    )


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=QUIET, show_edge=False)
    for name in columns:
        table.add_column(
            Text(name), justify="left" if name in LEFT else "right", overflow="fold", no_wrap=name == "order"
        )
    return table
