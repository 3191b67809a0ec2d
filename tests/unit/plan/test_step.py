"""The step: its parts, its frame, and what must not happen whatever the job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile
from counterpoint.plan.compute.layers import LocalShape, layer_work
from counterpoint.plan.compute.operations import MatmulOp
from counterpoint.plan.compute.roofline import GROUPED, GpuRates, cost
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import Job, Ranks
from counterpoint.plan.job.model import Experts, Model, find_model
from counterpoint.plan.job.parallel import Compression, Parallel, Training
from counterpoint.plan.network.estimate import CollectiveTimes
from counterpoint.plan.network.network import levels, network_of
from counterpoint.plan.step.step import OPTIMIZER_BYTES, PredictedStep, predict_step

NAMES = (*default_profile().mechanisms, "ideal", "serial")
SMALL = Model(layers=16, hidden=2048, heads=16, kv_heads=8, ffn=8192, gated=True, vocab=32000)
EXPERTS = Experts(count=8, per_token=2, width=4096)
SPARSE = msgspec.structs.replace(SMALL, experts=EXPERTS)
WHOLE = 1 << 30  # one bucket
EVEN = Ranks(jitter=0.0)
degree = st.sampled_from([1, 2, 4])


def job(trained: Model = SMALL, gpus: int = 128, mechanism: str = "nccl", scale: float = 1.0, **kwargs: Any) -> Job:
    """On H100s whose links are `scale` times as fast; keywords go to Parallel or Training."""
    training = {key: kwargs.pop(key) for key in list(kwargs) if key in Training.__struct_fields__}
    layout = tuple(
        msgspec.structs.replace(level, gb_per_s=level.gb_per_s * scale) for level in levels("h100-ndr-400", gpus)
    )
    return Job(
        model=trained, parallel=Parallel(**kwargs), mechanism=mechanism,
        training=Training(**{"sequence": 2048, "global_batch": 256} | training),
        cluster=Cluster(gpu=find_gpu("H100"), levels=layout),
    )  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a small job that can be divided."""
    pp = draw(degree)
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"] if pp > 1 else ["1f1b"]))
    found: dict[str, Any] = {
        "dp": draw(degree), "tp": draw(degree), "cp": draw(st.sampled_from([1, 2])), "pp": pp, "schedule": schedule,
        "virtual": draw(st.sampled_from([1, 2])) if schedule == "interleaved" else 1,
        "zero": draw(st.sampled_from([0, 1, 2, 3])), "sequence": 2048,
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "offload_optimizer": draw(st.sampled_from([0.0, 0.5])),
        "offload_activations": draw(st.sampled_from([0.0, 1.0])),
        "overlap_dp": draw(st.booleans()), "overlap_tp": draw(st.booleans()), "overlap_pp": draw(st.booleans()),
        "mechanism": draw(st.sampled_from(NAMES)), "trained": draw(st.sampled_from([SMALL, SPARSE])),
    }  # fmt: skip
    found["pieces_tp"] = found["tp"] > 1 and draw(st.booleans())
    if found["trained"] is SPARSE:
        found["ep"] = draw(st.sampled_from([n for n in (1, 2, 4) if found["dp"] * found["cp"] % n == 0]))
        found["expert_exchange"] = draw(st.sampled_from(["all_to_all", "by_node", "gather", "slabs"]))
        found["overlap_ep"] = draw(st.sampled_from([False, True, "halves", "micro_batches"]))
    return found


def made(kwargs: dict[str, Any], **more: Any) -> Job:
    """`sequence` is a field of both: of Training here."""
    return job(**{**kwargs, **more})


@settings(max_examples=60, deadline=None)
@given(kwargs=jobs())
def test_parts_make_up_the_step_between_ideal_and_serial(kwargs: dict[str, Any]) -> None:
    """Sum of parts = step, serial >= step >= ideal, and no part is negative."""
    found = predict_step(made(kwargs))
    assert found.step_us == pytest.approx(sum(found.parts.values()))
    assert found.serial_us * (1 + 1e-9) >= found.step_us >= found.ideal_us * (1 - 1e-9)
    assert min(found.parts.values()) >= -1e-6


