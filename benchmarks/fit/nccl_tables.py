"""NCCL's own model of the machine at hand, from its log.

NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING: one table per communicator, latency (µs) / bandwidth (GB/s) by operation,
algorithm and protocol: NCCL takes the least latency + S / bandwidth (it corrects trees by size besides, which the table
does not say); then, one line per collective with what it took.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from counterpoint.errors import Misconfigured, printable
from counterpoint.plan.network.nccl_tests import Measured
from counterpoint.records import Record

__all__ = ["TuningCell", "TuningPick", "tuning_pick", "tuning_picks", "tuning_rows", "tuning_table"]

MAX_TEXT = 64 << 20
_FUNCTIONS = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "Broadcast": "broadcast",
    "ReduceScatter": "reduce_scatter",
}
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")  # by number in older lines
_PROTOCOLS = ("LL", "LL128", "Simple")
_CELL = re.compile(r"\s*([\d.]+)\s*/\s*([\d.]+)\s*")
_PICK = re.compile(r"(\w+):\s*(\d+) Bytes -> Algo (\w+) proto (\w+)")


class TuningCell(Record, frozen=True, kw_only=True):
    """One way to run one operation, as NCCL's model sees it for one communicator."""

    operation: str
    algorithm: str
    protocol: str
    latency_us: float
    gb_per_s: float
    """Of the full array: S / time in the limit."""

    def time_us(self, num_bytes: float) -> float:
        """Latency + S / bandwidth."""
        return self.latency_us + num_bytes / self.gb_per_s / 1e3


class TuningPick(Record, frozen=True, kw_only=True):
    """What NCCL took for one collective."""

    operation: str
    num_bytes: int
    algorithm: str
    protocol: str


def tuning_table(text: str) -> tuple[TuningCell, ...]:
    """The first table in a log with NCCL_DEBUG_SUBSYS=TUNING; ways that NCCL has switched off are left out.

    Raises:
        Misconfigured: there is no table.
    """
    _cap(text)
    cells: dict[tuple[str, str, str], TuningCell] = {}
    algorithms: list[str] = []
    for columns in _table_lines(text):
        head, rest = columns[0], columns[1:]
        if head == "Algorithm":
            algorithms = [name for name in rest if name]
        elif head == "Latency/AlgBw":  # NCCL before 2.19: "Tree/    LL" in every column
            algorithms = list(dict.fromkeys(name.partition("/")[0].strip() for name in rest if name))
        elif head in _FUNCTIONS and algorithms:
            for cell in _cells(_FUNCTIONS[head], algorithms, rest):
                cells.setdefault((cell.operation, cell.algorithm, cell.protocol), cell)
    if not cells:
        raise Misconfigured(
            "no table of latencies and bandwidths: give a log with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING"
        )
    return tuple(cells.values())


def _table_lines(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if "|" in line and (words := line.partition("NCCL INFO")[2] or line):
            yield [column.strip() for column in words.split("|")]


def _cells(operation: str, algorithms: list[str], columns: list[str]) -> Iterator[TuningCell]:
    for index, column in enumerate(columns[: 3 * len(algorithms)]):
        found = _CELL.fullmatch(column)
        if found and float(found.group(2)) > 0:
            yield TuningCell(
                operation=operation,
                algorithm=algorithms[index // 3],
                protocol=_PROTOCOLS[index % 3],
                latency_us=float(found.group(1)),
                gb_per_s=float(found.group(2)),
            )


def tuning_pick(table: tuple[TuningCell, ...], operation: str, num_bytes: float) -> TuningCell:
    """What NCCL would take.

    Raises:
        Misconfigured: the table has nothing for the operation.
    """
    cells = [cell for cell in table if cell.operation == operation]
    if not cells:
        known = ", ".join(sorted({cell.operation for cell in table}))
        raise Misconfigured(f"operation = {printable(operation)!r} is not in the table; it has: {known}")
    return min(cells, key=lambda cell: cell.time_us(num_bytes))


def tuning_rows(table: tuple[TuningCell, ...], ranks: int) -> tuple[Measured, ...]:
    """NCCL's own predictions for a communicator of so many ranks, 1 KiB to 1 GiB, to fit where nothing was measured."""
    return tuple(
        Measured(
            operation=operation,
            ranks=ranks,
            num_bytes=num_bytes,
            us=tuning_pick(table, operation, num_bytes).time_us(num_bytes),
        )
        for operation in dict.fromkeys(cell.operation for cell in table)
        for num_bytes in (1 << power for power in range(10, 31))
    )


def tuning_picks(text: str) -> tuple[TuningPick, ...]:
    """Every line that says what NCCL took, each once; older lines say algorithm and protocol by number."""
    _cap(text)
    picks: dict[TuningPick, None] = {}
    for function, size, algorithm, protocol in _PICK.findall(text):
        if function in _FUNCTIONS:
            named = TuningPick(
                operation=_FUNCTIONS[function],
                num_bytes=int(size),
                algorithm=_named(algorithm, _ALGORITHMS),
                protocol=_named(protocol, _PROTOCOLS),
            )
            picks[named] = None
    return tuple(picks)


def _named(word: str, names: tuple[str, ...]) -> str:
    """Their names where they stand as numbers: 1 is Ring."""
    if word.isdigit():
        return names[int(word)] if int(word) < len(names) else word
    return next((name for name in names if name.lower() == word.lower()), word)


def _cap(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise Misconfigured(f"{len(text)} characters: give at most {MAX_TEXT}, the part with the table is enough")
