"""Diagnose a recorded trace in a separate process of the lowest priority, without torch, while training goes on.

The first rank of every host starts such a process, which digests the traces of the host's ranks. The process of
rank 0 joins all digests, which the other hosts put into a common folder, and prints a `WatchedStep`. The process ends
when the training ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from counterpoint.diagnosis.reading.digest import RankDigest, digest_file, pack_digest, unpack_digest
from counterpoint.errors import BadTrace, CounterpointError, printable
from counterpoint.records import Record
from counterpoint.records.causes import IDLE_CAUSES
from counterpoint.records.diagnosis import Diagnosis, IdleCause, Straggler, WatchedStep, in_sentence
from counterpoint.rehearsed import NO_TIMES, is_rehearsal
from counterpoint.trace.source import Limits, TraceFile, rank_from_name

COMMAND = (sys.executable, "-c", "import os; os.nice(19); from counterpoint.monitoring.beside import main; main()")
_POLL_S = 0.1
_STILL_S = 60.0  # if no rank's file comes for so long, the missing ranks are left out
_LONGEST_DETAIL = 60
_OF_RECORDING = ("nothing_recorded", "no_launch_recorded", "earlier_work", "profiler")  # causes of recorded steps only
_LEAST_SHARE = 0.03  # of a step: the line leaves out causes that take less
_SLOWED = 1.25  # recorded / unrecorded step time from which the line names both times


class Round(Record, frozen=True, kw_only=True):
    """Describes one recording to diagnose: ranks, folder of traces, and folder in which hosts exchange digests."""

    parent: int  # the process of the training
    traces: str  # folder of this host's traces
    ranks: tuple[int, ...]  # of this host
    digests: str  # folder of all hosts' digests
    world_size: int
    step: int
    usual_us: float | None = None  # of a step that is not recorded


def environment() -> dict[str, str]:
    """Return the environment variables of the diagnosing process: the import path, and one thread per math library."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return os.environ | threads | {"PYTHONPATH": path}