@settings(max_examples=40, deadline=None)
@given(kwargs=jobs(), faster=st.floats(1.0, 8.0))
def test_faster_links_never_make_a_step_slower(kwargs: dict[str, Any], faster: float) -> None:
    assume(kwargs["schedule"] != "zero_bubble")
    assert predict_step(made(kwargs, scale=faster)).step_us <= predict_step(made(kwargs)).step_us * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(kwargs=jobs(), more=st.sampled_from([2, 4]))
def test_more_samples_never_take_less_time(kwargs: dict[str, Any], more: int) -> None:
    assert predict_step(made(kwargs, global_batch=256 * more)).step_us > predict_step(made(kwargs)).step_us


def test_one_rank_communicates_nothing() -> None:
    found = predict_step(job(gpus=1, global_batch=4))
    waits = (found.exposed_comm_us, found.parts["bubble_us"], found.parts["stragglers_us"])
    assert (found.comm_us, *waits) == ({}, 0.0, 0.0, 0.0)
    assert found.serial_us == pytest.approx(found.step_us)


def test_accumulation_repeats_the_micro_batch() -> None:
    """With one rank, four micro-batches take four times the products of one."""
    one, four = (predict_step(job(gpus=1, global_batch=n)) for n in (1, 4))
    assert four.parts["matmul_us"] == pytest.approx(4 * one.parts["matmul_us"])


def test_a_better_mechanism_exposes_less() -> None:
    """FSDP on one node: serial > nccl > zero_sm > ideal."""
    slowest_first = ("serial", "nccl", "zero_sm", "ideal")
    times = [round(predict_step(job(gpus=8, dp=8, zero=3, mechanism=name)).step_us, 6) for name in slowest_first]
    assert times == sorted(times, reverse=True)


def test_zero_3_sends_parameters_twice_unless_they_are_kept_and_gradients_once() -> None:
    """Its collectives take 1.5 times those of zero 1 per step at one micro-batch, with gradients in two bytes."""
    one, three = (
        sum(predict_step(job(gpus=8, dp=8, zero=z, global_batch=8, grad_bytes=2, bucket_bytes=WHOLE)).comm_us.values())
        for z in (1, 3)
    )  # fmt: skip
    assert three / one == pytest.approx(1.5, rel=0.1)
    # without resharding after forward, backward gathers nothing
    again, kept = (predict_step(job(gpus=8, dp=8, zero=3, reshard_after_forward=r)) for r in (True, False))
    assert kept.comm_us["shards"] < again.comm_us["shards"]


@pytest.mark.parametrize(("zero", "cast"), [(0, 6), (1, 6), (2, 6), (3, 0)])
def test_gradients_of_two_bytes_are_cast_unless_shards_are(zero: int, cast: int) -> None:
    """With zero 3 each is cast as it is reduced; the update itself moves the same bytes."""
    four, two = (
        predict_step(job(gpus=8, dp=8, zero=zero, global_batch=8, grad_bytes=size)).parts["optimizer_us"]
        for size in (4, 2)
    )
    assert two / four == pytest.approx(1 + cast / sum(OPTIMIZER_BYTES["adam"]))


def test_the_bubble_shrinks_with_interleaving() -> None:
    """Two parts per stage halve it, less what twice as many sends cost."""
    plain = predict_step(job(pp=8, dp=8))
    woven = predict_step(job(pp=8, dp=8, virtual=2, schedule="interleaved"))
    assert 0.4 < woven.parts["bubble_us"] / plain.parts["bubble_us"] < 0.75


def test_full_recomputation_costs_a_forward() -> None:
    """About a third more, as backward is twice forward."""
    none, full = (predict_step(job(gpus=1, global_batch=8, recompute=kind)) for kind in ("none", "full"))
    assert full.step_us / none.step_us == pytest.approx(4 / 3, rel=0.05)


def test_uneven_experts_take_longer() -> None:
    """All wait for the busiest rank."""
    uneven = msgspec.structs.replace(SPARSE, experts=msgspec.structs.replace(EXPERTS, imbalance=1.5))
    even_us, uneven_us = (predict_step(job(one, gpus=8, dp=8, ep=8)).step_us for one in (SPARSE, uneven))
    assert uneven_us > even_us


def with_ranks(ranks: Ranks) -> Job:
    return msgspec.structs.replace(job(dp=64), ranks=ranks)


