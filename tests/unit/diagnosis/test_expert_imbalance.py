"""Waiting for the rank whose experts have most to do is told with figures, and balanced experts are not accused."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from counterpoint.records.diagnosis import Diagnosis, Finding
from counterpoint.trace.timeline import CollectiveInfo, Kind
from tests.support.job_builder import COMM_STREAM, Op, Rank, diagnosed, op, rank

TOKENS = 1 << 20  # that each rank has, in elements
LAYERS = 6
DISPATCH = "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)"
COMBINE = "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


PEER_COPY = "Memcpy PtoP (Device -> Device)"
STYLES = pytest.mark.parametrize("style", ["by-size", "by-name", "gathered", "copied"])


def exchange(name: str, start: float, end: float, **info: Any) -> Op:
    """Record one collective; without `info` it states nothing, as DeepEP's."""
    more = {}
    if info:
        more["info"] = CollectiveInfo(group_ranks="[0, 1, 2, 3]", group_size=4, dtype="BFloat16", **info)
    return op(name, start, end, kind=Kind.COMM, stream=COMM_STREAM, **more)


def leg(style: str, start: float, end: float, load: float, *, back: bool) -> list[Op]:
    """Record the way to experts, or `back`, of a rank that is ready at `start`."""
    if style == "by-name":
        return [exchange(COMBINE if back else DISPATCH, start, end)]
    if style == "by-size":
        here, there = int(TOKENS * load), TOKENS
        sizes = (here, there) if back else (there, here)
        return [exchange(NCCL, start, end, op="all_to_all", group="3", in_nelems=sizes[0], out_nelems=sizes[1])]
    if style == "copied":  # launched ahead; a rank's copies end before those of ranks that come later
        return [
            op(PEER_COPY, start + 12 * i, start + 12 * i + 10, kind=Kind.COMM, stream=COMM_STREAM, bytes=1 << 21,
               launch=start - 300)
            for i in range(3)
        ]  # fmt: skip
    sizes = (4 * TOKENS, TOKENS) if back else (TOKENS, 4 * TOKENS)
    name, operation = ("ReduceScatter", "reduce_scatter") if back else ("AllGather", "all_gather")
    return [
        exchange(f"ncclDevKernel_{name}_RING_LL", start, end, op=operation, group="5", group_desc="mesh_ep",
                 in_nelems=sizes[0], out_nelems=sizes[1])
    ]  # fmt: skip


