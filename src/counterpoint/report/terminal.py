"""The diagnosis on a terminal: the verdict first, then what it rests on.

Names come from traces and are hostile: they are printed as `rich.text.Text`, never as markup, with control characters
escaped. Everything is readable at 80 columns, without colour, and piped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.records import Collective, Diagnosis, Finding, RankAccount, Replay
from counterpoint.report import wording as say

__all__ = ["render"]

MAX_RANKS = 16
MAX_COLLECTIVES = 8
MAX_KERNELS = 8
MAX_STRAGGLERS = 8
BAR_WIDTH = 24
SEVERITY_STYLE = {"high": "bold red", "medium": "yellow", "low": "bright_black"}


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print the summary of a diagnosis; its first line is the verdict. Totals are milliseconds per step."""
    console.print(_text(diagnosis.verdict, "bold"), soft_wrap=True)
    console.print(_text(_scope(diagnosis), "bright_black"))
    _findings(diagnosis.findings, console)
    _budget(diagnosis, console)
    _collectives(diagnosis, console)
    _stragglers(diagnosis, console)
    _kernels(diagnosis, console)
    if diagnosis.replay is not None:
        _replay(diagnosis.replay, console)
    _notes(diagnosis, console)


def _text(value: object, style: str = "", limit: int = 600) -> Text:
    return Text(printable(str(value), limit), style=style)


def _below(console: Console, value: str, style: str = "") -> None:
    """Print text indented by three, wrapped, without spaces at the ends of lines."""
    for line in _text(value, style, 1200).wrap(console, max(20, console.width - 3)):
        line.rstrip()
        console.print(Text("   ").append_text(line), soft_wrap=True)