def test_ranks_that_differ_cost_their_expected_maximum_or_the_slowest() -> None:
    """64 GPUs with 5 % spread: the slowest is 2.35 standard deviations behind."""
    even, uneven = (predict_step(with_ranks(Ranks(jitter=spread))) for spread in (0.0, 0.05))
    compute = even.step_us - even.exposed_comm_us
    assert (uneven.step_us - even.step_us) / compute == pytest.approx(0.05 * 2.35, rel=0.02)
    # twice as slow as the others: the step's compute takes twice as long
    even = predict_step(with_ranks(EVEN))
    slow = predict_step(with_ranks(Ranks(slow=2.0, jitter=0.0)))
    assert slow.step_us - even.step_us == pytest.approx(even.step_us - even.exposed_comm_us)


def test_differences_between_gpus_do_not_shift_the_step() -> None:
    """Unless asked for they are no part of it; what they would add is said beside it, and grows with the ranks."""
    small, large = (predict_step(job(dp=dp)) for dp in (8, 64))
    assert small.parts["stragglers_us"] == large.parts["stragglers_us"] == 0
    assert small.slowest_us / small.step_us < large.slowest_us / large.step_us
    asked = predict_step(with_ranks(Ranks(jitter=0.02)))
    assert asked.parts["stragglers_us"] == pytest.approx(large.slowest_us, rel=0.02)


def test_compressed_gradients_are_sent_smaller() -> None:
    """PowerSGD on many nodes with one bucket: less is exposed, and the passes over memory are counted."""
    whole = job(dp=64, overlap_dp=False)
    small = msgspec.structs.replace(whole, compression=Compression(method="powersgd", rank=4))
    assert 0 < predict_step(small).parts["gradients_us"] < predict_step(whole).parts["gradients_us"]


@pytest.mark.parametrize("zero", [1, 3])
def test_compression_wants_whole_gradients(zero: int) -> None:
    """With shards there is nothing to compress."""
    sharded = msgspec.structs.replace(job(dp=64, zero=zero), compression=Compression(method="topk"))
    with pytest.raises(Misconfigured, match=rf"parallel\.zero = {zero} with compression"):
        predict_step(sharded)


def test_replicas_of_shards_reduce_what_is_left() -> None:
    """HSDP on 8 nodes sends what FSDP on one node sends, and an all_reduce of an eighth between nodes."""
    node = predict_step(job(dp=8, zero=3, global_batch=32))
    replicas = predict_step(job(dp=64, zero=3, shard=8, global_batch=256))
    assert replicas.comm_us["shards"] > node.comm_us["shards"]


def big() -> Job:
    return Job(
        model=find_model("llama3-405b"),
        parallel=Parallel(
            dp=128, tp=8, pp=16, virtual=8, schedule="interleaved", zero=1, ends_count=True
        ),
        training=Training(sequence=8192, global_batch=2048),
        cluster=Cluster(gpu=find_gpu("H100"), levels=levels("h100-roce-400", 16384)),
    )  # fmt: skip


def test_405b_on_16384_gpus_is_predicted() -> None:
    """A pipeline of 16 stages in 8 chunks each, with 16 micro-batches."""
    found = predict_step(big())
    assert (found.micro_batches, 0.2 < found.ideal_us / found.step_us < 1) == (16, True)


def test_a_search_asks_for_each_collective_once() -> None:
    """With shared prices the same step comes out, and a second one needs no new price."""
    prices = CollectiveTimes(network_of(big().cluster))
    first = predict_step(big(), prices=prices)
    known = len(prices._known)
    assert (predict_step(big(), prices=prices), len(prices._known)) == (first, known)


def test_a_step_is_a_record() -> None:
    found = predict_step(job(dp=8, tp=8))
    assert msgspec.json.decode(msgspec.json.encode(found), type=PredictedStep) == found


def test_communication_beside_its_products_costs_less() -> None:
    """Tensor parallelism in pieces exposes less where products are long enough, and nothing else changes."""
    large = Model(layers=16, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated=True, vocab=32000)
    plain, pieces = (
        predict_step(job(large, tp=8, sequence=8192, global_batch=8, pieces_tp=pieces)) for pieces in (False, True)
    )
    assert pieces.parts["tensor_us"] < 0.6 * plain.parts["tensor_us"]
    assert {**pieces.parts, "tensor_us": 0.0, "stragglers_us": 0.0} == pytest.approx(
        {**plain.parts, "tensor_us": 0.0, "stragglers_us": 0.0}
    )