def moe(
    loads: list[list[float]], *, style: str = "by-size", attention: tuple[float, ...] = (500.0,) * 4, slow: float = 1.0
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
            parts[r] += [
                op("flash_fwd_kernel", begin, arrive[r]),
                *leg(style, arrive[r], brought, load[r], back=False),
                op("cutlass_grouped_gemm", brought, ready[r]),
                *leg(style, ready[r], back, load[r], back=True),
            ]
            if style == "copied":  # copies end apart: by something else it has to show how clocks differ
                last = {"op": "all_reduce", "group": "0", "in_nelems": 1, "out_nelems": 1}
                parts[r].append(exchange("ncclDevKernel_AllReduce_Sum", back, back + 20, **last))
        begin = back
    return [rank(*part, steps=((-10.0, begin - 20),)) for part in parts]


def changed(ranks: list[Rank], change: Callable[[Op], Op]) -> list[Rank]:
    return [replace(r, ops=tuple(map(change, r.ops))) for r in ranks]


def imbalance(d: Diagnosis) -> list[Finding]:
    return [f for f in d.findings if f.kind == "expert_imbalance"]


HOT = [[0.7, 0.6, 0.6, 2.1]] * LAYERS
TURNS = [[2.2 if r == layer % 4 else 0.6 for r in range(4)] for layer in range(8)]
EVEN = [[1.0, 1.0, 1.0, 1.0]] * LAYERS


@STYLES
def test_the_rank_of_hot_experts_is_named_with_figures(style: str) -> None:
    """The others wait 560, 600 and 600 µs in each of six layers, 587 on average."""
    d = diagnosed(*moe(HOT, style=style))
    (found,) = imbalance(d)
    assert found.cost_us == pytest.approx(LAYERS * (560 + 600 + 600) / 3)
    assert "Equal shares of the same work would save 2.64 ms a step" in found.evidence
    assert found.rank == 3
    assert "rank 3's experts took 2.1 x the mean between dispatch and combine (5.04 against 2.40 ms a step)" in (
        found.evidence
    )
    assert ("they received 2.1 x the mean bytes" in found.evidence) is (style == "by-size")
    assert found.title.startswith("Expert imbalance, probably") is (style == "copied")
    assert not [f for f in d.findings if f.kind == "straggler"]
    assert [(s.rank, s.cause, s.detail) for s in d.stragglers] == [(3, "more_work", "experts")]
    assert "Main cause: expert imbalance" in d.verdict


def test_hot_experts_may_change_from_layer_to_layer() -> None:
    """No rank is late in all, but in each exchange one is."""
    d = diagnosed(*moe(TURNS))
    (found,) = imbalance(d)
    assert "the busiest rank of each exchange takes 2.2 x the mean" in found.evidence
    assert found.cost_us == pytest.approx(8 * 640)


@STYLES
@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"loads": EVEN}, id="balanced"),
        pytest.param({"loads": [[0.98, 1.01, 1.02, 0.99]] * LAYERS}, id="jitter"),
        pytest.param({"loads": EVEN, "attention": (300.0, 300.0, 300.0, 900.0)}, id="longer-sequences-on-one-rank"),
        pytest.param({"loads": EVEN, "slow": 1.8}, id="a-slow-gpu"),
    ],
)
def test_balanced_experts_are_not_accused(job: dict[str, object], style: str) -> None:
    """Whoever else is late, and why."""
    assert not imbalance(diagnosed(*moe(**job, style=style)))  # type: ignore[arg-type]


def test_a_slow_gpu_stays_one() -> None:
    """What is slow everywhere is slow with experts, too."""
    d = diagnosed(*moe(EVEN, slow=1.8, style="by-name"))
    assert [(s.rank, s.cause) for s in d.stragglers] == [(3, "slow_kernels")]
    assert [f.rank for f in d.findings if f.kind == "straggler"] == [3]


def test_jitter_elsewhere_makes_no_rank_slow() -> None:
    """Hot experts that take turns leave ranks equal in all: 1 % elsewhere is more than that, but no slow GPU."""
    (found,) = imbalance(diagnosed(*moe(TURNS, style="by-name", attention=(500.0, 500.0, 502.0, 505.0))))
    assert found.cost_us == pytest.approx(8 * 640, rel=0.01)


@pytest.mark.parametrize("rotating", [False, True])
def test_experts_of_equal_sizes_are_suspected_and_no_gpu_is_drained(rotating: bool) -> None:
    """Grouped GEMMs between all-to-alls of equal sizes take 3 x as long on one rank; everything else is equal."""
    loads = [[3.0 if r == (layer % 4 if rotating else 3) else 1.0 for r in range(4)] for layer in range(8)]
    equal: dict[str, Any] = {"op": "all_to_all", "group": "3", "in_nelems": TOKENS, "out_nelems": TOKENS}
    ranks = changed(
        moe(loads, style="by-name"), lambda o: exchange(NCCL, o.start, o.end, **equal) if "deep_ep" in o.name else o
    )
    d = diagnosed(*ranks)
    (found,) = imbalance(d)
    assert found.title.startswith("Expert imbalance, probably")
    assert found.cost_us == pytest.approx(8 * 800)
    assert "no sizes tell that they get more tokens" in found.evidence
    assert "drain" not in str([f.advice for f in d.findings])


def test_one_rank_alone_accuses_nobody() -> None:
    assert not imbalance(diagnosed(moe(HOT)[0], world_size=4))


def renamed(ranks: list[Rank], kernel: str = "cutlass_grouped_gemm", group: str | None = "mesh_ep") -> list[Rank]:
    """Return ranks with another name of the experts' kernel, and of the group."""

    def another(o: Op) -> Op:
        name = o.name.replace("cutlass_grouped_gemm", kernel)
        return replace(o, name=name, info=o.info and replace(o.info, group_desc=group))

    return changed(ranks, another)


