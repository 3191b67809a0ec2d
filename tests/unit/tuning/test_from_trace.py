"""Pairs of a step from traces: real ones, planted ones, and such as say too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterpoint.errors import BadTrace
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.from_trace import pairs_of_traces
from tests.support.kineto_trace import Event, annotation, copy, header, launched, metadata, op, param_comms, write

SAMPLES = Path(__file__).parents[3] / "samples"
GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL(args)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)"
MIB = 1 << 20


def matmul(at: float, us: float, m: int, n: int, k: int, number: int, *, shapes: bool = True) -> list[Event]:
    """A matmul that starts at once on the compute stream."""
    dims = [[m, k], [k, n]] if shapes else None
    return [
        op("aten::mm", at, 5.0, external=number, dims=dims),
        *launched("nvjet_tst_128x256_NTT", at + 1, us, correlation=number, external=number, delay=0.0),
    ]


def gather(
    at: float, us: float, number: int, *, elements: int = 4 * MIB, name: str = GATHER, dtype: str = "BFloat16"
) -> list[Event]:
    """A gather of two ranks, or a scatter, of `elements` on each."""
    kind = "_allgather_base" if name == GATHER else "_reduce_scatter_base"
    sizes = (elements, 2 * elements) if name == GATHER else (2 * elements, elements)
    said = metadata(kind, nelems=sizes, seq=number, dtype=dtype)
    return [
        param_comms(at, 4.0, external=number, more=said),
        *launched(
            name, at + 1, us, correlation=number, external=number, stream=20, grid=(24, 1, 1), delay=0.0, more=said
        ),
    ]


def pairs(folder: Path, *events: list[Event], steps: int = 1) -> tuple[tuple[StepPair, ...], tuple[str, ...]]:
    """Those of one rank's trace, whose steps last 10 ms each."""
    made = [annotation(f"ProfilerStep#{i}", 10_000.0 * i, 9_990.0) for i in range(steps)]
    write(folder / "rank0.json", [*made, *(event for each in events for event in each)], header())
    return pairs_of_traces(folder)


def test_fsdp_on_two_gpus() -> None:
    """Layers gather 436 MB in forward and backward and scatter 872 MB in float32; what is alone is counted."""
    found, notes = pairs_of_traces(SAMPLES / "fsdp-2-ranks")
    assert [(p.operation, p.dtype, p.bytes_per_rank, p.ranks, p.calls, p.where) for p in found] == [
        ("reduce_scatter", "float32", 436_224_000, 2, 7, ("layers.*",)),
        ("all_gather", "bfloat16", 218_112_000, 2, 8, ("layers.*",)),
        ("all_gather", "bfloat16", 218_112_000, 2, 7, ("layers.*",)),
    ]
    assert all(pair.compute.startswith("gemm ") for pair in found)
    assert [pair.compute_dtype for pair in found] == ["bfloat16", None, None]
    assert notes[0] == "4 collectives of a step have no matmul beside them, nor before the next one, and are left out"


