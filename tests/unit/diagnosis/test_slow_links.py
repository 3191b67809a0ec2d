"""A group that needs longer than others for the same is named, and groups that differ for a reason are not."""

from dataclasses import replace

import pytest

from counterpoint.records.diagnosis import Finding
from counterpoint.trace.timeline import CollectiveInfo, Kind
from tests.support.job_builder import COMPUTE_STREAM, Op, diagnosed, op, rank

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
CALLS = 6


def exchange(op_name: str, ranks: tuple[int, ...], start: float, end: float, elements: int) -> Op:
    """Record one collective of some ranks."""
    info = CollectiveInfo(
        op=op_name, group=str(ranks), group_ranks=str(list(ranks)), group_size=len(ranks), in_nelems=elements,
        out_nelems=elements, dtype="BFloat16",
    )  # fmt: skip
    return op(f"ncclDevKernel_{op_name}", start, end, kind=Kind.COMM, stream=COMPUTE_STREAM, info=info)


def slow_links(took: dict[tuple[int, int], float], elements: dict[tuple[int, int], int] | None = None) -> list[Finding]:
    """Diagnose ranks that compute 1 ms, exchange in pairs, reduce among all, and so on; `took`: µs of the exchange."""
    ranks, each = [], 1050.0 + max(took.values())
    for pair, us in took.items():
        ops: list[Op] = []
        for at in (each * n for n in range(CALLS)):
            size = (elements or {}).get(pair, 1 << 20)
            ops += [
                op("matmul", at, at + 1000),
                exchange("all_gather", pair, at + 1000, at + 1000 + us, size),
                exchange("all_reduce", tuple(range(8)), at + 1000 + us, at + each, 1 << 10),
            ]
        queued = [replace(o, launch=-100.0 + n) for n, o in enumerate(ops)]  # one stream, all launched in time
        ranks += [rank(*queued, steps=((-110.0, CALLS * each),)) for _ in pair]
    d = diagnosed(*ranks)
    return [f for f in d.findings if f.kind == "slow_link"]


def test_the_slow_pair_is_named() -> None:
    """Ranks 4 and 5 need 1.4 ms, where the others need 0.25."""
    (found,) = slow_links({pair: 1400.0 if pair == (4, 5) else 250.0 for pair in PAIRS})
    assert found.cost_us == pytest.approx(CALLS * 1150)
    assert found.rank == 4
    assert "link between ranks 4-5 is slow: all_gather takes 5.6 x" in found.title
    assert "takes 1.40 ms after the last rank has arrived, where other groups of 2 ranks need 0.25 ms" in found.evidence


def test_equal_pairs_are_not_accused() -> None:
    assert not slow_links({pair: 250.0 + 20 * pair[0] for pair in PAIRS})


def test_a_pair_that_moves_more_is_not_slow() -> None:
    """Another size is not compared."""
    took = {pair: 1400.0 if pair == (4, 5) else 250.0 for pair in PAIRS}
    assert not slow_links(took, {(4, 5): 6 << 20})
