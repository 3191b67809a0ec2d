"""Print on a terminal whether copy engines moved the communication of a trace, or a tuning took effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.effect import CommCalls, Effect, KnobEffect, RankEffect
from counterpoint.rendering import formatting as say

MAX_RANKS = 32
_OF_COPIES = ("rank", "copies", "size", "ms", "own copies", "size", "ms", "sums", "ms")
_OF_CALLS = ("by", "operation", "calls", "ms", "most on rank", "ms")
_MARKS = {"took_effect": ("✓", "green"), "no_effect": ("✗", "bold red"), "not_seen": ("?", say.QUIET)}


def render_effect(effect: Effect, console: Console) -> None:
    """Print the verdict, each choice of a tuning, what to do, copies of each rank, all other calls, and the notes."""
    mark = Text("✓ ", "green") if effect.took_effect else Text("✗ ", "bold red")
    console.print(Text.assemble(mark, say.text(effect.verdict, "bold")), soft_wrap=True)
    _print_choices([knob for knob in effect.knobs if knob.pair is not None], effect.ranks, console)
    _print_fixes(effect.knobs, console)
    if any(rank.copies for rank in effect.per_rank):
        shown = sorted(sorted(effect.per_rank, key=_share)[:MAX_RANKS], key=lambda rank: rank.rank)
        say.heading(console, "By copy engines", "between GPUs, and within the own GPU beside it")
        say.print_table(console, _OF_COPIES, map(_copies, shown), left=())
        if len(shown) < len(effect.per_rank):
            console.print(f"the {len(shown)} ranks of which copy engines moved least; --json has all")
    if any(rank.calls for rank in effect.per_rank):
        say.heading(console, "By NCCL and other kernels", "all ranks; times hold waiting for other ranks")
        say.print_table(console, _OF_CALLS, _calls(effect.per_rank), left=("by", "operation"))
    _print_notes(effect.notes, console)


def _print_choices(knobs: Sequence[KnobEffect], all_ranks: tuple[int, ...], console: Console) -> None:
    """Print a line for each pair, and one for each choice of it."""
    if knobs:
        say.heading(console, "Choices", "the worst that any rank shows")
    width = max((len(say.text(knob.knob).plain) for knob in knobs), default=0)
    for number, of_pair in groupby(knobs, key=lambda knob: knob.pair):
        for first, knob in enumerate(of_pair):
            if not first:
                size = f"{say.size(knob.bytes_per_rank)} from each of {knob.ranks} ranks"
                console.print(say.text(f"pair {number}: {knob.operation}, {size}, beside {knob.compute}", say.QUIET))
            ranks = "" if knob.on_ranks == all_ranks else f", on {ranks_in_words(knob.on_ranks)}"
            mark, style = _MARKS[knob.state]
            line = say.text(knob.knob).plain.ljust(width)
            console.print(Text.assemble((mark, style), f" {line} ", say.text(f"{knob.seen}{ranks}")), soft_wrap=True)


def _print_fixes(knobs: Sequence[KnobEffect], console: Console) -> None:
    """Print what to do, each once, with the pairs that need it."""
    fixes: dict[str, dict[str, None]] = {}
    for knob in knobs:
        if knob.fix:
            fixes.setdefault(knob.fix, {})[str(knob.pair)] = None
    if fixes and knobs[0].pair is not None:
        say.heading(console, "What to do")
    for fix, pairs in fixes.items():
        named = "" if knobs[0].pair is None else f"pair{'s' * (len(pairs) > 1)} {', '.join(pairs)}: "
        console.print(say.text(f"→ {named}{fix}"), soft_wrap=True)


def _print_notes(notes: Sequence[str], console: Console) -> None:
    if notes:
        say.heading(console, "Notes")
    for note in notes:
        console.print(Text.assemble("· ", say.text(note)))


def _share(rank: RankEffect) -> float:
    return rank.copies_us / rank.communication_us if rank.communication_us else 1.0


def _copies(rank: RankEffect) -> tuple[str, ...]:
    return (
        str(rank.rank),
        f"{rank.copies:,}",
        say.size(rank.copied_bytes),
        say.milliseconds(rank.copies_us),
        f"{rank.own_copies:,}",
        say.size(rank.own_copied_bytes),
        say.milliseconds(rank.own_copies_us),
        f"{rank.sums:,}",
        say.milliseconds(rank.sums_us),
    )


def _calls(ranks: Sequence[RankEffect]) -> Iterator[tuple[str, ...]]:
    kinds: dict[tuple[str, str], list[tuple[int, CommCalls]]] = {}
    for rank in ranks:
        for call in rank.calls:
            kinds.setdefault((call.by, call.operation), []).append((rank.rank, call))
    for (by, operation), rows in kinds.items():
        worst, most = max(rows, key=lambda row: row[1].us)
        calls, us = sum(call.calls for _, call in rows), sum(call.us for _, call in rows)
        shown = "NCCL" if by == "nccl" else by
        yield shown, operation, f"{calls:,}", say.milliseconds(us), str(worst), say.milliseconds(most.us)