@pytest.mark.parametrize(
    ("style", "names"),
    [
        # parameters of experts are gathered, and their gradients scattered, around the same kernels
        *(("gathered", {"group": name}) for name in ("mesh_dp_shard", "TENSOR_MODEL_PARALLEL_GROUP", "mesh_efsdp")),
        # whatever the group is named, gathered rows are also multiplied by matrices that all tokens share
        *((style, {"kernel": "nvjet_hsh_192x192"}) for style in ("gathered", "copied")),
        ("by-size", {"kernel": "split_embedding"}),  # rows of embedding tables are exchanged in the same way
    ],
)
def test_what_is_not_of_experts_accuses_nobody(style: str, names: dict[str, str]) -> None:
    assert not imbalance(diagnosed(*renamed(moe(HOT, style=style), **names)))


def test_without_a_name_gathered_tokens_are_suspected() -> None:
    """By their kernels alone."""
    (found,) = imbalance(diagnosed(*renamed(moe(HOT, style="gathered"), group=None)))
    assert found.title.startswith("Expert imbalance, probably")


def test_weights_gradients_go_home_before_experts_compute() -> None:
    """Backward, a small reduce_scatter lies between the gather and the experts; the one behind them is the way back."""
    small: dict[str, Any] = {
        "op": "reduce_scatter",
        "group": "5",
        "group_desc": "mesh_ep",
        "in_nelems": 4000,
        "out_nelems": 1000,
    }
    ranks = []
    for r in moe(HOT, style="gathered"):
        ends = [o.end for o in r.ops if "AllGather" in o.name]
        more = [exchange("ncclDevKernel_ReduceScatter_Sum", end + 1, end + 6, **small) for end in ends]
        ranks.append(replace(r, ops=(*r.ops, *more)))
    (found,) = imbalance(diagnosed(*ranks))
    assert found.rank == 3
    assert found.cost_us == pytest.approx(LAYERS * (560 + 600 + 600) / 3)


@STYLES
@pytest.mark.parametrize("seed", range(6))
def test_planted_loads_are_found_and_others_are_not(style: str, seed: int) -> None:
    """Whichever rank it is, in jobs of any attention and number of layers: its wait is known from what was planted."""
    draw = Random(seed)
    hot, layers = draw.randrange(4), draw.randint(3, 9)
    attention = tuple(draw.uniform(200.0, 210.0) for _ in range(4))
    jitter = [[draw.uniform(0.99, 1.01) for _ in range(4)] for _ in range(layers)]
    assert not imbalance(diagnosed(*moe(jitter, style=style, attention=attention)))
    loads = [[draw.uniform(1.6, 2.4) if r == hot else draw.uniform(0.5, 0.9) for r in range(4)] for _ in range(layers)]
    (found,) = imbalance(diagnosed(*moe(loads, style=style, attention=attention)))
    waited = sum(400.0 * (load[hot] - load[r]) for load in loads for r in range(4) if r != hot) / 3
    assert found.rank == hot
    assert found.cost_us == pytest.approx(waited, rel=0.01)


def test_copies_alone_do_not_make_clocks_drift() -> None:
    """Ends of copies are apart by what ranks wait for; here that looks like a clock which is 8 % too fast."""
    loads = [
        [2.0, 0.7, 0.7, 0.5], [1.9, 0.9, 0.8, 0.8], [2.3, 0.5, 0.8, 0.8], [2.3, 0.6, 0.7, 0.8], [1.7, 0.5, 0.5, 0.7],
        [1.9, 0.8, 0.7, 0.9], [2.1, 0.7, 0.6, 0.8], [1.9, 0.8, 0.7, 0.5], [1.8, 0.6, 0.6, 0.7],
    ]  # fmt: skip
    ranks = moe(loads, style="copied", attention=(200.0, 205.0, 210.0, 200.0))
    copies = [replace(r, ops=tuple(o for o in r.ops if o.info is None)) for r in ranks]
    assert [f.rank for f in imbalance(diagnosed(*copies))] == [0]
