"""Print on a terminal whether copy engines moved a trace's communication, or whether a tuning took effect."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.doctor import CommCalls, Effect, KnobEffect, RankEffect
from counterpoint.rendering import formatting as say
from counterpoint.rendering.print_table import QUIET, heading, line, print_tables, text
from counterpoint.rendering.table import Column, Table, row

MAX_RANKS = 32
_MARKS = {"took_effect": ("✓", "green"), "no_effect": ("✗", "bold red"), "not_seen": ("?", QUIET)}


def render_effect(effect: Effect, console: Console) -> None:
    """Print the verdict, each choice of a tuning, the fixes, copies by rank, all other calls, and the notes."""
    mark = Text("✓ ", "green") if effect.took_effect else Text("✗ ", "bold red")
    console.print(Text.assemble(mark, text(effect.verdict, "bold")), soft_wrap=True)
    _print_choices([knob for knob in effect.knobs if knob.pair is not None], effect.ranks, console)
    _print_fixes(effect.knobs, console)
    tables = (_copies(effect.per_rank), _calls(effect.per_rank), Table(title="Notes", notes=effect.notes))
    print_tables(tables, console)


def _print_choices(knobs: Sequence[KnobEffect], all_ranks: tuple[int, ...], console: Console) -> None:
    """Print a line for each pair of a tuning, and below that a line for each choice for the pair."""
    if knobs:
        heading(console, "Choices", "the worst that any rank shows")
    width = max((len(text(knob.knob).plain) for knob in knobs), default=0)
    for number, of_pair in groupby(knobs, key=lambda knob: knob.pair):
        for first, knob in enumerate(of_pair):
            if not first:
                size = f"{say.size(knob.bytes_per_rank)} from each of {knob.ranks} ranks"
                console.print(text(f"pair {number}: {knob.operation}, {size}, beside {knob.compute}", QUIET))
            ranks = "" if knob.on_ranks == all_ranks else f", on {ranks_in_words(knob.on_ranks)}"
            mark, style = _MARKS[knob.state]
            name = text(knob.knob).plain.ljust(width)
            console.print(Text.assemble((mark, style), f" {name} ", text(f"{knob.seen}{ranks}")), soft_wrap=True)


def _print_fixes(knobs: Sequence[KnobEffect], console: Console) -> None:
    """Print each fix once, with the pairs that need it."""
    fixes: dict[str, dict[str, None]] = {}
    for knob in knobs:
        if knob.fix:
            fixes.setdefault(knob.fix, {})[str(knob.pair)] = None
    if fixes and knobs[0].pair is not None:
        heading(console, "What to do")
    for fix, pairs in fixes.items():
        named = "" if knobs[0].pair is None else f"pair{'s' * (len(pairs) > 1)} {', '.join(pairs)}: "
        line(console, f"→ {named}{fix}")


def _share(rank: RankEffect) -> float:
    return rank.copies_us / rank.communication_us if rank.communication_us else 1.0


def _copies(ranks: Sequence[RankEffect]) -> Table:
    """Return a table of transfers by copy engines, of the ranks with the smallest share of such transfers."""
    shown = sorted(sorted(ranks, key=_share)[:MAX_RANKS], key=lambda rank: rank.rank)
    more = [f"The {len(shown)} ranks of which copy engines moved least; --json has all."]
    return Table(
        title="By copy engines",
        unit="between GPUs, and within the own GPU beside it",
        columns=(
            Column("rank", say.count, lambda rank: rank.rank),
            Column("copies", say.count, lambda rank: rank.copies),
            Column("size", say.size, lambda rank: rank.copied_bytes),
            Column("ms", say.milliseconds, lambda rank: rank.copies_us),
            Column("own copies", say.count, lambda rank: rank.own_copies),
            Column("size", say.size, lambda rank: rank.own_copied_bytes),
            Column("ms", say.milliseconds, lambda rank: rank.own_copies_us),
            Column("sums", say.count, lambda rank: rank.sums),
            Column("ms", say.milliseconds, lambda rank: rank.sums_us),
        ),
        rows=shown if any(rank.copies for rank in ranks) else (),
        notes=more if len(shown) < len(ranks) and any(rank.copies for rank in ranks) else (),
    )


def _calls(ranks: Sequence[RankEffect]) -> Table:
    """Return a table of all calls without copy engines, by operation, with the rank on which these take longest."""
    kinds: dict[tuple[str, str], list[tuple[int, CommCalls]]] = {}
    for rank in ranks:
        for call in rank.calls:
            kinds.setdefault((call.by, call.operation), []).append((rank.rank, call))
    rows = []
    for (by, operation), calls in kinds.items():
        worst, most = max(calls, key=lambda call: call[1].us)
        count, us = sum(call.calls for _, call in calls), sum(call.us for _, call in calls)
        rows.append(row("NCCL" if by == "nccl" else by, operation, count, us, worst, most.us))
    return Table(
        title="By NCCL and other kernels",
        unit="all ranks; times hold waiting for other ranks",
        columns=(
            Column("by"),
            Column("operation"),
            Column("calls", say.count),
            Column("ms", say.milliseconds),
            Column("most on rank", say.count),
            Column("ms", say.milliseconds),
        ),
        rows=rows,
    )
