"""Pairs are measured in their own dtypes: real ranks over gloo and threads."""

import pytest

from counterpoint.measurement.api import measure_parts
from counterpoint.records.measurement import Measurement
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.experiment import part_of, times_of
from tests.support.command import HANG_S

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MATMULS = ("all_gather_matmul", "matmul_reduce_scatter")


def pairs_of(dtype: str) -> list[StepPair]:
    """One of each operation: 4096 bytes a rank of a collective, matmuls and tokens of the same sizes."""
    item = BYTES[dtype]
    found = [
        StepPair(operation=name, compute="gemm 64x64x64", bytes_per_rank=4096, ranks=2, dtype=dtype, first="together")
        for name in COLLECTIVES
    ]
    found += [
        StepPair(operation=name, compute="gemm 64x64x64", bytes_per_rank=64 * 64 * item // 2, ranks=2, dtype=dtype)
        for name in MATMULS
    ]
    tokens = StepPair(operation="exchange", compute="tiny 8 zipf", bytes_per_rank=8 * 128 * item, ranks=2, dtype=dtype)
    return [*found, tokens]


PAIRS = [pair for dtype in BYTES for pair in pairs_of(dtype)]
SUM = StepPair(
    operation="reduce_scatter", compute="gemm 64x64x64", bytes_per_rank=4096, ranks=2, dtype="float32",
    compute_dtype="bfloat16", first="together",
)  # fmt: skip


@pytest.fixture(name="measured", scope="module")
def measured_fixture() -> Measurement:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        parts = [
            part_of(pair, ["torch", "serial"] if "matmul" in pair.operation else ["torch", "gather"])
            if "matmul" in pair.operation or pair.operation == "exchange"
            else part_of(pair, ["gloo", "zero_sm"])
            for pair in (*PAIRS, SUM)
        ]
        return measure_parts("dtypes", tuple(parts), device="cpu", world_size=2, rounds=5, timeout_s=HANG_S)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.operation} {pair.dtype}")
def test_every_operation_is_measured_in_every_dtype(measured: Measurement, pair: StepPair) -> None:
    tried = times_of(pair, measured).tried
    assert (len(tried), [each.marked for each in tried if each.marked]) == (2, [])


def test_rows_say_their_dtypes(measured: Measurement) -> None:
    name = part_of(SUM, ()).name
    assert {(row.dtype, row.compute_dtype) for row in measured.rows if row.scenario == name} == {
        ("float32", "bfloat16")
    }
    assert {row.dtype for row in measured.blocks} == set(BYTES)


def test_as_many_bytes_are_moved_in_every_dtype(measured: Measurement) -> None:
    assert {row.size_bytes for row in measured.rows if row.collective == "all_reduce"} == {8192}
