"""Why a run of several ranks ended early, as one error: pure functions of what each rank left behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, Unsupported, printable
from counterpoint.records import Failure

__all__ = ["Remains", "died", "hung"]

# NoEffect is rebuilt as what it is a kind of: its text is complete, its fields are not in a `Failure`
OURS = {"Misconfigured": Misconfigured, "Unsupported": Unsupported, "NoEffect": Unsupported}
SILENT = "did not answer (stopped, or in a driver call)"
FELT = "PeerFailed"  # by a rank that another one told to stop
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')  # as faulthandler writes it


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """One rank at the end: exit status (negative: a signal; None: it runs), its `Failure`, the end of its log."""

    rank: int
    code: int | None
    failure: Failure | None = None
    log: str = ""


def died(ranks: Sequence[Remains], *, during: str, logs: str) -> CounterpointError:
    """The error to raise when a rank has ended badly: the cause, not what the others felt of it.

    One of our own exceptions comes first, then a signal, then other exceptions (a peer that lost its connection raises
    one too), then a rank that left only its log. A rank that only repeats what another one told it is never believed
    before that one.
    """
    said = [r for r in ranks if r.failure is not None]
    told = [r for r in said if r.failure and r.failure.kind != FELT] or said
    killed = [r for r in ranks if r.code is not None and r.code < 0]
    ours = next((r.failure for r in told if r.failure and r.failure.kind in OURS), None)
    if ours is not None:
        same = _alike(told, ours)
        return OURS[ours.kind](f"{printable(ours.text, 600)} ({_names(same)} {_at(ours, during)})")
    if killed:
        same = [r for r in killed if r.code == killed[0].code]
        reason = f"{_names(same)} {'was' if len(same) == 1 else 'were'} killed by {_signal(same[0])} {during}"
    elif told and (failure := told[0].failure) is not None:
        same = _alike(told, failure)
        reason = f"{_names(same)} failed {_at(failure, during)}: {failure.kind}: {printable(failure.text, 160)}"
    else:
        same = [r for r in ranks if r.code][:1]
        last = next((line for line in reversed(same[0].log.splitlines()) if line.strip()), "it left no word")
        reason = f"{_names(same)} exited with {same[0].code} {during}: {printable(last.strip(), 160)}"
    return PeerTimeout(f"{reason}; log: {logs}/rank{same[0].rank}.log", ranks=_ranks(same))


def _alike(told: Sequence[Remains], failure: Failure) -> list[Remains]:
    return [r for r in told if r.failure and (r.failure.kind, r.failure.text) == (failure.kind, failure.text)]


def _at(failure: Failure, during: str) -> str:
    return f"in scenario {failure.scenario!r}" if failure.scenario else during


def hung(ranks: Sequence[Remains], *, during: str, logs: str, timeout_s: float) -> PeerTimeout:
    """The error to raise when nothing has moved for `timeout_s`; the logs end with faulthandler's stacks."""
    first = sorted(ranks, key=lambda r: _where(r) != SILENT)  # the likely cause, whatever its number
    at = "; ".join(f"rank {r.rank} {_where(r)}" for r in first[:4]) + ("; …" if len(ranks) > 4 else "")
    reason = f"no progress for {timeout_s:g} s {during}: {at}"
    return PeerTimeout(f"{reason}; raise --timeout if it was only slow; logs: {logs}", ranks=_ranks(ranks))


def _where(rank: Remains) -> str:
    """The innermost frame of ours, or the innermost at all."""
    if rank.code is not None and rank.code >= 0:
        return "had ended"
    frames = [match.groupdict() for match in FRAME.finditer(rank.log.rpartition("Fatal Python error")[2])]
    if not frames:
        return SILENT
    frame = next((f for f in frames if "counterpoint" in f["file"]), frames[0])
    return f"was in {frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"


def _signal(rank: Remains) -> str:
    number = -(rank.code or 0)
    if number == signal.SIGKILL:
        return "SIGKILL (by someone, or by the kernel for want of memory)"
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _names(ranks: Sequence[Remains]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(r.rank) for r in ranks)}"


def _ranks(ranks: Sequence[Remains]) -> tuple[int, ...]:
    return tuple(r.rank for r in ranks)
