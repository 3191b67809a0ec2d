"""Waiting for the rank whose experts have most to do is told with figures, and balanced experts are not accused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterpoint.diagnosis.api import diagnose_digests
from counterpoint.records.diagnosis import Diagnosis, Finding
from counterpoint.trace.timeline import CollectiveInfo, Kind
from tests.support.job_builder import COMM_STREAM, Op, Rank, digested, op, rank

TOKENS = 1 << 20  # that each rank has, in elements
LAYERS = 6
DISPATCH = "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)"
COMBINE = "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def exchange(name: str, start: float, end: float, elements: tuple[float, float] | None) -> Op:
    """Record one all-to-all; `elements`: sent and received, None: DeepEP's, which states nothing."""
    if elements is None:
        return op(name, start, end, kind=Kind.COMM, stream=COMM_STREAM)
    info = CollectiveInfo(
        op="all_to_all", group="3", group_ranks="[0, 1, 2, 3]", group_size=4, in_nelems=int(elements[0]),
        out_nelems=int(elements[1]), dtype="BFloat16",
    )  # fmt: skip
    return op(NCCL, start, end, kind=Kind.COMM, stream=COMM_STREAM, info=info)


def moe(
    loads: list[list[float]], *, deep_ep: bool = False, attention: tuple[float, ...] = (500.0,) * 4, slow: float = 1.0
) -> list[Rank]:
    """Record layers of attention, dispatch, experts and combine; `loads`: per layer each rank's share of the tokens.

    Experts take 400 µs for the mean load. Rank 3 is `slow` times as slow in everything.
    """
    parts: list[list[Op]] = [[] for _ in range(4)]
    begin = 0.0
    for load in loads:
        arrive = [begin + attention[r] * (slow if r == 3 else 1.0) for r in range(4)]
        brought = max(arrive) + 50.0
        ready = [brought + 400.0 * load[r] * (slow if r == 3 else 1.0) for r in range(4)]
        back = max(ready) + 50.0
        for r in range(4):
            there, returned = (TOKENS, TOKENS * load[r]), (TOKENS * load[r], TOKENS)
            parts[r] += [
                op("flash_fwd_kernel", begin, arrive[r]),
                exchange(DISPATCH, arrive[r], brought, None if deep_ep else there),
                op("cutlass_grouped_gemm", brought, ready[r]),
                exchange(COMBINE, ready[r], back, None if deep_ep else returned),
            ]
        begin = back
    return [rank(*part, steps=((-10.0, begin - 20),)) for part in parts]


def diagnosed(ranks: list[Rank]) -> Diagnosis:
    """Diagnose them."""
    return diagnose_digests([digested(r, n, len(ranks)) for n, r in enumerate(ranks)], ["x"] * len(ranks)).diagnosis


def imbalance(d: Diagnosis) -> list[Finding]:
    """Return the findings on experts."""
    return [f for f in d.findings if f.kind == "expert_imbalance"]


HOT = [[0.7, 0.6, 0.6, 2.1]] * LAYERS
EVEN = [[1.0, 1.0, 1.0, 1.0]] * LAYERS


@pytest.mark.parametrize("deep_ep", [False, True], ids=["by-size", "by-name"])
def test_the_rank_of_hot_experts_is_named_with_figures(deep_ep: bool) -> None:
    """The others wait 560, 600 and 600 µs in each of six layers, 587 on average."""
    d = diagnosed(moe(HOT, deep_ep=deep_ep))
    (found,) = imbalance(d)
    assert found.cost_us == pytest.approx(LAYERS * (560 + 600 + 600) / 3)
    assert "Equal shares of the same work would save 2.64 ms a step" in found.evidence
    assert found.rank == 3
    assert "rank 3's experts took 2.1 x the mean between dispatch and combine (5.04 against 2.40 ms a step)" in (
        found.evidence
    )
    assert ("they received 2.1 x the mean bytes" in found.evidence) is not deep_ep
    assert not [f for f in d.findings if f.kind == "straggler"]
    assert [(s.rank, s.cause, s.detail) for s in d.stragglers] == [(3, "more_work", "experts")]
    assert "Dearest cause: expert imbalance" in d.verdict


