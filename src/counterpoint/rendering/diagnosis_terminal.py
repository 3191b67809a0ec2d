"""Print a diagnosis on a terminal: where the time goes, and at its end, where the eye is, the verdict and what to do.

Names come from traces, maybe hostile: they are printed as `rich.text.Text`, never as markup, with control characters
escaped. Everything is readable at 80 columns, without colour, and piped.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.records.diagnosis import Diagnosis, Finding, RankAccount, Replay, ranks_in_words
from counterpoint.rendering import formatting as say

MAX_FINDINGS = 3  # in short
SHORT_LINES = 2
MAX_RANKS = 16
MAX_COLLECTIVES = 8
MAX_KERNELS = 8
MAX_STRAGGLERS = 8
BAR_WIDTH = 24
SEVERITY_STYLE = {"high": "bold red", "medium": "yellow", "low": say.QUIET}


def render(diagnosis: Diagnosis, console: Console, *, verbose: bool = False) -> None:
    """Print the summary of a diagnosis, which ends with the verdict and what to do; `verbose`: all tables and reasons.

    Totals are milliseconds per step.
    """
    console.print(say.text(_scope(diagnosis), say.QUIET))
    _budget(diagnosis, console)
    if verbose:
        _idle(diagnosis, console)
        _kinds(diagnosis, console)
        _collectives(diagnosis, console)
        _stragglers(diagnosis, console)
        _kernels(diagnosis, console)
        if diagnosis.replay is not None:
            _replay(diagnosis.replay, console, say.replayed_steps(diagnosis))
    _notes(diagnosis, console)
    console.print()
    console.print(say.text(diagnosis.verdict, "bold"), soft_wrap=True)
    _findings(diagnosis.findings, console, verbose=verbose)


def _below(console: Console, value: str, style: str = "", most: int | None = None) -> None:
    """Print text indented by three, wrapped, without spaces at the ends of lines; at most so many of them."""
    width = max(20, console.width - 3)
    lines = list(say.text(value, style).wrap(console, width))
    for number, line in enumerate(lines[:most], start=1):
        line.rstrip()
        if number == most and len(lines) > number:
            if line.cell_len > width - 2:
                line.truncate(max(line.plain.rfind(" ", 0, width - 1), 0) or width - 2)
                line.rstrip()
            line.append(" …")
        console.print(Text("   ").append_text(line), soft_wrap=True)


def _scope(diagnosis: Diagnosis) -> str:
    steps, ranks = len(diagnosis.steps), len(diagnosis.ranks)
    parts = [f"{ranks} of {diagnosis.world_size} rank{'s' * (diagnosis.world_size != 1)}"]
    mean = say.duration(diagnosis.totals.duration_us / max(1, steps))
    parts.append(f"{steps} step{'s' * (steps != 1)} of {mean}" if steps else f"no steps found, {mean} in all")
    parts += [printable(diagnosis.gpu, 60)] if diagnosis.gpu else []
    return " · ".join([*parts, f"{diagnosis.source.events:,} events ({diagnosis.source.format})"])


def _findings(findings: Sequence[Finding], console: Console, *, verbose: bool) -> None:
    """Print what to do, then why; in short: the dearest findings, the first sentence of each remedy."""
    say.heading(console, "What to do", "cost of step time")
    if not findings:
        console.print(say.text("No findings."))
    shown = findings if verbose else findings[:MAX_FINDINGS]
    for number, finding in enumerate(shown, start=1):
        cost = f"{say.milliseconds(finding.cost_us)} ms"
        costs = (cost, SEVERITY_STYLE[finding.severity])
        console.print(Text.assemble(f"{number}. ", costs, "  ", say.text(finding.title, "bold", 200)))
        _below(console, "→ " + (finding.advice if verbose else say.first_sentence(finding.advice)))
        _below(console, finding.evidence, say.QUIET, None if verbose else SHORT_LINES)
    if not verbose:
        left = len(findings) - len(shown)
        more = f"{left} more finding{'s' * (left != 1)}, " if left else ""
        console.print()
        console.print(say.text(f"--verbose: {more}all reasons, idle time, collectives, kernels, what-ifs", say.QUIET))


def _bar(parts: dict[str, float], longest_us: float) -> Text:
    """Return a bar with one glyph per part, so that it reads without colour; its length is the duration."""
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
    late = {rank for straggler in diagnosis.stragglers for rank in straggler.ranks}
    say.heading(console, "Where the time goes", "ms per step, mean" if diagnosis.has_steps else "ms, the whole trace")
    shown, steps = say.worst_ranks(diagnosis.per_rank, MAX_RANKS, late), say.steps_in(diagnosis)
    longest = max(account.duration_us for account in shown)

    def row(account: RankAccount) -> list[str | Text]:
        parts = say.budget(account)
        compute = parts["compute"] + parts["overlapped"]
        wait = None if account.exposed_wait_us is None and parts["transfer"] else parts["wait"]
        cells = [compute, wait, parts["transfer"], parts["memcpy"], parts["idle"]]
        numbers = [say.milliseconds(None if us is None else us / steps, 1) for us in cells]
        return [str(account.rank), _bar(parts, longest), *numbers, say.percent(account.hidden)]

    columns = ("rank", "", "compute", "wait", "transfer", "copies", "idle", "hidden")
    say.print_table(console, columns, map(row, shown), left=("",))
    keys = (Text.assemble((part.glyph, part.colour), " ", part.name.removeprefix("exposed ")) for part in say.PARTS)
    console.print(Text("  ").join(keys))
    if len(shown) < len(diagnosis.per_rank):
        console.print(f"     {len(shown)} of {len(diagnosis.per_rank)} ranks: the late, and those that compute least.")


def _idle(diagnosis: Diagnosis, console: Console) -> None:
    causes = say.idle_causes(diagnosis)
    if diagnosis.idle is None or not causes:
        return
    unit = ("ms per step" if diagnosis.has_steps else "ms") + (", mean over ranks" if len(diagnosis.ranks) > 1 else "")
    say.heading(console, say.idle_sentence(diagnosis), unit)
    rows = (
        (
            say.IDLE_CAUSES[c.category],
            say.milliseconds(c.us),
            f"{c.count:,.0f}" if c.count >= 1 else "<1",
            say.milliseconds(c.longest_us),
            say.text(c.operations[0].name if c.operations else say.UNKNOWN, limit=60),
        )
        for c in causes
    )
    columns = ("cause", "ms", "gaps", "longest", "mostly in")
    say.print_table(console, columns, rows, left=("cause", "mostly in"))


def _kinds(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.collective_kinds:
        return
    shown = diagnosis.collective_kinds[:MAX_COLLECTIVES]
    unit = "ms: exposed a step, wait, moving a call; GB/s: it/best/link"
    say.heading(console, "Collectives by kind", unit)
    steps = say.steps_in(diagnosis)
    rows = (
        (
            k.op, say.text(k.parallel or k.group_name or k.group, limit=12), say.size(k.bytes),
            f"{k.count / steps:,.0f}",
            say.milliseconds(k.exposed_us), say.milliseconds(k.wait_us), say.milliseconds(k.transfer_us),
            "/".join(map(say.bandwidth, (k.bus_gb_per_s, k.best_gb_per_s, k.link_gb_per_s))), k.phase or say.UNKNOWN,
        )
        for k in shown
    )  # fmt: skip
    columns = ("kind", "group", "size", "calls", "exposed", "wait", "moving", "GB/s", "phase")
    say.print_table(console, columns, rows, left=("kind", "group", "phase"))
    if len(shown) < len(diagnosis.collective_kinds):
        console.print(f"   and {len(diagnosis.collective_kinds) - len(shown)} more kinds")


def _collectives(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.collectives:
        return
    shown = say.by_exposed(diagnosis.collectives, MAX_COLLECTIVES)
    unit = f"ms each; {len(shown)} of {len(diagnosis.collectives)}, by exposed time; wait: mean / longest"
    say.heading(console, "Collectives", unit)
    rows = (
        (
            f"{c.op} #{c.index}", say.text(c.group, limit=16), say.size(c.bytes), say.milliseconds(c.exposed_us),
            " / ".join(map(say.milliseconds, say.waits(c))),
            say.milliseconds(c.transfer_us), say.bandwidth(c.bus_gb_per_s),
            say.UNKNOWN if say.waits(c)[0] is None else str(c.last_rank),
        )
        for c in shown
    )  # fmt: skip
    columns = ("collective", "group", "size", "exposed", "wait", "transfer", "GB/s", "last")
    say.print_table(console, columns, rows, left=("collective", "group"))


def _stragglers(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.stragglers:
        return
    say.heading(console, "Ranks that make others wait", "ms per step")
    steps = say.steps_in(diagnosis)
    for straggler in diagnosis.stragglers[:MAX_STRAGGLERS]:
        detail = f" ({straggler.detail})" if straggler.detail else ""
        cause = say.CAUSES[straggler.cause] + detail
        delay = f"{say.milliseconds(straggler.delay_us / steps)} ms late, last {straggler.times_last} times: "
        console.print(Text.assemble((f"{ranks_in_words(straggler.ranks)}  ", "bold"), delay, say.text(cause, "bold")))
        _below(console, straggler.evidence, say.QUIET)
    if len(diagnosis.stragglers) > MAX_STRAGGLERS:
        console.print(f"   and {len(diagnosis.stragglers) - MAX_STRAGGLERS} more")


def _kernels(diagnosis: Diagnosis, console: Console) -> None:
    slowed = [kernel for kernel in diagnosis.kernels if kernel.cause != "none"]
    if not slowed:
        return
    slowed.sort(key=lambda kernel: -kernel.cost_us)
    say.heading(console, "Kernels slowed by communication", "median ms, cost in ms per step")
    steps = say.steps_in(diagnosis)
    rows = (
        (
            say.text(k.name, limit=60), say.milliseconds(k.alone_us, 3), say.milliseconds(k.overlapped_us, 3),
            say.factor(k.slowdown), say.waves(k), say.milliseconds(k.cost_us / steps), say.KERNEL_CAUSES[k.cause],
        )
        for k in slowed[:MAX_KERNELS]
    )  # fmt: skip
    columns = ("kernel", "alone", "beside", "slower", "waves", "cost", "cause")
    say.print_table(console, columns, rows, left=("kernel", "cause"))
    if len(slowed) > MAX_KERNELS:
        console.print(f"   and {len(slowed) - MAX_KERNELS} more")


def _replay(replay: Replay, console: Console, part: str) -> None:
    say.heading(console, "What it is worth", f"step replayed, ms{part}")
    error = f"measured {say.milliseconds(replay.measured_us)}, error {say.percent(replay.error, digits=1, sign=True)}"
    cases = (
        (case.name, say.milliseconds(case.step_us), say.speed_up(replay.replayed_us, case.step_us))
        for case in replay.what_if
    )
    unchanged = ("unchanged", say.milliseconds(replay.replayed_us), error)
    say.print_table(console, ("replay", "step", ""), [unchanged, *cases], left=("replay", ""))
    if (sentence := say.replayed_waits(replay)) is not None:
        _below(console, sentence, say.QUIET)


def _notes(diagnosis: Diagnosis, console: Console) -> None:
    notes = say.notes(diagnosis)
    if notes:
        say.heading(console, "Notes")
    for note in notes:
        console.print(Text.assemble("· ", say.text(note)))
