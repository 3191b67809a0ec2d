"""Whether a trace proves that copy engines moved the communication: who copied, who did not, and what cannot tell."""

from __future__ import annotations

import ast
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import counterpoint
from counterpoint.errors import BadTrace
from counterpoint.records.doctor import CommCalls, Effect
from counterpoint.rendering.effect_terminal import MAX_RANKS, render_effect
from counterpoint.trace.timeline import DEVICE_BITS, CollectiveInfo, Device, Kind
from counterpoint.tuning.check import SUM_KERNEL, find_effect
from tests.support.job_builder import Op, Rank, comm, digested, op, rank

PEER, OWN = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"


def to_peer(start: float, end: float, **more: object) -> Op:
    """A copy of 1,000 bytes to another GPU, on stream 30."""
    return op(PEER, start, end, **{"kind": Kind.COMM, "stream": 30, "bytes": 1000, **more})


def within(start: float, end: float, *, stream: int) -> Op:
    """A copy of 500 bytes that stays on the GPU."""
    return op(OWN, start, end, kind=Kind.MEMCPY, stream=stream, bytes=500)


def effect(*ranks: tuple[Op, ...], world_size: int = 0) -> Effect:
    return find_effect([digested(rank(*ops), at, world_size or len(ranks)) for at, ops in enumerate(ranks)])


def printed(found: Effect) -> str:
    console = Console(file=io.StringIO(), width=80)
    render_effect(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


GEMM = op("gemm", 0, 100)
BY_COPIES = (GEMM, to_peer(0, 40), to_peer(60, 100), op(SUM_KERNEL, 100, 110))
BY_NCCL = (GEMM, comm("all_gather", 0, 70), comm("all_gather", 100, 150), comm("reduce_scatter", 200, 210))


def test_copies_on_every_rank_took_effect() -> None:
    """With their number, bytes and time, and the kernels that sum."""
    found = effect(BY_COPIES, BY_COPIES)
    first = found.per_rank[0]
    assert (found.took_effect, found.knobs[0].state, found.knobs[0].fix) == (True, "took_effect", "")
    assert (first.copies, first.copied_bytes, first.copies_us, first.communication_us) == (2, 2000, 80.0, 80.0)
    assert (first.sums, first.sums_us, first.calls) == (1, 10.0, ())
    assert found.verdict == (
        "took effect on ranks 0-1: 4 copies between GPUs, 0.16 of 0.16 ms of communication by copy engines"
    )


def test_nccl_alone_had_no_effect() -> None:
    """Its calls are counted by operation, longest first, and what to do is said."""
    found = effect(BY_NCCL, BY_NCCL)
    assert (found.took_effect, found.knobs[0].on_ranks) == (False, (0, 1))
    assert found.per_rank[0].calls == (
        CommCalls(by="nccl", operation="all_gather", calls=2, us=120.0),
        CommCalls(by="nccl", operation="reduce_scatter", calls=1, us=10.0),
    )
    assert found.verdict == "had no effect on ranks 0-1: no copy between GPUs, 6 calls by NCCL in 0.26 ms"
    assert "counterpoint.report(group)" in found.knobs[0].fix


def test_copies_at_the_same_time_count_once_and_unknown_sizes_not_at_all() -> None:
    """Two streams copy for 40 µs together: that is 40 µs of communication."""
    found = effect((GEMM, to_peer(0, 40), to_peer(0, 40, stream=31)), BY_COPIES)
    assert (found.per_rank[0].copies, found.per_rank[0].copies_us) == (2, 40.0)
    # one copy of unknown size makes the sum unknown
    assert effect((to_peer(0, 1), to_peer(2, 3, bytes=-1)), BY_COPIES).per_rank[0].copied_bytes is None


def test_own_copies_are_those_on_the_streams_of_the_copies() -> None:
    """What the program copies on its own streams is not ours."""
    found = effect((*BY_COPIES, within(120, 130, stream=30), within(120, 150, stream=7)), BY_COPIES)
    first = found.per_rank[0]
    assert (first.own_copies, first.own_copied_bytes, first.own_copies_us) == (1, 500, 10.0)


def test_copies_that_nccl_described_are_its_calls() -> None:
    """NCCL has copy engines, too (zero-CTA policy): c10d's metadata tells them apart."""
    info = CollectiveInfo(op="all_gather", group="0", seq=1, in_nelems=8, out_nelems=16, dtype="Float")
    found = effect((GEMM, to_peer(0, 40, info=info)), (GEMM, to_peer(0, 40, info=info)))
    assert not found.took_effect
    assert found.per_rank[0].calls == (CommCalls(by="nccl", operation="all_gather", calls=1, us=40.0),)


def test_kernels_of_other_libraries_are_told_from_nccl() -> None:
    """An all-reduce of vLLM is neither NCCL's nor by copy engines."""
    found = effect((GEMM, op("vllm::cross_device_reduce_1stage", 0, 9, kind=Kind.COMM)), BY_NCCL)
    assert found.per_rank[0].calls == (CommCalls(by="other", operation="all_reduce", calls=1, us=9.0),)
    assert "4 calls by NCCL and other kernels" in found.verdict


def test_who_only_receives_or_has_no_trace_is_named() -> None:
    """The sender's engine pushes: a receiver neither copies nor runs a kernel. A note says so."""
    found = effect(BY_COPIES, (GEMM,))
    assert (found.took_effect, found.knobs[0].on_ranks) == (True, (0,))
    assert found.notes == ("rank 1: neither copies nor calls; who only receives, makes none",)
    found = effect(BY_COPIES, BY_COPIES, world_size=4)
    assert (found.took_effect, found.missing_ranks) == (True, (2, 3))
    assert found.notes == ("no trace of ranks 2-3 (of 4 ranks): nothing is said of them",)


def test_no_communication_at_all_is_no_effect() -> None:
    """One rank alone, or steps in which nothing is exchanged, prove nothing."""
    found = effect((GEMM,))
    assert (found.took_effect, found.verdict) == (False, "nothing is proved: these traces hold no communication")
    assert "two or more" in found.knobs[0].fix


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (rank(*BY_NCCL, device=Device(name="cpu")), "a trace without a GPU"),
        (rank(*BY_NCCL, device=Device(recorded=False)), "holds nothing of what its GPU did"),
        (rank(), "holds nothing of what its GPU did"),
        (rank(GEMM, replace(GEMM, stream=1 << DEVICE_BITS | 7), to_peer(0, 40)),
         "one process that computes on GPUs 0, 1"),
    ],
    ids=["cpu", "not recorded", "nothing on the GPU", "two GPUs"],
)  # fmt: skip
def test_a_trace_that_cannot_show_copies_is_refused(seen: Rank, said: str) -> None:
    """It proves neither that it took effect nor that it did not."""
    with pytest.raises(BadTrace, match=said) as refused:
        find_effect([digested(seen)])
    assert refused.value.path == "rank0.json"


