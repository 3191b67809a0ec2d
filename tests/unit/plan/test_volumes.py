"""What a job sends: against sums by hand."""

from __future__ import annotations

import pytest

from counterpoint.plan.cluster import Cluster, Gpu, Level
from counterpoint.plan.job import Job
from counterpoint.plan.model import Model
from counterpoint.plan.parallel import Parallel, Training
from counterpoint.plan.parameters import layer_parameters
from counterpoint.plan.traffic import Traffic
from counterpoint.plan.volumes import sent_bytes

MODEL = Model(layers=8, hidden=1024, heads=16, vocab=32_000)
GPU = Gpu(name="H100", tflops={"bf16": 989}, sms=132, memory_gib=80, memory_gb_per_s=3350)
CLUSTER = Cluster(
    gpu=GPU,
    levels=(
        Level(name="nvlink", kind="nvlink", size=8, gb_per_s=400, latency_us=1),
        Level(name="rail", kind="network", size=64, gb_per_s=50, latency_us=5),
    ),
)


def job(parallel: Parallel, **training: object) -> Job:
    fields = {"sequence": 2048, "global_batch": 32, **training}
    return Job(model=MODEL, training=Training(**fields), parallel=parallel, cluster=CLUSTER)  # type: ignore[arg-type]


def test_tensor_parallel_ranks_send_activations() -> None:
    """tp 2: per layer and sample 10 collectives of A, half of each sent; 8 layers, 32 samples."""
    activation = 2048 * 1024 * 2
    assert sent_bytes(job(Parallel(tp=2)))["tp"] == 10 * activation / 2 * 8 * 32


def test_full_recomputation_sends_forward_again() -> None:
    """4 more collectives of A per layer and sample."""
    more = sent_bytes(job(Parallel(tp=2), recompute="full"))["tp"] / sent_bytes(job(Parallel(tp=2)))["tp"]
    assert more == pytest.approx(14 / 10)


def test_replicas_send_gradients_once() -> None:
    """dp 4, mean of two stages: an all_reduce of 4-byte gradients, however many micro-batches there are."""
    parameters = (8 * layer_parameters(MODEL).shared + 2 * 32_000 * 1024) / 2
    found = sent_bytes(job(Parallel(dp=4, pp=2)))["dp_cp"]
    assert found == pytest.approx(2 * 3 / 4 * parameters * 4)


def test_shards_are_gathered_for_every_micro_batch() -> None:
    """zero 3: two gathers of 2 bytes and one reduction of 4, 8 times."""
    whole, sharded = (sent_bytes(job(Parallel(dp=4, zero=zero)))["dp_cp"] for zero in (0, 3))
    assert sharded / whole == pytest.approx(8 * (2 + 2 + 4) / (2 * 4))


def test_shards_of_part_of_the_replicas() -> None:
    """HSDP: shards inside 2, and their gradients between 2 replicas of them."""
    found = sent_bytes(job(Parallel(dp=4, zero=3, shard=2)))
    assert found["replicate"] / found["shard"] == pytest.approx((1 * 4 / 2) / (0.5 * 8))


def test_stages_send_activations() -> None:
    """pp 2, tp 2: A / tp to the next stage, per micro-batch."""
    assert sent_bytes(job(Parallel(tp=2, pp=2)))["pp"] == 32 * 2048 * 1024 * 2 / 2


def test_the_axes_are_those_of_traffic() -> None:
    """A job's volumes are taken as they are."""
    parallel = Parallel(tp=2, cp=2, dp=4, pp=2, zero=1, shard=2)
    found = sent_bytes(job(parallel))
    assert [block.axis for block in Traffic.of_job(parallel, found).blocks] == list(found)
