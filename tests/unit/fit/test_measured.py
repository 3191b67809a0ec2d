"""Rows from this project's own building blocks."""

import pytest
from fit.measured import from_blocks

from counterpoint.errors import Misconfigured
from counterpoint.plan.network.nccl_tests import Measured
from counterpoint.records.measurement import BlockRow, Environment, Measurement, Timing


def timing(us: float) -> Timing:
    return Timing(us=us, p10_us=us, p90_us=us, rank=0, per_rank_us=(us,))


def measurement(world_size: int, *blocks: BlockRow) -> Measurement:
    return Measurement(
        suite="blocks",
        environment=Environment(
            device="cuda", gpu="NVIDIA H200", world_size=world_size, driver=None, torch="2.11.0", nccl="2.28.9",
            counterpoint="0.1.0", commit=None, command=(), date="2026-11-21T00:00:00Z", variables={},
        ),
        rounds=12,
        dropped_rounds=2,
        rows=(),
        blocks=blocks,
    )  # fmt: skip


def block(what: str = "all_gather", mechanism: str = "nccl", marked: str | None = None, us: float = 22.0) -> BlockRow:
    return BlockRow(what=what, mechanism=mechanism, size_bytes=1 << 20, time=timing(us), marked=marked)


def test_group_sizes_are_those_of_the_runs() -> None:
    rows = from_blocks([measurement(2, block(us=15.0)), measurement(8, block())])
    assert rows == (
        Measured(operation="all_gather", ranks=2, num_bytes=1 << 20, us=15.0),
        Measured(operation="all_gather", ranks=8, num_bytes=1 << 20, us=22.0),
    )


def test_marked_rows_and_other_things_are_left_out() -> None:
    """GEMMs, other mechanisms and rows that must not be believed are no rows."""
    gemm = BlockRow(what="gemm 8192x8192x8192", mechanism="stock", time=timing(1.0))
    rows = from_blocks([measurement(8, gemm, block(mechanism="nccl_zero_cta"), block(marked="late"), block(us=30.0))])
    assert [row.us for row in rows] == [30.0]


def test_a_mechanism_that_was_not_measured_is_refused() -> None:
    with pytest.raises(Misconfigured, match="no collective by 'zero_sm' among the blocks; there are: nccl"):
        from_blocks([measurement(8, block())], mechanism="zero_sm")
