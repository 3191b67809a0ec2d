"""Report which calls of a process group were taken by a communicator, which were left to torch, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from counterpoint.errors import NoEffect
from counterpoint.parallel.tables import aligned_rows

_SIZES = {20: "below 1 MiB", 24: "1 to 16 MiB", 28: "16 to 256 MiB", 64: "256 MiB and more"}  # by bits of the size
_SIZE_OF_BITS = tuple(next(name for most, name in _SIZES.items() if bits <= most) for bits in range(65))

RoutedPath: TypeAlias = Literal["zero_sm", "hosts", "serial", "cuts", "flagged", "gather", "slabs", "torch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedCalls:
    """Counts calls of one kind: which way they went, and why.

    `path` is `zero_sm` for calls by copy engines (on CPUs: by this package's threads), `hosts` for those that go over
    several hosts, and `torch` for those that torch's own backend made. Tensor-parallel matmuls have `serial`, `cuts`
    and `flagged` (`parallel/tensor`), tokens of experts `gather` and `slabs` (`parallel/expert`).
    """

    operation: str
    size_class: str
    path: RoutedPath
    why: str
    calls: int


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Lists what a group's calls did, most calls first.

    `tuned` says which file is followed, and how many of its choices so far; empty: none is named.
    """

    rows: tuple[RoutedCalls, ...]
    tuned: str = ""

    @property
    def taken(self) -> int:
        """Return the number of calls that the group's communicators took."""
        return sum(row.calls for row in self.rows if row.path != "torch")

    def require(self) -> BackendReport:
        """Return this report; raise `NoEffect`, with all reasons, if no call was taken."""
        if not self.taken:
            raise NoEffect(
                "backend counterpoint",
                asked="calls by copy engines",
                seen="; ".join(f"{r.calls} {r.operation} {r.size_class} by torch ({r.why})" for r in self.rows)
                or "no call",
                fix="make larger calls, or give a smaller crossover_bytes",
            )
        return self

    def __str__(self) -> str:
        head = ("operation", "size", "path", "calls", "why")
        table = [head, *((r.operation, r.size_class, r.path, str(r.calls), r.why) for r in self.rows)]
        return "\n".join([*aligned_rows(table), *([f"tuned: {self.tuned}"] if self.tuned else [])])


class CallCounts:
    """Counts the calls of one group."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, RoutedPath, str]] = Counter()

    def add(self, operation: str, num_bytes: int, path: RoutedPath, why: str) -> None:
        """Count a call whose full array has `num_bytes`."""
        self._counts[operation, _SIZE_OF_BITS[num_bytes.bit_length()], path, why] += 1

    def report(self) -> BackendReport:
        """Return what was counted so far."""
        rows = [
            RoutedCalls(operation=operation, size_class=size, path=path, why=why, calls=calls)
            for (operation, size, path, why), calls in self._counts.most_common()
        ]
        return BackendReport(tuple(rows))