def test_the_sum_kernel_is_called_so() -> None:
    """A trace names it by its function, which cannot be imported without Triton."""
    source = Path(counterpoint.__file__).parent / "collectives" / "cuda" / "sum_kernel.py"
    kernels = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert SUM_KERNEL in [kernel.name for kernel in kernels if kernel.decorator_list]


def test_the_verdict_is_printed_first_then_calls_and_those_that_copied_least() -> None:
    """Then what to do, in one line each; tables fit 80 columns."""
    lines = printed(effect(BY_COPIES, BY_NCCL)).splitlines()
    assert (lines[0][:30], lines[1][:6]) == ("✗ had no effect on rank 1: no ", "→ name")
    assert max(map(len, lines[2:])) <= 80
    # one line for an operation, however many ranks there are
    longer = (GEMM, comm("all_gather", 0, 5000))
    assert "NCCL all_gather     2 5.05            1 5.00" in printed(effect((comm("all_gather", 0, 50),), longer))
    # the last has NCCL's calls beside its copies
    ranks = [BY_COPIES] * MAX_RANKS + [(*BY_COPIES, comm("all_reduce", 200, 280))]
    rows = [line for line in printed(effect(*ranks)).splitlines() if "2.0 KiB" in line]
    assert (len(rows), rows[-1].split()[0]) == (MAX_RANKS, str(MAX_RANKS))