def _heading(console: Console, title: str, unit: str = "") -> None:
    console.print()
    console.print(Text.assemble((title, "bold underline"), (f"  {unit}" if unit else "", "bright_black")))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: frozenset[int]) -> Table:
    """A plain table; columns not in `left` are numbers and align right."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bright_black", show_edge=False)
    for index, name in enumerate(columns):
        table.add_column(Text(name), justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else _text(cell) for cell in row))
    return table


def _scope(diagnosis: Diagnosis) -> str:
    steps, ranks = len(diagnosis.steps), len(diagnosis.ranks)
    parts = [f"{ranks} of {diagnosis.world_size} rank{'s' * (diagnosis.world_size != 1)}"]
    mean = f"{say.milliseconds(diagnosis.totals.duration_us / max(1, steps))} ms"
    parts.append(f"{steps} step{'s' * (steps != 1)} of {mean}" if steps else f"no steps found, {mean} in all")
    parts += [printable(diagnosis.gpu, 60)] if diagnosis.gpu else []
    return " · ".join([*parts, f"{diagnosis.source.events:,} events ({diagnosis.source.format})"])


def _findings(findings: Sequence[Finding], console: Console) -> None:
    _heading(console, "What to do", "cost of step time")
    if not findings:
        console.print(_text("Nothing found that is worth acting on."))
    for number, finding in enumerate(findings, start=1):
        cost = f"{say.milliseconds(finding.cost_us)} ms"
        costs = (cost, SEVERITY_STYLE[finding.severity])
        console.print(Text.assemble(f"{number}. ", costs, "  ", _text(finding.title, "bold", 200)))
        _below(console, finding.evidence, "bright_black")
        _below(console, "→ " + finding.advice)


def _bar(parts: dict[str, float], longest_us: float) -> Text:
    """A bar of one glyph per part, so that it reads without colour; its length is the duration."""
    bar, drawn, reached = Text(), 0, 0.0
    for part in say.PARTS:
        reached += parts[part.key]
        end = round(BAR_WIDTH * reached / longest_us) if longest_us > 0 else 0
        bar.append(part.glyph * (end - drawn), part.colour)
        drawn = max(drawn, end)
    return bar


def _budget(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.per_rank:
        return
    _heading(console, "Where the time goes", "ms per step, mean" if diagnosis.steps else "ms, the whole trace")
    shown, steps = say.worst_ranks(diagnosis.per_rank, MAX_RANKS), say.steps_in(diagnosis)
    longest = max(account.duration_us for account in shown)

    def row(account: RankAccount) -> list[str | Text]:
        parts = say.budget(account)
        compute = parts["compute"] + parts["overlapped"]
        cells = [compute, parts["wait"], parts["transfer"], parts["memcpy"], parts["idle"]]
        numbers = [say.milliseconds(us / steps, 1) for us in cells]
        return [str(account.rank), _bar(parts, longest), *numbers, say.percent(account.hidden)]

    columns = ("rank", "", "compute", "wait", "transfer", "copies", "idle", "hidden")
    console.print(_table(columns, (row(account) for account in shown), left=frozenset({1})))
    keys = (Text.assemble((part.glyph, part.colour), " ", part.name.removeprefix("exposed ")) for part in say.PARTS)
    console.print(Text("  ").join(keys))
    if len(shown) < len(diagnosis.per_rank):
        console.print(
            f"     {len(shown)} of {len(diagnosis.per_rank)} ranks: those with the smallest share in compute."
        )


def _mean_wait(collective: Collective) -> float:
    return sum(collective.wait_us.values()) / len(collective.wait_us) if collective.wait_us else 0.0


def _collectives(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.collectives:
        return
    shown = say.by_exposed(diagnosis.collectives, MAX_COLLECTIVES)
    unit = f"ms each; {len(shown)} of {len(diagnosis.collectives)}, by exposed time; wait: mean / longest"
    _heading(console, "Collectives", unit)
    rows = (
        (
            f"{c.op} #{c.index}", _text(c.group, limit=16), say.size(c.bytes), say.milliseconds(c.exposed_us),
            f"{say.milliseconds(_mean_wait(c))} / {say.milliseconds(max(c.wait_us.values(), default=0.0))}",
            say.milliseconds(c.transfer_us), say.bandwidth(c.bus_gb_per_s), str(c.last_rank),
        )
        for c in shown
    )  # fmt: skip
    columns = ("collective", "group", "size", "exposed", "wait", "transfer", "GB/s", "last")
    console.print(_table(columns, rows, left=frozenset({0, 1})))


def _stragglers(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.stragglers:
        return
    _heading(console, "Ranks that make others wait", "ms per step")
    steps = say.steps_in(diagnosis)
    for straggler in diagnosis.stragglers[:MAX_STRAGGLERS]:
        detail = f" ({straggler.detail})" if straggler.detail else ""
        cause = say.CAUSES[straggler.cause] + detail
        delay = f"{say.milliseconds(straggler.delay_us / steps)} ms late, last {straggler.times_last} times: "
        console.print(Text.assemble((f"rank {straggler.rank}  ", "bold"), delay, _text(cause, "bold")))
        _below(console, straggler.evidence, "bright_black")
    if len(diagnosis.stragglers) > MAX_STRAGGLERS:
        console.print(f"   and {len(diagnosis.stragglers) - MAX_STRAGGLERS} more")


def _kernels(diagnosis: Diagnosis, console: Console) -> None:
    slowed = [kernel for kernel in diagnosis.kernels if kernel.cause != "none"]
    if not slowed:
        return
    slowed.sort(key=lambda kernel: -kernel.cost_us)
    _heading(console, "Kernels slowed by communication", "median ms, cost in ms per step")
    steps = say.steps_in(diagnosis)
    rows = (
        (
            _text(k.name, limit=60), say.milliseconds(k.alone_us, 3), say.milliseconds(k.overlapped_us, 3),
            say.factor(k.slowdown), say.waves(k), say.milliseconds(k.cost_us / steps), say.KERNEL_CAUSES[k.cause],
        )
        for k in slowed[:MAX_KERNELS]
    )  # fmt: skip
    columns = ("kernel", "alone", "beside", "slower", "waves", "cost", "cause")
    console.print(_table(columns, rows, left=frozenset({0, 6})))
    if len(slowed) > MAX_KERNELS:
        console.print(f"   and {len(slowed) - MAX_KERNELS} more")


def _replay(replay: Replay, console: Console) -> None:
    _heading(console, "What it is worth", "step replayed, ms")
    error = f"measured {say.milliseconds(replay.measured_us)}, error {say.percent(replay.error, digits=1, sign=True)}"
    cases = (
        (case.name, say.milliseconds(case.step_us), say.speed_up(replay.replayed_us, case.step_us))
        for case in replay.what_if
    )
    unchanged = ("unchanged", say.milliseconds(replay.replayed_us), error)
    console.print(_table(("replay", "step", ""), [unchanged, *cases], left=frozenset({0, 2})))


def _notes(diagnosis: Diagnosis, console: Console) -> None:
    notes = say.notes(diagnosis)
    if notes:
        _heading(console, "Notes")
    for note in notes:
        console.print(Text.assemble("· ", _text(note)))