def test_hot_experts_may_change_from_layer_to_layer() -> None:
    """No rank is late in all, but in each exchange one is."""
    turns = [[2.2 if r == layer % 4 else 0.6 for r in range(4)] for layer in range(8)]
    d = diagnosed(moe(turns))
    (found,) = imbalance(d)
    assert "the busiest rank of each exchange takes 2.2 x the mean" in found.evidence
    assert found.cost_us == pytest.approx(8 * 640)


@pytest.mark.parametrize("deep_ep", [False, True], ids=["by-size", "by-name"])
@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"loads": EVEN}, id="balanced"),
        pytest.param({"loads": [[0.98, 1.01, 1.02, 0.99]] * LAYERS}, id="jitter"),
        pytest.param({"loads": EVEN, "attention": (300.0, 300.0, 300.0, 900.0)}, id="longer-sequences-on-one-rank"),
        pytest.param({"loads": EVEN, "slow": 1.8}, id="a-slow-gpu"),
    ],
)
def test_balanced_experts_are_not_accused(job: dict[str, object], deep_ep: bool) -> None:
    """Whoever else is late, and why."""
    assert not imbalance(diagnosed(moe(**job, deep_ep=deep_ep)))  # type: ignore[arg-type]


def test_a_slow_gpu_stays_one() -> None:
    """What is slow everywhere is slow with experts, too."""
    d = diagnosed(moe(EVEN, slow=1.8, deep_ep=True))
    assert [(s.rank, s.cause) for s in d.stragglers] == [(3, "slow_kernels")]
    assert [f.rank for f in d.findings if f.kind == "straggler"] == [3]


def test_jitter_elsewhere_makes_no_rank_slow() -> None:
    """Hot experts that take turns leave ranks equal in all: 1 % elsewhere is more than that, but no slow GPU."""
    turns = [[2.2 if r == layer % 4 else 0.6 for r in range(4)] for layer in range(8)]
    (found,) = imbalance(diagnosed(moe(turns, deep_ep=True, attention=(500.0, 500.0, 502.0, 505.0))))
    assert found.cost_us == pytest.approx(8 * 640, rel=0.01)


@pytest.mark.parametrize("rotating", [False, True])
def test_experts_of_equal_sizes_are_suspected_and_no_gpu_is_drained(rotating: bool) -> None:
    """Grouped GEMMs between all-to-alls of equal sizes take 3 x as long on one rank; everything else is equal."""
    loads = [[3.0 if r == (layer % 4 if rotating else 3) else 1.0 for r in range(4)] for layer in range(8)]
    ranks = [
        replace(
            r,
            ops=tuple(exchange(NCCL, o.start, o.end, (TOKENS, TOKENS)) if "deep_ep" in o.name else o for o in r.ops),
        )
        for r in moe(loads, deep_ep=True)
    ]
    d = diagnosed(ranks)
    (found,) = imbalance(d)
    assert found.title.startswith("Expert imbalance, probably")
    assert found.cost_us == pytest.approx(8 * 800)
    assert "no sizes tell that they get more tokens" in found.evidence
    assert "drain" not in str([f.advice for f in d.findings])


def test_embedding_tables_are_no_experts() -> None:
    """Their rows are exchanged in the same way."""
    ranks = moe(HOT)
    tables = [
        replace(r, ops=tuple(replace(o, name=o.name.replace("cutlass_grouped_gemm", "split_embedding")) for o in r.ops))
        for r in ranks
    ]
    assert not imbalance(diagnosed(tables))


def test_one_rank_alone_accuses_nobody() -> None:
    """What the others' experts took is not known."""
    ranks = moe(HOT)
    d = diagnose_digests([digested(ranks[0], 0, 4)], ["x"]).diagnosis
    assert not imbalance(d)
