"""What ranks send each other, and what of it compute hides."""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.machine.profile import default_profile
from counterpoint.pair.together import disturbance
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import job_toml, parse_job
from counterpoint.plan.job.model import Experts, Model
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.estimate import CollectiveTimes, MeshTimes
from counterpoint.plan.network.network import all_levels, network_of
from counterpoint.plan.step.data_parallel import overlapped_in_pieces_us
from counterpoint.plan.step.exchanges import Exchange, layer_exchanges, stage_exchanges

H200 = default_profile()
NAMES = (*H200.mechanisms, "ideal", "serial")
LLAMA = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=128256)
ARRAY = 2 * 8192 * 4096 * 2  # two samples of 8192 tokens in bf16


def exchanges(experts: Experts | None = None, **kwargs: Any) -> tuple[Exchange, ...]:
    return layer_exchanges(LLAMA, Parallel(**kwargs), Training(sequence=8192, global_batch=64, micro_batch=2), experts)


def volume(found: tuple[Exchange, ...], ranks: int) -> float:
    """Bytes that a ring sends, per rank."""
    factor = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return sum(factor[each.operation] * each.count * each.num_bytes * (ranks - 1) / ranks for each in found)


def test_two_all_reduces_each_way_and_none_for_one_rank() -> None:
    assert exchanges() == ()
    # Megatron's volume: 2 arrays forward, 2 backward, beside the weight gradients if asked
    found = exchanges(tp=8, sequence=False, overlap_tp=False)
    assert [(each.count, each.num_bytes, each.backward, each.during_dw) for each in found] == [
        (2, ARRAY, False, False), (2, ARRAY, True, False),
    ]  # fmt: skip


def test_sequence_parallelism_sends_as_much_forward() -> None:
    """all_gather and reduce_scatter are the two halves of all_reduce; backward gathers inputs once more."""
    both = [exchanges(tp=8, sequence=sequence) for sequence in (False, True)]
    volumes = [
        [volume(tuple(each for each in found if each.backward == backward), 8) for found in both]
        for backward in (False, True)
    ]
    assert (volumes[0][0], volumes[1][1] / volumes[1][0]) == (volumes[0][1], 1.5)


def test_pieces_send_as_much() -> None:
    """The same arrays, each beside the product that it belongs to; products of experts are not cut."""
    plain, pieces = exchanges(tp=8), exchanges(tp=8, pieces_tp=True)
    assert volume(pieces, 8) == volume(plain, 8)
    assert [each.product for each in pieces if each.product] == [
        (768, 4096), (4096, 512), (512, 4096), (3584, 4096), (4096, 1792), (1792, 4096),
    ]  # fmt: skip
    experts = Experts(count=8, per_token=2, width=14336)
    assert len([each for each in exchanges(experts, tp=8, pieces_tp=True) if each.product]) == 3


def test_context_parallelism_gathers_keys_and_values() -> None:
    """8 of 32 heads, keys and values: half of the activations' bytes, of the whole sequence."""
    gathered = exchanges(cp=4)[0]
    assert (gathered.operation, gathered.num_bytes) == ("all_gather", ARRAY * 8 * 2 / 32)