@pytest.mark.parametrize(("tp", "said"), [(1, "tp above 1"), (2, ""), (16, "a node")])
def test_pieces_need_ranks_of_one_node(tp: int, said: str) -> None:
    """They are pushed by copy engines."""
    model = Model(layers=16, hidden=2048, heads=16, kv_heads=16, ffn=8192, gated=True, vocab=32000)
    if not said:
        assert job(model, pieces_tp=True, tp=tp).parallel.pieces_tp
        return
    with pytest.raises(Misconfigured, match=said):
        job(model, pieces_tp=True, tp=tp)


FINE = msgspec.structs.replace(SMALL, experts=Experts(count=64, per_token=8, width=1024))


def of_experts(**kwargs: Any) -> PredictedStep:
    """A model of small experts on the 8 GPUs of a node."""
    mechanism = kwargs.pop("mechanism", "zero_sm")
    trained = kwargs.pop("trained", FINE)
    return predict_step(job(trained, gpus=8, mechanism=mechanism, dp=8, ep=8, global_batch=64, micro_batch=4, **kwargs))


def test_tokens_travel_beside_the_experts_of_the_other_half() -> None:
    """At best half of the way is exposed; more parts of a step are smaller, and matmuls are no faster for it."""
    whole, halves, ideal, serial = (
        of_experts(overlap_ep=overlap, mechanism=name)
        for overlap, name in ((False, "zero_sm"), (True, "zero_sm"), (True, "ideal"), (True, "serial"))
    )
    assert halves.step_us < whole.step_us < serial.step_us
    assert ideal.parts["expert_us"] == pytest.approx(ideal.comm_us["ep"] / 2)
    assert ideal.parts["expert_us"] < halves.parts["expert_us"] < 0.8 * whole.parts["expert_us"]
    assert serial.parts["expert_us"] == pytest.approx(serial.comm_us["ep"])
    assert halves.parts["matmul_us"] >= whole.parts["matmul_us"]


def test_tokens_travel_beside_another_micro_batch() -> None:
    """All of the way is hidden where compute is longer and nothing is disturbed; "halves" is what true means."""
    whole, ideal, serial, halves, true = (
        of_experts(overlap_ep=overlap, mechanism=name)
        for overlap, name in (
            (False, "ideal"), ("micro_batches", "ideal"), ("micro_batches", "serial"), ("halves", "ideal"),
            (True, "ideal"),
        )
    )  # fmt: skip
    assert ideal.parts["expert_us"] == pytest.approx(0.0, abs=1e-6)
    assert serial.parts["expert_us"] == pytest.approx(whole.parts["expert_us"])
    assert ideal.comm_us["ep"] == whole.comm_us["ep"]
    assert ideal.step_us < true.step_us == halves.step_us


def test_grouped_products_are_slower_than_dense_ones() -> None:
    """By the same factor, be the model's experts many or few."""
    dense, grouped = (MatmulOp(name="x", m=4096, n=4096, k=4096, batch=4, grouped=each) for each in (False, True))
    rates = GpuRates.of(find_gpu("H100"), "bf16")
    assert cost(dense, rates).math_us == pytest.approx(GROUPED * cost(grouped, rates).math_us)
    routed = layer_work(FINE, LocalShape.of(Parallel(dp=8, ep=8), Training(sequence=512, global_batch=8)), FINE.experts)
    names = {op.name for op in routed.forward if isinstance(op, MatmulOp) and op.grouped}
    assert names == {"gate and up", "ffn out"}


def test_one_sort_less_where_all_tokens_are_gathered() -> None:
    """As many bytes as 8 choices of a token on 8 ranks are, but they are permuted once; transport is not faster."""
    gathered, sent = of_experts(expert_exchange="gather"), of_experts()
    assert gathered.parts["memory_bound_us"] < sent.parts["memory_bound_us"]
    assert gathered.parts["matmul_us"] == sent.parts["matmul_us"]
    two = msgspec.structs.replace(FINE, experts=Experts(count=64, per_token=2, width=4096))
    assert of_experts(trained=two, expert_exchange="gather").comm_us["ep"] > 2 * of_experts(trained=two).comm_us["ep"]