def main() -> None:
    """Diagnose the `Round` read from standard input; print an expected error on stderr and exit with code 2."""
    todo = msgspec.json.decode(sys.stdin.buffer.read(), type=Round)
    threading.Thread(target=_end_with, args=(todo.parent,), daemon=True).start()
    try:
        digests, excuses = _digests(todo)
        if 0 in todo.ranks:
            sys.stdout.buffer.write(msgspec.json.encode(_joined(todo, digests, excuses)))
            return
        for digest in digests:
            put(Path(todo.digests), f"rank{digest.rank}.digest", pack_digest(digest))
        for rank, why in excuses.items():
            put(Path(todo.digests), f"rank{rank}.missing", why.encode())
    except (CounterpointError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _digests(todo: Round) -> tuple[list[RankDigest], dict[int, str]]:
    """Return the digests of this host's traces, and why ranks have none, by rank; remove the traces that were read."""
    folder = Path(todo.traces)
    digests, excuses = [], dict.fromkeys(todo.ranks, "it has recorded nothing")
    for rank, path in wait_for(folder, set(todo.ranks)):
        del excuses[rank]
        if path.suffix == ".missing":
            excuses[rank] = path.read_text(errors="replace")
            continue
        try:
            digests += digest_file(TraceFile(path=path, label=path.name, format="kineto"), Limits())
        except BadTrace as error:
            excuses[rank] = str(error)
        path.unlink()
    _remove(folder, todo.step)
    return digests, excuses


def put(folder: Path, name: str, data: bytes) -> None:
    """Write a file atomically into the folder of a `Round`; raise if the parent of that folder is missing."""
    with writing(folder, name) as temporary:
        temporary.write_bytes(data)


@contextmanager
def writing(folder: Path, name: str) -> Iterator[Path]:
    """Yield a temporary path that becomes `name` if the block raises nothing; `folder` must have a parent."""
    if not folder.parent.is_dir():
        raise CounterpointError(
            f"the folder {folder.parent} is not here: the rank that made it has ended, or is on another host; several "
            "hosts need watch(folder=...) on storage that all of them see"
        )
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{name}"
    yield temporary
    temporary.replace(folder / name)


def wait_for(folder: Path, ranks: set[int], still_s: float = _STILL_S) -> Iterator[tuple[int, Path]]:
    """Yield each rank and its file (data or a reason) as files appear, until none appears for `still_s` seconds."""
    last = time.monotonic()
    while ranks and time.monotonic() < last + still_s:
        for path in sorted(folder.glob("rank*.*")):
            rank = rank_from_name(path.name)
            if rank in ranks:
                ranks.remove(rank)
                yield rank, path
                last = time.monotonic()
        if ranks:
            time.sleep(_POLL_S)


def _remove(folder: Path, step: int) -> None:
    """Remove a recording's folder, and folders that are left of recordings at earlier steps."""
    for other in folder.parent.glob("step*"):
        if other.name[4:].isdigit() and int(other.name[4:]) <= step:
            shutil.rmtree(other, ignore_errors=True)


def _joined(todo: Round, digests: list[RankDigest], excuses: dict[int, str]) -> WatchedStep:
    """Diagnose the digests of all hosts' ranks, and return a summary; remove the folder of the digests."""
    from counterpoint.diagnosis.api import diagnose_digests  # imported late: only the host of rank 0 needs it

    folder, others = Path(todo.digests), set(range(todo.world_size)) - set(todo.ranks)
    for rank, path in wait_for(folder, others):
        if path.suffix == ".digest":
            digests.append(unpack_digest(path.read_bytes(), str(path)))
        else:
            excuses[rank] = path.read_text(errors="replace")
    _remove(folder, todo.step)
    if not digests:
        raise CounterpointError("; ".join(f"rank {rank}: {why}" for rank, why in excuses.items()))
    try:
        diagnosis = diagnose_digests(digests, [d.path for d in digests]).diagnosis
    except BadTrace as error:
        raise CounterpointError(error.reason) from None
    notes = tuple(f"rank {rank} is missing: {printable(why)}" for rank, why in excuses.items())
    return watched_step(diagnosis, todo.step, notes, todo.usual_us)


def watched_step(diagnosis: Diagnosis, step: int, notes: tuple[str, ...], usual_us: float | None = None) -> WatchedStep:
    """Return a `WatchedStep` with the mean step times of a diagnosis; `usual_us` is the µs of an unrecorded step."""
    total, steps = diagnosis.totals, max(1, len(diagnosis.steps))
    late = _late(diagnosis, steps, usual_us)
    return WatchedStep(
        step=step, unix_s=time.time(), line=_line(diagnosis, step, steps, late, usual_us), verdict=diagnosis.verdict,
        ranks=diagnosis.ranks, world_size=diagnosis.world_size, step_us=total.duration_us / steps, usual_us=usual_us,
        hidden=total.hidden, exposed_comm_us=total.exposed_comm_us / steps, idle_us=total.idle_us / steps,
        late_rank=late.rank if late else None, late_us=late.delay_us / steps if late else None,
        late_cause=late.cause if late else None, late_detail=late.detail if late else None, findings=diagnosis.findings,
        notes=(*diagnosis.notes, *notes, *[NO_TIMES] * is_rehearsal()),
    )  # fmt: skip


def _late(diagnosis: Diagnosis, steps: int, usual_us: float | None) -> Straggler | None:
    """Return the rank that makes the others wait longest; None if the recording itself may have made that rank late.

    Where hosts are the limit, recording slows each launch, and some ranks more than others. Recordings of different
    ranks also begin and end at different times.
    """
    late = next((one for one in diagnosis.stragglers if one.detail != "nothing_recorded"), None)
    by_recording = diagnosis.totals.duration_us - steps * usual_us if usual_us is not None else 0.0
    return None if late and late.detail == "launch" and late.delay_us <= by_recording else late


def _line(diagnosis: Diagnosis, step: int, steps: int, late: Straggler | None, usual_us: float | None) -> str:
    """Return the log line: `step 1500: 156 ms, 74 % hidden, rank 5 late 22 ms: tokenizer.encode`."""
    seen = len(diagnosis.ranks)
    some = f" ({seen} of {diagnosis.world_size} ranks)" if seen < diagnosis.world_size else ""
    totals, idle = diagnosis.totals, diagnosis.idle
    share = "no communication seen" if totals.hidden is None else f"{totals.hidden * 100:.0f} % hidden"
    recorded_us = totals.duration_us / steps
    took = _milliseconds(recorded_us)
    if usual_us is not None and recorded_us > _SLOWED * usual_us:
        took = f"{_milliseconds(usual_us)} ({took} while recorded)"
    causes: list[IdleCause] = []
    if diagnosis.world_size == 1 and idle is not None:
        share = f"GPU idle {100 * idle.idle_us / recorded_us:.0f} %"
        causes = [c for c in idle.causes if IDLE_CAUSES[c.category].title and c.category not in _OF_RECORDING]
        causes = [c for c in causes if c.us > _LEAST_SHARE * recorded_us]
    rehearsed = " (rehearsed: times do not hold)" if is_rehearsal() else ""
    said = [f"step {step}{some}{rehearsed}: {took}", share]
    findings = [f for f in diagnosis.findings if f.kind not in ("straggler", "not_recorded")]
    if causes:
        title = IDLE_CAUSES[causes[0].category].title
        where = "".join(f" ({one.name[:_LONGEST_DETAIL]})" for one in causes[0].operations[:1])
        said.append(f"{_milliseconds(causes[0].us)}: {in_sentence(title)}{where}")
    elif late is not None:
        said.append(f"rank {late.rank} late {_milliseconds(late.delay_us / steps)}: {_why(late)}")
    elif findings:
        worst = findings[0]
        said.append(f"{_milliseconds(worst.cost_us)}: {in_sentence(worst.title)}")
    else:
        said.append("nothing stands out")
    return printable(", ".join(said))


def _why(late: Straggler) -> str:
    """Return why a rank is late: the operation in which its host stalls, else the cause with an example."""
    detail = "" if late.detail is None else late.detail[:_LONGEST_DETAIL]
    if late.cause == "host_stall":
        return detail or "its host launched nothing, and no operation was recorded"
    cause = late.cause.replace("_", " ") if late.cause != "unknown" else "unknown cause"
    return f"{cause} ({detail})" if detail else cause


def _milliseconds(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us < 10e3 else f"{us / 1e3:.0f} ms"