def test_tokens_and_gathered_tokens_go_to_their_experts_and_back() -> None:
    """Each way twice, as many bytes as tokens visit experts, more where one rank is busier."""
    experts = Experts(count=8, per_token=2, width=14336, imbalance=1.25)
    found = exchanges(experts, dp=8, ep=8)
    assert [(each.operation, each.count, each.num_bytes) for each in found] == [("all_to_all", 2, ARRAY * 2 * 1.25)] * 2
    # all ranks' tokens, their choices with weights, and sums back; the router's balance is of no matter
    for imbalance in (1.0, 3.0):
        experts = Experts(count=8, per_token=2, width=14336, imbalance=imbalance)
        found = exchanges(experts, dp=8, ep=8, expert_exchange="gather")
        choices = 8 * 2 * 8192 * 2
        assert [(each.operation, each.num_bytes, each.backward) for each in found] == [
            ("all_gather", choices * 8, False), ("all_gather", 8 * ARRAY, False), ("reduce_scatter", 8 * ARRAY, False),
            ("all_gather", 8 * ARRAY, True), ("reduce_scatter", choices * 4, True), ("reduce_scatter", 8 * ARRAY, True),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "imbalance", "expected"),
    [("all_to_all", 1.5, (2, 3 * ARRAY)), ("slabs", 1.0, (2, 2.5 * ARRAY)), ("slabs", 1.5, (4, 2.5 * ARRAY))],
)
def test_slabs_go_in_rounds(how: Any, imbalance: float, expected: tuple[int, float]) -> None:
    """An all_to_all is exact; a slab of 1.25 times the mean is sent whole, twice where the busiest rank has more."""
    found = exchanges(Experts(count=8, per_token=2, width=14336, imbalance=imbalance), dp=8, ep=8, expert_exchange=how)
    assert [(each.operation, each.count, each.num_bytes) for each in found] == [("all_to_all", *expected)] * 2


@pytest.mark.parametrize("how", ["all_to_all", "gather", "slabs"])
def test_halves_send_as_much_in_twice_as_many_parts(how: Any) -> None:
    """Both directions, and what recomputation of the experts repeats."""
    experts = Experts(count=8, per_token=2, width=14336)
    whole, halves = (exchanges(experts, dp=8, ep=8, expert_exchange=how, overlap_ep=both) for both in (False, True))
    assert [(2 * each.count, 2 * each.ffn, each.num_bytes) for each in whole] == [
        (each.count, each.ffn, 2 * each.num_bytes) for each in halves
    ]
    assert {each.beside for each in whole} == {""}
    assert {each.beside for each in halves} == {"experts"}