def test_experts_recomputed_have_their_exchanges_hidden_again() -> None:
    """Full recomputation sends twice forward, beside experts that are computed twice."""
    kept, again = (of_experts(overlap_ep=True, recompute=kind) for kind in ("none", "full"))
    assert again.comm_us["ep"] == pytest.approx(1.5 * kept.comm_us["ep"])
    assert again.parts["expert_us"] < 1.6 * kept.parts["expert_us"]


def tiny(**kwargs: Any) -> Job:
    """A layer with too little work for its kernels: 128 tokens of a narrow model, eager."""
    narrow = Model(layers=16, hidden=1024, heads=16, gated=True, vocab=1024)
    return job(narrow, gpus=8, sequence=128, **{"global_batch": 8, "fused_kernels": False, **kwargs})


def test_a_step_is_no_faster_than_the_host_which_does_not_count_where_kernels_are_long() -> None:
    """Launch-bound: the host's time of all kernels is the step, a note says how many and how much is lost."""
    found = predict_step(tiny())
    kernels, launch_us = 24 + 39, default_profile().efficiency.host_us  # of one layer, eager
    assert found.parts["host_us"] > 0.3 * found.step_us
    assert found.step_us - found.parts["optimizer_us"] >= 8 * 16 * kernels * launch_us
    (note,) = (note for note in found.notes if note.startswith("launch-bound"))
    assert f"{found.parts['host_us'] / 8 / 1e3:.2f} ms are lost" in note
    # it runs ahead: nothing is added, and nothing is said
    found = predict_step(job(gpus=1, global_batch=4))
    assert found.parts["host_us"] == 0
    assert not any("launch-bound" in note for note in found.notes)


def test_what_lowers_the_time_of_the_host() -> None:
    """Fewer kernels, larger micro-batches and replayed graphs; FSDP2 costs the host more."""
    eager = predict_step(tiny()).parts["host_us"]
    assert predict_step(tiny(cuda_graphs=True)).parts["host_us"] == 0
    assert 0 < predict_step(tiny(fused_kernels=True)).parts["host_us"] < eager
    assert 0 < predict_step(tiny(micro_batch=8)).parts["host_us"] < eager / 4
    sharded = predict_step(tiny(dp=8, zero=3))
    both_us = 16 * 63 * default_profile().efficiency.host_us + 3 * 17 * default_profile().efficiency.host_shard_us
    assert sharded.step_us - sharded.parts["optimizer_us"] == pytest.approx(both_us, rel=0.02)


def test_fp8_is_faster_by_less_than_its_linear_layers_and_has_its_own_peak() -> None:
    """Attention, casts and the rest stay; better scales cost more passes."""
    kinds: tuple[dict[str, Any], ...] = ({}, {"precision": "fp8"}, {"precision": "fp8", "fp8_scaling": "tensorwise"})
    bf16, delayed, tensorwise = (
        predict_step(job(find_model("llama3-70b"), gpus=8, tp=8, global_batch=8, sequence=8192, **kind)).step_us
        for kind in kinds
    )
    assert bf16 / 2 < delayed < tensorwise < bf16
    # data sheets give twice the peak
    found = predict_step(job(gpus=8, tp=8, global_batch=8, precision="fp8"))
    assert found.mfu == pytest.approx(found.model_tflops / 1978.9)


@pytest.mark.parametrize("zero", [1, 3])
def test_multi_token_prediction_costs_time_and_memory_on_the_last_stage(zero: Any) -> None:
    """Two stages of two layers of DeepSeek-V3: a module is a layer, a projection and another head on the last one."""
    few = Experts(count=16, per_token=8, width=2048, shared=1, first_dense=1)
    v3 = msgspec.structs.replace(find_model("deepseek-v3"), layers=4, experts=few)
    without, with_ = (
        predict_step(
            job(msgspec.structs.replace(v3, mtp=mtp), gpus=8, pp=2, tp=2, dp=2, ep=2, zero=zero, global_batch=16)
        )
        for mtp in (0, 1)
    )
    assert with_.times.forward[0] == pytest.approx(without.times.forward[0])
    assert with_.times.forward[1][0] > 1.4 * without.times.forward[1][0]
    assert with_.step_us > without.step_us
    assert with_.memory.total_gib > without.memory.total_gib


