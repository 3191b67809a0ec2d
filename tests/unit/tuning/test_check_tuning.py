"""Whether a trace proves that the choices of a tuning took effect: each knob on, each a no-op, each not to be seen."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from counterpoint.errors import BadTrace, Misconfigured
from counterpoint.records.doctor import Effect, KnobEffect
from counterpoint.records.tuning import LEAVE, Tried, TunedPair
from counterpoint.rendering.effect_terminal import render_effect
from counterpoint.trace.timeline import CollectiveInfo, Device, HostKind, Kind
from counterpoint.tuned.choices import KNOBS
from counterpoint.tuning.check import find_effect
from tests.support.example_tuned import HOSTILE, example_tuned, tuned_pair
from tests.support.job_builder import COMM_STREAM, COMPUTE_STREAM, Host, Op, comm, digested, host, op, rank

PER_RANK = 2 << 20  # bytes of the calls of `comm` and `copied`, of two ranks
PEER = "Memcpy PtoP (Device -> Device)"


def gemm(start: float, end: float, blocks: int = 132, name: str = "nvjet_sm90_tst_128x256") -> Op:
    return op(name, start, end, grid=(blocks, 1, 1))


def copied(start: float, end: float, *, size: int = PER_RANK, **more: Any) -> Op:
    """A copy to the peer by counterpoint; with `info`, by NCCL."""
    return op(PEER, start, end, **{"kind": Kind.COMM, "stream": 30, "bytes": size, **more})


def by_nccl_copies(operation: str) -> CollectiveInfo:
    """What c10d states of a call that NCCL makes by copy engines."""
    return CollectiveInfo(op=operation, group="0", seq=1, in_nelems=1 << 20, out_nelems=1 << 20, dtype="Float")


def chosen(mechanism: str, **more: Any) -> TunedPair:
    return tuned_pair(mechanism, **{"bytes_per_rank": PER_RANK} | more)


def effect(pairs: tuple[TunedPair, ...], *ranks: tuple[Op | Host, ...], **more: Any) -> Effect:
    both = ranks * 2 if len(ranks) == 1 else ranks
    tuned = replace(example_tuned(), pair=pairs)
    return find_effect([digested(rank(*ops, **more), at, len(both)) for at, ops in enumerate(both)], tuned)


def knobs(pair: TunedPair, *ops: Op) -> dict[str, str]:
    """The state of each knob of one pair."""
    return {each.knob: each.state for each in effect((pair,), ops).knobs}


def the(found: Effect, knob: str) -> KnobEffect:
    return next(each for each in found.knobs if each.knob == knob)


def test_copies_without_a_call_of_nccl_prove_zero_sm_and_its_calls_refute_it() -> None:
    """Two copies of the size of one call each are two calls."""
    found = effect((chosen("zero_sm"),), (gemm(0, 100), copied(0, 40), copied(100, 140)))
    assert (found.took_effect, found.verdict) == (True, "1 of 1 choices took effect")
    assert the(found, "zero_sm").seen == "2 calls by copy engines, none by NCCL"
    # the knob was a no-op: the calls are counted, and what to do is said
    found = effect((chosen("zero_sm"),), (gemm(0, 100), comm("all_gather", 0, 70)))
    assert (found.took_effect, found.verdict) == (False, "1 of 1 choices had no effect")
    assert the(found, "zero_sm").seen == "1 call by NCCL of 24 CTAs"
    assert "COUNTERPOINT_TUNED" in the(found, "zero_sm").fix


def test_one_rank_without_effect_is_one_too_many() -> None:
    found = effect((chosen("zero_sm"),), (copied(0, 40),), (comm("all_gather", 0, 40),))
    assert (the(found, "zero_sm").state, the(found, "zero_sm").on_ranks) == ("no_effect", (1,))


def test_an_all_reduce_sends_twice_the_bytes() -> None:
    pair = chosen("zero_sm", operation="all_reduce")
    assert the(effect((pair,), (copied(0, 9, size=2 * PER_RANK),)), "zero_sm").seen.startswith("1 call by copy engines")


GATHER, COPIES = comm("all_gather", 0, 70), copied(0, 90)
SYMMETRIC = dataclasses.replace(GATHER, name="ncclSymkDevKernel_AllGather_LL")
GATHER_MATMUL, MATMUL_SCATTER, EXCHANGE = (
    {"operation": operation, "stock": "torch"}
    for operation in ("all_gather_matmul", "matmul_reduce_scatter", "exchange")
)
PROVED, REFUTED, UNSEEN = "took_effect", "no_effect", "not_seen"


@pytest.mark.parametrize(
    ("mechanism", "more", "ran", "state"),
    [
        # another operation, or ten times the size, is not the all_gather that was chosen
        ("zero_sm", {}, (comm("reduce_scatter", 0, 70),), UNSEEN),
        ("zero_sm", {"bytes_per_rank": 10 * PER_RANK}, (GATHER,), UNSEEN),
        # several parameters go in one call, and large ones in several copies
        ("zero_sm", {}, (copied(0, 9, size=PER_RANK - 99_000), copied(50, 59)), PROVED),
        ("zero_sm", {}, (copied(0, 9, size=PER_RANK * 3),), PROVED),
        ("zero_sm", {}, (copied(0, 9, size=99),), UNSEEN),
        # what is left is made by NCCL
        (LEAVE, {}, (GATHER,), PROVED),
        (LEAVE, {}, (COPIES,), REFUTED),
        (LEAVE, {}, (gemm(0, 10),), UNSEEN),
        ("nccl+max_ctas=8", {}, (comm("all_gather", 0, 70, ctas=8),), PROVED),
        ("nccl+max_ctas=8", {}, (comm("all_gather", 0, 70, ctas=4),), PROVED),
        ("nccl+max_ctas=8", {}, (comm("all_gather", 0, 70, ctas=24),), REFUTED),
        # NCCL rounds the CTAs of an all_to_all up
        ("nccl+max_ctas=12", {"operation": "all_to_all"}, (comm("all_to_all", 0, 70, ctas=16),), PROVED),
        ("nccl+min_ctas=16", {}, (comm("all_gather", 0, 70, ctas=8),), REFUTED),
        ("nccl+min_ctas=16", {}, (comm("all_gather", 0, 70, ctas=24),), PROVED),
        # a kernel means that NCCL fell back, as it does without windows
        ("nccl_zero_cta", {}, (copied(0, 40, info=by_nccl_copies("all_gather")),), PROVED),
        ("nccl_zero_cta", {}, (GATHER,), REFUTED),
        ("nccl+windows", {}, (SYMMETRIC,), PROVED),
        ("nccl+windows", {}, (GATHER,), REFUTED),
        # persistent GEMMs beside the calls keep to the limit; grids of more blocks than there are SMs know none
        ("zero_sm+gemm_sms=124", {}, (COPIES, gemm(0, 10, 124)), PROVED),
        ("zero_sm+gemm_sms=124", {}, (COPIES, gemm(0, 10, 132)), REFUTED),
        ("zero_sm+gemm_sms=124", {}, (COPIES, gemm(0, 10, 124), gemm(10, 20, 132)), REFUTED),
        ("zero_sm+gemm_sms=124", {}, (COPIES, gemm(0, 10, 124), gemm(10, 20, 4096)), PROVED),
        ("zero_sm+gemm_sms=124", {}, (COPIES, gemm(0, 10, 4096)), REFUTED),
        # nothing runs beside the one, and the other is no GEMM
        ("zero_sm+gemm_sms=124", {}, (gemm(200, 300), gemm(0, 50, name="flash_fprop_wgmma"), COPIES), UNSEEN),
        ("serial", GATHER_MATMUL, (copied(0, 40), gemm(0, 90)), PROVED),
        ("serial", GATHER_MATMUL, (comm("all_gather", 0, 40), gemm(40, 90)), REFUTED),
        ("cuts", GATHER_MATMUL, (copied(0, 40), gemm(0, 90)), PROVED),
        ("cuts", GATHER_MATMUL, (comm("all_gather", 0, 40), gemm(40, 90)), REFUTED),
        ("cuts", MATMUL_SCATTER, (copied(0, 40), gemm(0, 90)), PROVED),
        ("slabs", EXCHANGE, (comm("all_to_all", 0, 40),), REFUTED),
        ("slabs", EXCHANGE, (copied(0, 40),), PROVED),
    ],
)  # fmt: skip
def test_the_last_knob_of_a_pair(mechanism: str, more: dict[str, Any], ran: tuple[Op, ...], state: str) -> None:
    *others, last = knobs(chosen(mechanism, **more), *ran).items()
    assert [knob for knob, _ in (*others, last)] == mechanism.split("+")
    assert [each for _, each in others] == [PROVED] * len(others)
    assert last[1] == state


def layer(number: int) -> tuple[Op | Host, ...]:
    """A gather of NCCL for a layer, which a range around its launch names."""
    gather = comm("all_gather", 100, 140, launch=90)
    return gather, host(f"FSDP::all_gather (layers.{number})", 88, 98, HostKind.ANNOTATION)


OF_LAYERS = chosen(LEAVE, where=("layers.0",)), chosen("zero_sm", where=("layers.1",))
ALIKE = chosen("zero_sm"), chosen("zero_sm", compute="gemm 128x64x64")
NEARER = chosen("cuts", operation="all_gather_matmul", stock="torch", bytes_per_rank=PER_RANK * 3 // 2)


@pytest.mark.parametrize(
    ("pairs", "ran", "states"),
    [
        # the nearest pair counts, up to a factor of two, as programs choose
        ((chosen(LEAVE, bytes_per_rank=PER_RANK // 2 + 1), chosen("zero_sm", bytes_per_rank=PER_RANK + 9)), (GATHER,),
         [UNSEEN, REFUTED]),
        # an all_gather was copied; that the reduce_scatter was, nothing shows
        ((chosen("zero_sm"), chosen("zero_sm", operation="reduce_scatter", bytes_per_rank=8 * PER_RANK)), (COPIES,),
         [PROVED, UNSEEN]),
        # the reduce_scatter has the same size, and was to be copied
        ((chosen(LEAVE), chosen("zero_sm", operation="reduce_scatter")), (COPIES,), [UNSEEN, PROVED]),
        # two layers have gathers of one size, of which one was to be copied; without a module none is accused
        (OF_LAYERS, layer(0), [PROVED, UNSEEN]),
        (OF_LAYERS, layer(1), [UNSEEN, REFUTED]),
        (OF_LAYERS, (GATHER,), [UNSEEN, UNSEEN]),
        # pairs alike with one choice have their calls in common: which call is beside which matmul, nothing says
        (ALIKE, (GATHER,), [REFUTED, REFUTED]),
        (ALIKE, (COPIES,), [PROVED, PROVED]),
        # FSDP's gathers, which are left, do not refute the cuts of tensor parallelism
        ((chosen(LEAVE), NEARER), (GATHER, copied(80, 90, size=NEARER.bytes_per_rank)), [PROVED, PROVED]),
    ],
)  # fmt: skip
def test_the_calls_of_two_pairs(pairs: tuple[TunedPair, ...], ran: tuple[Op | Host, ...], states: list[str]) -> None:
    assert [each.state for each in effect(pairs, ran).knobs] == states


def test_one_call_beyond_the_limit_is_no_effect() -> None:
    """The other group was made without it."""
    ran = comm("all_gather", 0, 70, ctas=8), comm("all_gather", 100, 170, ctas=24)
    assert the(effect((chosen("nccl+max_ctas=8"),), ran), "max_ctas=8").seen == "kernels of 8, 24 CTAs"


def test_a_pair_that_another_of_its_size_overrules_is_not_seen() -> None:
    """Beside another matmul less is saved than the first one loses: programs follow one choice for both."""
    tried = Tried(mechanism="zero_sm", us=500.0, sigma_us=1.0, runs=5)
    first, second = chosen(LEAVE, us=100.0, tried=(tried,)), chosen("zero_sm", compute="gemm 128x64x64")
    found = effect((first, second), (comm("all_gather", 0, 70),))
    assert [each.state for each in found.knobs] == ["took_effect", "not_seen"]
    assert the(found, "zero_sm").seen == "calls like these follow leave, by another pair"


@pytest.mark.parametrize("key", KNOBS)
def test_no_knob_is_called_proved_by_a_trace_without_calls(key: str) -> None:
    """It is not seen, with what to do: also those of which a trace never holds anything."""
    words = {"": "", "high|default|low|NUMBER": "=high", "default|efficiency|zero": "=zero"}
    value = (words | {"comm_resident": "=comm_resident"}).get(KNOBS[key], "=8")
    found = the(effect((chosen(f"nccl+{key}{value}"),), (gemm(0, 100),)), f"{key}{value}")
    assert (found.state, bool(found.fix)) == ("not_seen", True)


@pytest.mark.parametrize("knob", ["priority=high", "cga_cluster=2", "green=100"])
def test_what_a_trace_does_not_hold_is_not_seen(knob: str) -> None:
    """What would prove it is said; the rest of the choice is proved all the same."""
    found = effect((chosen(f"nccl+{knob}"),), (comm("all_gather", 0, 70),))
    assert the(found, knob).state == "not_seen"
    assert the(found, knob).fix.endswith(f"counterpoint measure quick --mechanism nccl+{knob} proves it on a machine")
    assert (found.took_effect, found.verdict) == (True, "1 of 2 choices took effect, 1 not seen")


def by_nsight(pair: TunedPair, *, clusters: int = 4, comm_priority: int = 0, compute_priority: int = 0) -> Effect:
    """What is said of a trace that holds clusters and priorities."""
    read = digested(rank(gemm(0, 100), comm("all_gather", 0, 70)), 0, 2)
    gpu = dataclasses.replace(read.gpu, cluster=np.full(len(read.gpu), clusters, np.int32))
    priorities = {COMPUTE_STREAM: compute_priority, COMM_STREAM: comm_priority}
    tuned = replace(example_tuned(), pair=(pair,))
    return find_effect([dataclasses.replace(read, gpu=gpu, priorities=priorities)], tuned)


@pytest.mark.parametrize(
    ("asked", "clusters", "state"),
    [(2, 2, "took_effect"), (2, 4, "no_effect"), (2, 0, "no_effect"), (0, 0, "took_effect"), (0, 4, "no_effect")],
)
def test_clusters_are_those_that_were_asked_for(asked: int, clusters: int, state: str) -> None:
    """Nsight's exports hold them; 0 asks for none."""
    found = by_nsight(chosen(f"nccl+cga_cluster={asked}"), clusters=clusters)
    assert the(found, f"cga_cluster={asked}").state == state


