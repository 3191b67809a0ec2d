"""A search over all divisions of a job: equal to trying every way, nothing slower than what was given, all counted."""

import tomllib
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer
from counterpoint.plan.compute.memory import memory, stage_totals
from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import Job, parse_job
from counterpoint.plan.job.model import Experts, Model
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.estimate import CollectiveTimes, MeshTimes
from counterpoint.plan.network.network import levels, network_of
from counterpoint.plan.search.search import search
from counterpoint.plan.search.space import (
    balanced,
    balanced_job,
    check_fixed,
    divided,
    divisions,
    piped,
    pipelines,
    recomputations,
    recomputing,
    sharded,
    shardings,
)
from counterpoint.plan.step.layer_time import end_us, layer_times
from counterpoint.plan.step.step import predict_step

TABLES = tomllib.loads("""
model = { name = "llama3-8b" }
training = { sequence = 4096, global_batch = 64 }
parallel = { dp = 4, tp = 2, pp = 2, zero = 1 }
cluster = { gpu = "H100", network = "h100-ndr-400" }
""")
BEST = 5


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, int]:
    """Small jobs on small clusters of nodes of 2, whose memory is often what decides, and a number of GPUs."""
    experts = Experts(count=2, per_token=1, width=512, every=draw(st.integers(1, 2)))
    model = Model(
        layers=draw(st.integers(2, 7)), hidden=1024, heads=8, kv_heads=4, vocab=draw(st.sampled_from((1000, 64000))),
        gated=draw(st.booleans()), tied=draw(st.booleans()), experts=draw(st.sampled_from((None, experts))),
    )  # fmt: skip
    training = Training(
        sequence=2048, global_batch=draw(st.sampled_from((2, 4, 6, 8))), flash_attention=draw(st.booleans()),
        fused_accumulation=draw(st.booleans()), fused_kernels=draw(st.booleans()),
        offload_optimizer=draw(st.sampled_from((0.0, 0.5))), offload_activations=draw(st.sampled_from((0.0, 0.0, 1.0))),
    )  # fmt: skip
    gpus = draw(st.sampled_from((1, 2, 4)))
    gpu = replace(find_gpu("H100"), memory_gib=draw(st.floats(4.3, 8.0)))
    node = replace(levels("h100-ndr-400", 8)[0], size=2)
    return Job(
        model=model,
        training=training,
        parallel=Parallel(overlap_pp=draw(st.booleans()), schedule=draw(st.sampled_from(("1f1b", "zero_bubble")))),
        cluster=Cluster(gpu=gpu, levels=(node, *(replace(each, size=8) for each in levels("h100-ndr-400", 16)[1:2]))),
        mechanism=draw(st.sampled_from(("nccl", "zero_sm"))),
    ), gpus


FIXED: tuple[dict[str, tuple[Any, ...]], ...] = (
    {},
    {"tp": (2,)},
    {"pp": (2, 4), "micro_batch": (1,)},
    {"parallel.zero": (1, 3), "recompute": ("none", "full")},
    {"schedule": ("zero_bubble",)},
    {"stage_layers": ("equal",), "virtual": (1,)},
    {"recompute_modules": (("layernorm",),)},
    {"recompute_num_layers": (1,)},
)


def every_way(job: Job, gpus: int, given_fixed: dict[str, tuple[Any, ...]]) -> Iterator[tuple[object, Job]]:
    """Every way that fits, and what it differs in besides recomputation: no bounds, no order."""
    fixed = check_fixed(given_fixed)
    for division in divisions(job, gpus, fixed):
        try:
            base = divided(job, division, pieces_tp=job.parallel.pieces_tp)
        except Misconfigured:
            continue
        for pipeline, sharding in product(list(pipelines(job, division, fixed)), list(shardings(job, division, fixed))):
            for again in recomputations(job, fixed):
                counts = [again.num_layers] if again.num_layers != 0 else range(1, job.model.layers + 1)
                for count in counts:
                    try:
                        whole = recomputing(sharded(piped(base, pipeline), sharding), again._replace(num_layers=count))
                    except Misconfigured:
                        continue
                    found = dealt(whole) if pipeline.layers == "balanced" else whole
                    if found is not None and memory(found).fits:
                        yield (division, pipeline, sharding), found
                        # the fewest layers that fit: stages depend on them, and more may have less to copy
                        if pipeline.layers == "balanced" or job.training.offload_activations:
                            break


def dealt(job: Job) -> Job | None:
    """The job with balanced stages, unless they are equal."""
    rates = GpuRates.of(job.cluster.gpu)
    layers = layer_times(job, rates, MeshTimes(CollectiveTimes(network_of(job.cluster)), job.parallel))
    found = balanced_job(job, layers.mean_us(job.model), end_us(job, rates, layers), stage_totals)
    return found if found is not None and len(set(found.parallel.stage_layers or ())) > 1 else None


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=jobs(), fixed=st.sampled_from(FIXED))
def test_a_search_equals_trying_every_way(drawn: tuple[Job, int], fixed: dict[str, tuple[Any, ...]]) -> None:
    """The same times, in order, of the fastest recomputation of each division, pipeline and sharding."""
    job, gpus = drawn
    fastest: dict[object, float] = {}
    for family, way in every_way(job, gpus, fixed):
        try:
            us = predict_step(way).step_us
        except Misconfigured:
            continue
        fastest[family] = min(us, fastest.get(family, us))
    if not fastest:
        with pytest.raises(Misconfigured, match=r"fits|no way to divide the job"):
            search(job, gpus=gpus, fixed=fixed)
        return
    found = search(job, gpus=gpus, fixed=fixed, best=BEST)
    assert [each.step_us for each in found.choices] == pytest.approx(sorted(fastest.values())[:BEST], rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 9), ends=st.lists(st.floats(0, 3), min_size=1, max_size=4),
    room=st.lists(st.integers(0, 9), min_size=4, max_size=4), layer_us=st.floats(0.3, 2),
)  # fmt: skip
def test_balanced_stages_have_the_shortest_busiest_stage(
    layers: int, ends: list[float], room: list[int], layer_us: float
) -> None:
    """No other way to deal the layers has a shorter one, and none is said to be impossible that is not."""
    ways = [each for each in product(*(range(most + 1) for most in room[: len(ends)])) if sum(each) == layers]
    found = balanced(layers, layer_us, ends, room[: len(ends)])
    if not ways:
        assert found is None
        return
    assert found in ways

    def busiest(each: tuple[int, ...]) -> float:
        return max(end + count * layer_us for end, count in zip(ends, each, strict=True) if count)

    assert busiest(found) == pytest.approx(min(map(busiest, ways)))


def test_a_search_finds_nothing_slower_than_what_was_given() -> None:
    job = parse_job(TABLES)
    found = search(job, best=3)
    steps = [each.step_us or 0.0 for each in found.choices]
    assert steps[0] <= answer(parse_job(TABLES)).step_us * (1 + 1e-9)
    assert steps == sorted(steps)
    assert all((each.memory_gib or 0.0) <= job.cluster.gpu.memory_gib for each in found.choices)


def test_a_search_counts_what_it_leaves_out() -> None:
    """All that was considered is priced, too large, impossible, or proved to be slower."""
    batch_of_24 = TABLES | {"training": {"sequence": 4096, "global_batch": 24}}
    found = search(parse_job(batch_of_24), best=3)
    slower = found.considered - found.priced - found.too_large - found.impossible
    assert found.priced >= 3
    assert slower > found.priced
    assert found.too_large > 0
    assert found.impossible > 0