@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoints_that_stop_early_spare_the_last_product(tp: int) -> None:
    """Of a layer as wide as GPT's a third of forward's products; with tp one collective of four less, too."""
    wide = Model(layers=16, hidden=4096, heads=32, vocab=32000)
    small: dict[str, Any] = {"gpus": 8, "tp": tp, "global_batch": 8, "recompute": "full"}
    whole, early = (predict_step(job(wide, early_stop=early, **small)) for early in (False, True))
    spared = whole.parts["recompute_us"] - early.parts["recompute_us"]
    assert spared == pytest.approx(whole.parts["matmul_us"] / 3 / 3, rel=0.15)
    assert (early.parts["tensor_us"] < whole.parts["tensor_us"]) == (tp > 1)
    assert predict_step(job(SPARSE, early_stop=True, **small)) == predict_step(job(SPARSE, **small))


def test_parameters_cast_before_they_are_gathered_are_half_as_large() -> None:
    """With zero 3, layers only; their weights are cast once, as shards."""
    small: dict[str, Any] = {"dp": 64, "zero": 3, "precision": "fp8", "global_batch": 64, "overlap_dp": False}
    bf16, fp8 = (predict_step(job(find_model("llama3-8b"), fp8_gather=fp8, **small)) for fp8 in (False, True))
    gathered, scattered = 2 * 2, 4  # bytes of a parameter: gathered twice in bf16, reduced once in float32
    less = bf16.comm_us["shards"] - fp8.comm_us["shards"]
    layers = 1 - 2 * 128256 * 4096 / 8.03e9  # embedding and head stay in bf16
    assert less / bf16.comm_us["shards"] == pytest.approx(layers * gathered / 2 / (gathered + scattered), rel=0.05)
    assert fp8.parts["memory_bound_us"] < bf16.parts["memory_bound_us"]
    assert fp8.parts["shard_copies_us"] < bf16.parts["shard_copies_us"]


@pytest.mark.parametrize(("share", "measured_ms"), [(0.25, 875), (0.5, 1488), (0.75, 2191), (1.0, 3193)])
def test_updates_by_the_host_take_as_long_as_published(share: float, measured_ms: float) -> None:
    """Qwen3-30B-A3B on 16 H100, steps longer than 996 ms (Megatron-Bridge, cpu_offloading, 2026-03-30).

    By the whole of the states that is 2,921 to 3,500 ms, so proportional times are up to 11 % off.
    """
    cut: dict[str, Any] = {"dp": 4, "tp": 2, "pp": 2, "ep": 4, "zero": 1, "sequence": 4096, "global_batch": 8}
    kept, less = (
        predict_step(job(find_model("qwen3-30b-a3b"), gpus=16, offload_optimizer=part, **cut)) for part in (0.0, share)
    )
    assert (less.step_us - kept.step_us) / 1e3 == pytest.approx(measured_ms, rel=0.11)
    assert less.step_us - kept.step_us == pytest.approx(less.parts["optimizer_us"] - kept.parts["optimizer_us"])
    assert any("145 GB/s of a host's CPUs" in note for note in less.notes)


def test_activations_travel_beside_compute() -> None:
    """At a slow rate the copies, out and back, are the step; at a fast one nothing is exposed."""

    def with_link(gb_per_s: float) -> PredictedStep:
        found = job(gpus=1, global_batch=4, offload_activations=1.0)
        gpu = msgspec.structs.replace(found.cluster.gpu, host_gb_per_s=gb_per_s)
        return predict_step(msgspec.structs.replace(found, cluster=msgspec.structs.replace(found.cluster, gpu=gpu)))

    kept = predict_step(job(gpus=1, global_batch=4))
    copied = 2 * kept.memory.gib["activations"] * 2**30 * 4  # bytes of 4 micro-batches, out and back
    assert with_link(1e6).step_us == kept.step_us
    slow = with_link(1.0)
    assert slow.step_us - kept.parts["optimizer_us"] == pytest.approx(copied / 1e3)
    assert slow.parts["offload_us"] == pytest.approx(slow.step_us - kept.step_us)


def test_the_host_link_is_that_of_the_gpu() -> None:
    """PCIe 4 and 5, NVLink-C2C, or what the job says."""
    found = [find_gpu(name).host_bytes_per_us for name in ("A100-40", "H100", "GB200")]
    assert found == [25e3, 55.6e3, 390e3]
    assert msgspec.structs.replace(find_gpu("A100"), host_gb_per_s=20.0).host_bytes_per_us == 20e3