@pytest.mark.parametrize(
    ("level", "comm_priority", "compute_priority", "state"),
    [("high", -5, 0, "took_effect"), ("high", 0, 0, "no_effect"), ("high", -5, -5, "no_effect"),
     ("low", 0, -5, "took_effect"), ("low", 0, 0, "no_effect"), ("default", 0, 0, "took_effect"),
     ("-3", -3, 0, "took_effect"), ("-3", 0, 0, "no_effect")],
)  # fmt: skip
def test_priorities_are_those_of_the_streams(level: str, comm_priority: int, compute_priority: int, state: str) -> None:
    """The lower number goes first."""
    pair = chosen(f"nccl+priority={level}")
    found = by_nsight(pair, comm_priority=comm_priority, compute_priority=compute_priority)
    assert the(found, f"priority={level}").state == state


def test_nothing_seen_is_nothing_proved() -> None:
    found = effect((chosen("zero_sm"),), (gemm(0, 100),))
    assert (found.took_effect, found.verdict) == (False, "nothing is proved: these traces show none of the choices")


def test_a_file_without_pairs_proves_nothing() -> None:
    assert effect((), (copied(0, 40),)).verdict == "nothing to prove: the file has no pair"


def test_a_file_of_another_gpu_is_not_followed() -> None:
    """As programs do not follow it: nothing is proved, and a note says why."""
    found = effect((chosen("zero_sm"),), (copied(0, 40),), device=Device(name="NVIDIA B200"))
    assert (found.took_effect, the(found, "zero_sm").seen) == (False, "not followed on this machine")
    assert "the file was made with gpu NVIDIA H200, here is NVIDIA B200: all choices ignored" in found.notes


