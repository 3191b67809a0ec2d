"""Read the output of nccl-tests: times of collectives, each checked against the other numbers of its row.

A run is one program of nccl-tests (all_reduce_perf and so on): lines that begin with #, which name its devices, then a
line for each size, out of place and in place. Sizes are of the full array. Launchers may put a prefix before each line.
Each row has a time and the bandwidths that follow from it: they must agree with time, operation and number of ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.plan.network.network import OPERATIONS
from counterpoint.read_file import read_text
from counterpoint.records import Record

MAX_BYTES = 64 << 20
MAX_RANKS = 1 << 20
HOST_BOUND = 1.3  # times the shortest time: shorter rows show how long one process takes to launch on all GPUs
PROGRAMS = {
    "all_gather_perf": "all_gather", "all_reduce_perf": "all_reduce", "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast", "reduce_scatter_perf": "reduce_scatter", "sendrecv_perf": "send_recv",
}  # fmt: skip
_PROGRAM = re.compile("|".join(PROGRAMS))
_RUN = re.compile(r"#\s+nThread\s+\d+\s+nGpus?\s+(\d{1,9})\s+minBytes")
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.*\S)"
)
_TYPES = r"(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e4m3|f8e5m2|fp8_e4m3|fp8_e5m2)"
_ROW = re.compile(rf"(?:^|[\s>])(\d{{1,19}})\s+(\d+)\s+{_TYPES}\s+(.+)$")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class Measured(Record, frozen=True, kw_only=True):
    """Holds one measured time of a collective that ran alone."""

    operation: str  # PyTorch's name
    ranks: int  # of its group
    stride: int = 1  # of its group
    num_bytes: float  # of the full array, as nccl-tests counts it
    us: float  # time; the median, of the slowest rank


class NcclTestsRun(Record, frozen=True, kw_only=True):
    """Holds one run of nccl-tests: its machine and its rows."""

    rows: tuple[Measured, ...]  # out of place; without those that are host-bound
    host_bound: int = 0  # rows left out, in which launching on several GPUs from one process took longest
    ranks_per_host: int | None = None  # None: the text lists no devices
    gpu: str | None = None  # the driver's device name


def read_nccl_tests(path: Path, *, operation: str | None = None, ranks: int | None = None) -> tuple[NcclTestsRun, ...]:
    """Return the runs in a file as `nccl_tests_runs` does; errors have the name of the file."""
    name = printable(str(path), 200)
    text = read_text(path, limit=MAX_BYTES, advice="give what nccl-tests printed")
    if operation is None and not _PROGRAM.search(text):
        named = _PROGRAM.search(path.name)
        operation = PROGRAMS[named.group()] if named else None
    try:
        return nccl_tests_runs(text, operation=operation, ranks=ranks)
    except Misconfigured as error:
        raise Misconfigured(f"{name}: {error}") from None


def nccl_tests_runs(text: str, *, operation: str | None = None, ranks: int | None = None) -> tuple[NcclTestsRun, ...]:
    """Return the runs in what nccl-tests printed; `operation` and `ranks` are of all runs, None: as the text says.

    Raises:
        Misconfigured: no rows; what is neither given nor in the text; or lines that contradict each other.
    """
    if operation is not None and operation not in OPERATIONS:
        raise Misconfigured(f"operation = {printable(operation)!r}: choose from: {', '.join(OPERATIONS)}")
    runs = [_run(lines, operation, ranks) for lines in _split(text)]
    found = tuple(run for run in runs if run is not None)
    if not found:
        raise Misconfigured("no row of nccl-tests (size, count, type, ..., time, algbw, busbw): give what it printed")
    return found


Lines = list[tuple[int, str]]
"""Numbers of lines in the text, from 1, and what stands there."""


def _split(text: str) -> Iterator[Lines]:
    """Yield the lines of each run of nccl-tests; a line that names the program or command begins a new run."""
    lines: Lines = []
    seen_rows = False
    for number, line in enumerate(text.splitlines(), start=1):
        named = _PROGRAM.search(line) or _RUN.search(line)
        if named and seen_rows and not _ROW.search(line):
            yield lines
            lines, seen_rows = [], False
        seen_rows = seen_rows or _ROW.search(line) is not None
        lines.append((number, line))
    yield lines


def _run(lines: Lines, operation: str | None, ranks: int | None) -> NcclTestsRun | None:
    """Return the run of nccl-tests that these lines print; None if no line is a row of its table."""
    numbered = [(number, found) for number, line in lines if (found := _ROW.search(line))]
    if not numbered:
        return None
    first = f"the run at line {lines[0][0]}"
    name = _operation(lines, operation, first)
    devices = [found for _, line in lines if (found := _RANK.search(line))]
    count = _ranks(devices, ranks, first)
    rows = [
        Measured(operation=name, ranks=count, num_bytes=int(found.group(1)), us=us)
        for number, found in numbered
        if (us := _us(number, found, name, count)) is not None
    ]
    shared = any(int(found.group(1)) > 1 for _, line in lines if (found := _RUN.search(line)))
    least = min((row.us for row in rows), default=0.0)
    kept = tuple(row for row in rows if not shared or row.us >= HOST_BOUND * least)
    return NcclTestsRun(
        rows=kept,
        host_bound=len(rows) - len(kept),
        ranks_per_host=_per_host([found.group(3) for found in devices], count, first),
        gpu=_one("GPU", (found.group(4) for found in devices), first),
    )


def _operation(lines: Lines, given: str | None, where: str) -> str:
    named = {PROGRAMS[program] for _, line in lines for program in _PROGRAM.findall(line)}
    if len(every := named | ({given} if given else set())) > 1:
        raise Misconfigured(f"{where} is of {' and '.join(sorted(every))}: give what one program printed")
    if not named and given is None:
        raise Misconfigured(
            f"{where}: which collective it is does not stand there; give one of {', '.join(PROGRAMS.values())}"
        )
    return given or named.pop()


def _ranks(devices: Sequence[re.Match[str]], given: int | None, where: str) -> int:
    """Return the number of ranks of an nccl-tests run; raise Misconfigured if listed devices and `given` differ."""
    listed = Counter(int(found.group(1)) for found in devices)
    if len({found.group(2) for found in devices}) > 1:
        raise Misconfigured(f"{where} has several groups at once: give one of all ranks together")
    if twice := [rank for rank, count in listed.items() if count > 1]:
        raise Misconfigured(f"{where} lists rank {twice[0]} twice: build nccl-tests with MPI=1, or give its text once")
    if given is None and not listed:
        raise Misconfigured(f"{where} has no line '#  Rank 0 ...': give the number of ranks")
    if listed and max(listed) >= MAX_RANKS:
        raise Misconfigured(f"{where} has rank {printable(str(max(listed)), 40)}: give fewer than {MAX_RANKS}")
    count = max(listed) + 1 if given is None else given
    if listed and (max(listed) >= count or (given is None and len(listed) < count)):
        raise Misconfigured(
            f"{where} lists {len(listed)} ranks up to {max(listed)}, not {count}: give the right number"
        )
    if not 2 <= count < MAX_RANKS:
        raise Misconfigured(f"{where}: ranks = {count}: give 2 to {MAX_RANKS - 1}; one rank communicates nothing")
    return count


def _per_host(hosts: list[str], ranks: int, where: str) -> int | None:
    if len(hosts) < ranks:
        return None  # nccl-tests does not list some of them
    counts = set(Counter(hosts).values())
    if len(counts) > 1:
        raise Misconfigured(f"{where} has {' and '.join(map(str, sorted(counts)))} ranks on its hosts: give equal ones")
    return counts.pop()


def _one(what: str, names: Iterable[str], where: str) -> str | None:
    different = sorted(set(names))
    if len(different) > 1:
        raise Misconfigured(f"{where} has {printable(' and '.join(different), 120)}: give runs of one kind of {what}")
    return different[0] if different else None


def _us(number: int, found: re.Match[str], operation: str, ranks: int) -> float | None:
    """Return a row's out-of-place time in µs; None for a size below one element, which nccl-tests lists as 0."""
    size, words = int(found.group(1)), found.group(3).split()
    if words and not _NUMBER.fullmatch(words[0]) and words[0] in ("sum", "prod", "max", "min", "avg", "none", "mulsum"):
        words = words[1:]
    if len(words) in (5, 9):
        words = words[1:]  # the root rank
    where = f"line {number}, {printable(found.group().strip(), 100)!r}"
    if len(words) not in (3, 4, 8) or not all(map(_NUMBER.fullmatch, words[:3])):
        raise Misconfigured(f"{where} is no row of nccl-tests: it has to say time, algbw, busbw and #wrong")
    if not size:
        return None
    us, algorithm, bus = map(float, words[:3])
    if not (0 < us < 1e12 and size < 1 << 60):
        raise Misconfigured(f"{where}: give bytes and a time above 0")
    if len(words) > 3 and re.fullmatch(r"0*[1-9]\d*", words[3]):
        raise Misconfigured(f"{where}: {words[3]} results were wrong; do not fit to it")
    _agree(where, "algbw", algorithm, size / us / 1e3)
    _agree(where, f"busbw of {operation} over {ranks} ranks", bus, size / us / 1e3 * bus_factor(operation, ranks))
    return us


def _agree(where: str, what: str, printed: float, follows: float) -> None:
    """Raise Misconfigured where a printed bandwidth differs from size / time, rounded to 0.01 GB/s."""
    if abs(printed - follows) > 0.011 + 0.01 * follows:
        raise Misconfigured(f"{where}: {what} is {printed:g} GB/s, but {follows:.2f} follows from its size and time")