@pytest.mark.parametrize(
    ("nodes", "most", "per_token"), [(1, None, 8), (4, None, 8), (4, 1, 8), (8, 4, 8), (4, None, 1)]
)
def test_a_token_goes_once_to_each_node(nodes: int, most: int | None, per_token: int) -> None:
    """Over the NIC for each node with an expert of it, over NVLink for each rank with one; the slower one counts."""
    experts = Experts(count=256, per_token=per_token, width=1024)
    parallel = Parallel(dp=8 * nodes, ep=8 * nodes, expert_exchange="by_node", expert_nodes=most)
    gpu, levels = find_gpu("H100"), all_levels("h100-ndr-400")
    times = MeshTimes(CollectiveTimes(network_of(Cluster(gpu=gpu, levels=levels))), parallel)
    sent, _ = layer_exchanges(LLAMA, parallel, Training(sequence=8192, global_batch=128, micro_batch=2), experts)
    reached = min(nodes, most or nodes)
    # of 10^4 tokens whose experts are drawn: the nodes and ranks of each
    ranks = np.random.default_rng(1).integers(0, 8 * reached, size=(10_000, per_token))
    on_ranks, on_nodes = (np.mean([len({*row}) for row in drawn]) for drawn in (ranks, ranks // 8))
    near = times.between(8, 1, "all_to_all", round(ARRAY * on_ranks))
    far = times.find("ep", "all_to_all", round(ARRAY * on_nodes)).us if nodes > 1 else 0.0
    assert sent.us(times) / sent.count == pytest.approx(max(near, far), rel=0.02)
    every = msgspec.structs.replace(sent, per_token=0)
    assert sent.us(times) <= every.us(times) * 1.0001


def test_software_says_how_tokens_go_where_the_job_does_not() -> None:
    tables: dict[str, Any] = {
        "model": {"name": "deepseek-v3"}, "training": {"sequence": 4096, "global_batch": 64},
        "parallel": {"dp": 64, "ep": 64}, "cluster": {"gpu": "H100", "network": "h100-ndr-400"},
    }  # fmt: skip
    named = {name: parse_job({**tables, "software": {"name": name}}) for name in ("DeepSeek", "AutoModel", "Megatron")}
    ways = {name: job.parallel.expert_exchange for name, job in named.items()}
    assert ways == {"DeepSeek": "by_node", "AutoModel": "by_node", "Megatron": "all_to_all"}
    given = {**tables["parallel"], "expert_exchange": "all_to_all"}
    said = parse_job({**tables, "software": {"name": "DeepSeek"}, "parallel": given})
    assert said.parallel.expert_exchange == "all_to_all"
    assert parse_job(tomllib.loads(job_toml(said))) == said


@pytest.mark.parametrize(("sequence", "operations"), [(True, ["send_recv"]), (False, ["send_recv", "all_gather"])])
def test_stages_send_a_part_per_rank(sequence: bool, operations: list[str]) -> None:
    """1/tp each; without sequence parallelism the receivers gather it."""
    found = stage_exchanges(
        LLAMA, Parallel(tp=8, pp=4, sequence=sequence), Training(sequence=8192, global_batch=64, micro_batch=2)
    )
    assert ([each.operation for each in found], found[0].num_bytes) == (operations, ARRAY / 8)


def test_one_bucket_is_not_hidden() -> None:
    """It is ready when compute is done."""
    assert (
        overlapped_in_pieces_us(100.0, [("all_reduce", 40.0)], 1, disturbance("ideal", H200), persistent=False) == 140.0
    )


@pytest.mark.parametrize(("comm", "expected"), [(40.0, 104.0), (200.0, 210.0)])
def test_many_buckets_form_a_pipeline(comm: float, expected: float) -> None:
    """Ten pieces, undisturbed: the longer side, and one piece of the shorter."""
    found = overlapped_in_pieces_us(100.0, [("all_reduce", comm)], 10, disturbance("ideal", H200), persistent=False)
    assert found == pytest.approx(expected)


@given(compute=st.floats(0, 1e5), comm=st.floats(0, 1e5), pieces=st.integers(1, 100),
       name=st.sampled_from(NAMES))  # fmt: skip
def test_pieces_stay_between_ideal_and_serial(compute: float, comm: float, pieces: int, name: str) -> None:
    """max <= T <= sum, however many pieces."""
    found = overlapped_in_pieces_us(compute, [("all_reduce", comm)], pieces, disturbance(name, H200), persistent=True)
    assert max(compute, comm) * (1 - 1e-9) <= found <= (compute + comm) * (1 + 1e-9)


@pytest.mark.parametrize("experts", [None, Experts(count=8, per_token=2, width=14336)])
def test_products_in_fp8_gather_one_byte(experts: Experts | None) -> None:
    """Where a router does not read what is gathered; sums stay in bf16."""
    tp = Parallel(tp=8, dp=8)
    bf16, fp8 = (
        layer_exchanges(LLAMA, tp, Training(sequence=8192, global_batch=64, precision=precision), experts)
        for precision in ("bf16", "fp8")
    )
    parts = [small.num_bytes / whole.num_bytes for small, whole in zip(fp8, bf16, strict=True)]
    gathers = [each.operation == "all_gather" for each in bf16]
    assert parts == [0.5 if gathered and experts is None else 1.0 for gathered in gathers]


def test_whole_experts_need_nothing_of_tp() -> None:
    """Only attention's block gathers and scatters; with shared experts, which tp cuts, both do."""
    plain = Experts(count=8, per_token=2, width=14336)
    shared = Experts(count=8, per_token=2, width=14336, shared=1)
    counts = [
        sum(each.count for each in exchanges(experts, tp=4, dp=8, ep=8, **how) if each.axis == "tp")
        for experts, how in ((plain, {}), (plain, {"expert_tp": 1}), (shared, {"expert_tp": 1}))
    ]
    assert counts == [10, 5, 10]