def test_a_trace_without_a_gpu_is_refused() -> None:
    with pytest.raises(BadTrace, match="a trace without a GPU"):
        effect((chosen("zero_sm"),), (comm("all_gather", 0, 9),), device=Device(name="cpu"))


@pytest.mark.parametrize("mechanism", ["nccl+max_ctas=x", "zero_sm+gemm_sms="])
def test_a_knob_without_its_number_is_refused(mechanism: str) -> None:
    with pytest.raises(Misconfigured, match="allowed knobs are"):
        effect((chosen(mechanism),), (comm("all_gather", 0, 9),))


def test_the_terminal_shows_each_choice_and_what_to_do() -> None:
    """Every choice is a line with its mark; names of the file are never markup or control characters."""
    pairs = chosen("zero_sm", compute=f"[red]{HOSTILE}"), chosen("nccl+priority=high", operation="all_reduce")
    console = Console(file=io.StringIO(), width=200)
    render_effect(effect(pairs, (comm("all_gather", 0, 70), comm("all_reduce", 90, 99))), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith("✗ 1 of 3 choices had no effect, 1 not seen")
    assert [line[0] for line in text.splitlines() if line[:1] in "✗✓?" and line][1:] == ["✗", "✓", "?"]
    assert ("[red]x'" in text, "\x1b" in text) == (True, False)
    assert "→ pair 1: name the file on every rank" in text
    assert ", on rank" not in text  # all ranks show it
