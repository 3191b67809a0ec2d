"""Measured times of collectives, whatever they were read from: what `collective_fit` is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from counterpoint.errors import Misconfigured
from counterpoint.plan.network.protocols import OPERATIONS
from counterpoint.records import Record
from counterpoint.records.measurement import Measurement

__all__ = ["Measured", "from_blocks", "require"]


class Measured(Record, frozen=True, kw_only=True):
    """One collective alone, as it was measured.

    Args:
        operation: PyTorch's name.
        ranks, stride: its group.
        num_bytes: of the full array, as nccl-tests counts it.
        us: time; the median, of the slowest rank.
    """

    operation: str
    ranks: int
    stride: int = 1
    num_bytes: float
    us: float


def from_blocks(measurements: Iterable[Measurement], mechanism: str = "nccl") -> tuple[Measured, ...]:
    """Collectives alone from results of `counterpoint measure blocks`, one per group size; marked rows are left out.

    Raises:
        Misconfigured: there is none by this mechanism.
    """
    rows, seen = [], set()
    for measurement in measurements:
        for block in measurement.blocks:
            if block.what not in OPERATIONS or block.size_bytes is None or block.marked is not None:
                continue
            seen.add(block.mechanism)
            if block.mechanism == mechanism:
                ranks = measurement.environment.world_size
                rows.append(Measured(operation=block.what, ranks=ranks, num_bytes=block.size_bytes, us=block.time.us))
    if not rows:
        raise Misconfigured(
            f"no collective by {mechanism!r} among the blocks; there are: {', '.join(sorted(seen)) or 'none'}"
        )
    return tuple(rows)


def require(rows: Sequence[Measured]) -> None:
    """Raises Misconfigured for a row that cannot have been measured, or for none."""
    if not rows:
        raise Misconfigured("no measured row: give some of `counterpoint measure blocks` or of nccl-tests")
    for row in rows:
        if row.operation not in OPERATIONS:
            raise Misconfigured(f"operation = {row.operation!r}: choose from: {', '.join(OPERATIONS)}")
        if row.ranks < 2 or not row.num_bytes > 0 or not row.us > 0 or not isfinite(row.us + row.num_bytes):
            raise Misconfigured(
                f"{row.operation} of {row.num_bytes} bytes over {row.ranks} ranks in {row.us} µs cannot be: "
                "give 2 ranks or more, bytes and µs above 0"
            )
