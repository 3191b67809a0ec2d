"""Print a diagnosis on a terminal (time by kind, then verdict and remedies), or a hang (the missing ranks first).

Names come from traces, maybe hostile: they are printed as `rich.text.Text`, never as markup, with control characters
escaped. Everything is readable at 80 columns, without colour, and piped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from counterpoint.errors import printable
from counterpoint.records.diagnosis import Diagnosis, Finding, by_remedy
from counterpoint.records.hang import GroupState, Hang
from counterpoint.records.nccl import NcclRemark
from counterpoint.rendering import formatting as say
from counterpoint.rendering.diagnosis_tables import budget_table, verbose_tables
from counterpoint.rendering.operator_tables import operators_table
from counterpoint.rendering.print_table import QUIET, below, heading, line, print_tables, text
from counterpoint.rendering.table import Column, Table

MAX_REMEDIES = 3  # remedies shown without `verbose`
SHORT_LINES = 2
MAX_RANKS = 16
SEVERITY_STYLE = {"high": "bold red", "medium": "yellow", "low": QUIET}
MAX_GROUPS = 4
MAX_RANKS_OF_HANG = 32


def render(diagnosis: Diagnosis, console: Console, *, verbose: bool = False, operators: int = 0) -> None:
    """Print the summary of a diagnosis, which ends with the verdict and remedies; `verbose`: all tables and reasons.

    Totals are milliseconds per step. The table of operators has at most `operators` rows; 0: there is none.
    """
    console.print(text(_scope(diagnosis), QUIET))
    of_ranks = budget_table(diagnosis, MAX_RANKS)
    more = verbose_tables(diagnosis) if verbose else []
    if operators and (of_operators := operators_table(diagnosis, operators)):
        more.append(of_operators)
    remarks = Table(title="Notes", notes=diagnosis.notes)
    print_tables([*([of_ranks] if of_ranks else []), *more, remarks], console)
    console.print()
    line(console, diagnosis.verdict, "bold")
    _findings(diagnosis.findings, console, verbose=verbose)
    if diagnosis.nccl is not None and diagnosis.nccl.remarks:
        _remarks(diagnosis.nccl.remarks, console, verbose=verbose)


def _scope(diagnosis: Diagnosis) -> str:
    steps, ranks = len(diagnosis.steps), len(diagnosis.ranks)
    parts = [f"{ranks} of {diagnosis.world_size} rank{'s' * (diagnosis.world_size != 1)}"]
    mean = say.duration(diagnosis.totals.duration_us / max(1, steps))
    parts.append(f"{steps} step{'s' * (steps != 1)} of {mean}" if steps else f"no steps found, {mean} in all")
    parts += [printable(diagnosis.gpu, 60)] if diagnosis.gpu else []
    return " · ".join(
        [*parts, f"{diagnosis.source.events:,} event{'s' * (diagnosis.source.events != 1)} ({diagnosis.source.format})"]
    )


def _findings(findings: Sequence[Finding], console: Console, *, verbose: bool) -> None:
    """Print each remedy with its findings and their reasons; without `verbose` only the first remedies, in short."""
    heading(console, "What to do", "cost of step time")
    if not findings:
        console.print(text("No findings."))
    remedies = by_remedy(findings)
    shown = remedies if verbose else remedies[:MAX_REMEDIES]
    for number, (first, *others) in enumerate(shown, start=1):
        console.print(Text.assemble(f"{number}. ", *_cost_and_title(first)))
        _advice_and_evidence(first, console, verbose=verbose)
        for finding in others:
            console.print(Text.assemble("   also ", *_cost_and_title(finding)))
            if verbose:
                below(console, finding.evidence, QUIET)
    if not verbose:
        left = sum(map(len, remedies[MAX_REMEDIES:]))
        more = f"{left} more finding{'s' * (left != 1)}, " if left else ""
        console.print()
        console.print(text(f"--verbose: {more}all reasons, idle time, collectives, kernels, what-ifs", QUIET))


def _cost_and_title(finding: Finding) -> tuple[tuple[str, str], str, Text]:
    cost = f"{say.milliseconds(finding.cost_us)} ms"
    return (cost, SEVERITY_STYLE[finding.severity]), "  ", text(finding.title, "bold", 200)


def _remarks(remarks: Sequence[NcclRemark], console: Console, *, verbose: bool) -> None:
    """Print what is wrong by NCCL's logs, each with its remedy; without `verbose` only the first ones."""
    heading(console, "What NCCL's log says", "")
    for remark in remarks if verbose else remarks[:MAX_REMEDIES]:
        console.print(Text.assemble("· ", text(remark.title, "bold", 200)))
        _advice_and_evidence(remark, console, verbose=verbose)


def _advice_and_evidence(said: Finding | NcclRemark, console: Console, *, verbose: bool) -> None:
    """Print what to do and why; without `verbose` one sentence and `SHORT_LINES` lines."""
    below(console, "→ " + (said.advice if verbose else _first_sentence(said.advice)))
    below(console, said.evidence, QUIET, None if verbose else SHORT_LINES)


def _first_sentence(advice: str) -> str:
    """Return the first sentence of advice."""
    return re.split(r"(?<=[a-z0-9)])\. (?=[A-Z])", advice, maxsplit=1)[0]


def render_hang(hang: Hang, console: Console) -> None:
    """Print the verdict, the stuck groups and the notes."""
    line(console, hang.verdict, "bold")
    stuck = [group for group in hang.groups if group.stuck is not None]
    notes = [f"and {len(stuck) - MAX_GROUPS} more groups that wait"] if len(stuck) > MAX_GROUPS else []
    notes += hang.notes
    if hang.missing_dumps:
        shown = ", ".join(map(str, hang.missing_dumps[:MAX_RANKS_OF_HANG])) + " …" * (
            len(hang.missing_dumps) > MAX_RANKS_OF_HANG
        )
        notes.append(f"No dump of rank {shown}.")
    print_tables([*map(_stuck_group, stuck[:MAX_GROUPS]), Table(title="Notes", notes=notes)], console)


def _stuck_group(group: GroupState) -> Table:
    assert group.stuck is not None
    missing, waiting = set(group.missing), set(group.waiting)

    def place(rank: int) -> str:
        return "not entered" if rank in missing else "waits" if rank in waiting else "done"

    return Table(
        title=f"Group {group.name}" + (f" ({group.description})" if group.description else ""),
        unit=f"{len(group.ranks)} ranks; stuck in {group.stuck.operation} #{group.stuck.seq}",
        columns=(
            Column("rank", say.count, lambda state: state.rank),
            Column("here", of=lambda state: place(state.rank)),
            Column("scheduled", say.count, lambda state: state.scheduled),
            Column("started", say.count, lambda state: state.started),
            Column("completed", say.count, lambda state: state.completed),
            Column("last call", of=lambda state: state.last_operation, limit=40),
            Column("called in", of=lambda state: state.last_frame, limit=60),
        ),
        rows=sorted(group.states, key=lambda state: state.rank not in missing),
        most=MAX_RANKS_OF_HANG,
    )