@pytest.mark.parametrize(("sample", "ranks"), [("fsdp-4-ranks", 4), ("fsdp-healthy", 8)])
def test_more_ranks_gather_smaller_shards(sample: str, ranks: int) -> None:
    """The full array stays, its part of each rank shrinks, and calls are those of one rank."""
    found, _ = pairs_of_traces(SAMPLES / sample)
    gathers = [pair for pair in found if pair.operation == "all_gather"]
    assert {(pair.ranks, pair.bytes_per_rank) for pair in gathers} == {(ranks, 436_224_000 // ranks)}
    assert sum(pair.calls for pair in gathers) == 15


def test_one_rank_of_several_is_enough() -> None:
    """The same classes from the trace of one rank."""
    one, _ = pairs_of_traces(SAMPLES / "fsdp-4-ranks" / "rank2.json.gz")
    every, _ = pairs_of_traces(SAMPLES / "fsdp-4-ranks")
    assert [(p.operation, p.bytes_per_rank, p.calls) for p in one] == [
        (p.operation, p.bytes_per_rank, p.calls) for p in every
    ]


def test_a_matmul_beside_a_gather(tmp_path: Path) -> None:
    """Which GEMM, how often until it takes as long as all, who came first, and how many a step."""
    steps = [
        [
            *matmul(start + 100, 400.0, 4096, 2048, 1024, 10 * i + 1),
            *gather(start + 150, 700.0, 10 * i + 2),
            *matmul(start + 510, 400.0, 4096, 2048, 1024, 10 * i + 3),
        ]
        for i in range(2)
        for start in [10_000.0 * i]
    ]
    found, notes = pairs(tmp_path, *steps, steps=2)
    assert (found, notes) == (
        (
            StepPair(
                operation="all_gather", compute="gemm 4096x2048x1024*2", bytes_per_rank=8 * MIB, ranks=2,
                dtype="bfloat16", first="compute_first",
            ),
        ),
        (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ((["float", "float"], ["float", "float"]), "float32"),
        ((["c10::BFloat16", "c10::BFloat16"],) * 2, None),
        ((["float", "float"], ["c10::Half", "c10::Half"]), None),
        (([7, {}], "float"), None),
        ((["Dogfood"], []), None),
    ],
)
def test_the_dtype_of_matmuls_is_that_of_their_inputs(tmp_path: Path, types: tuple[Any, Any], expected: str) -> None:
    """None where it is that of the collective, where it is none, and where matmuls of one shape have several."""
    both = [matmul(at, 400.0, 4096, 2048, 1024, number) for at, number in ((100, 1), (510, 3))]
    for events, said in zip(both, types, strict=True):
        events[0]["args"]["Input type"] = said
    (found,), _ = pairs(tmp_path, both[0], gather(150, 700.0, 2), both[1])
    assert (found.dtype, found.compute_dtype) == ("bfloat16", expected)


def test_a_gather_that_nothing_hides_is_paired_with_what_follows(tmp_path: Path) -> None:
    """Each gather waits alone; beside the matmul before the next one it could run."""
    calls = [(gather(t, 300.0, i), matmul(t + 310, 400.0, 512, 512, 512, i + 50)) for i, t in ((1, 100.0), (2, 900.0))]
    found, notes = pairs(tmp_path, *(part for call in calls for part in call))
    assert [(p.operation, p.compute, p.calls, p.first) for p in found] == [
        ("all_gather", "gemm 512x512x512", 1, "comm_first")
    ]
    assert "1 collectives of a step have no matmul" in notes[0]


@pytest.mark.parametrize("rows", [8192, 4096])
def test_a_gather_whose_rows_the_next_matmul_multiplies(tmp_path: Path, rows: int) -> None:
    """Exactly as many bytes: they are one pair; half as many: they are not."""
    found, _ = pairs(tmp_path, gather(100, 300.0, 1, elements=4096 * 1024), matmul(410, 400.0, rows, 512, 1024, 2))
    expected = ["all_gather_matmul"] if rows == 8192 else []
    assert [pair.operation for pair in found] == expected
    assert all((pair.compute, pair.first) == ("gemm 8192x512x1024", None) for pair in found)


def test_matmuls_that_share_gathered_rows_are_one(tmp_path: Path) -> None:
    """Query, key and value: the columns of three matmuls, not of the one after them."""
    found, _ = pairs(
        tmp_path,
        gather(100, 300.0, 1, elements=4096 * 1024),
        *(matmul(410 + 100 * i, 90.0, 8192, n, 1024, 2 + i) for i, n in enumerate((512, 128, 128))),
        matmul(800, 90.0, 8192, 64, 512, 9),
    )
    assert [(p.operation, p.compute) for p in found] == [("all_gather_matmul", "gemm 8192x768x1024")]


def test_a_matmul_for_the_gradient_of_a_weight_is_no_pair(tmp_path: Path) -> None:
    """Its left factor has as many bytes, but it sums over the gathered rows; nor does it run beside its gather."""
    forward = [(gather(t, 100.0, i, elements=4096 * 1024), matmul(t + 110, 80.0, 8192, 512, 1024, i + 1))
               for t, i in ((100.0, 1), (400.0, 3))]  # fmt: skip
    backward = (gather(700.0, 100.0, 5, elements=4096 * 1024), matmul(810.0, 80.0, 1024, 512, 8192, 6))
    found, notes = pairs(tmp_path, *(part for call in (*forward, backward) for part in call))
    assert [(p.operation, p.compute, p.calls) for p in found] == [("all_gather_matmul", "gemm 8192x512x1024", 2)]
    assert "1 collectives of a step have no matmul beside them" in notes[0]


def test_a_matmul_whose_product_is_scattered(tmp_path: Path) -> None:
    """The matmul that ended last before the scatter, of a product of as many bytes."""
    found, _ = pairs(
        tmp_path, matmul(100, 400.0, 8192, 1024, 512, 1), gather(510, 300.0, 2, elements=4096 * 1024, name=SCATTER)
    )
    assert [(p.operation, p.compute) for p in found] == [("matmul_reduce_scatter", "gemm 8192x1024x512")]


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ([matmul(100, 900.0, 64, 64, 64, 1, shapes=False), gather(200, 300.0, 2)], "record it with record_shapes=True"),
        ([matmul(100, 900.0, 1 << 25, 64, 64, 1), gather(200, 300.0, 2)], "record it with record_shapes=True"),
        ([matmul(100, 900.0, 64, 64, 64, 1), gather(200, 300.0, 2, dtype="?")], "their size or ranks: record it with"),
        ([matmul(100, 900.0, 64, 64, 64, 1), gather(200, 300.0, 2, elements=16)], "less than 4 KiB"),
        ([matmul(100, 900.0, 64, 64, 64, 1), gather(200, 300.0, 2, dtype="Long")], "dtype 'int64'"),
        ([[copy("Memcpy PtoP (Device -> Device)", 200, 300.0, stream=9)]], "record the step without"),
    ],
)
def test_what_a_trace_does_not_say_is_counted(tmp_path: Path, beside: list[list[Event]], said: str) -> None:
    """No shapes, dtype or operation, tiny or impossible ones: no pair, and a note with what would help."""
    found, notes = pairs(tmp_path, *beside)
    assert (found, len(notes)) == ((), 1)
    assert said in notes[0]


def test_a_trace_without_collectives_says_so(tmp_path: Path) -> None:
    assert pairs(tmp_path, matmul(100, 500, 4096, 4096, 4096, 1)) == ((), ("no step of the traces has a collective",))


def test_a_trace_of_very_many_sizes_is_cut(tmp_path: Path) -> None:
    """The classes that communicate longest stay; a note counts the others."""
    calls = [gather(100.0 + 30 * i, 20.0 - 0.01 * i, i + 1, elements=4 * MIB + 64 * i) for i in range(205)]
    found, notes = pairs(tmp_path, matmul(50.0, 9000.0, 512, 512, 512, 999), *calls)
    assert len(found) == 200
    assert found[0].bytes_per_rank == 4 * MIB * 2
    assert "5 of 205 classes of pairs are left out" in notes[-1]


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace):
        pairs_of_traces(tmp_path)
