"""Collectives that `measure_suites.py blocks` has measured, as rows to fit."""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.errors import Misconfigured
from counterpoint.plan.network.nccl_tests import Measured
from counterpoint.plan.network.network import OPERATIONS
from counterpoint.records.measurement import Measurement

__all__ = ["from_blocks"]


def from_blocks(measurements: Iterable[Measurement], mechanism: str = "nccl") -> tuple[Measured, ...]:
    """Collectives alone from results of `measure_suites.py blocks`, one per group size; marked rows are left out.

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
