"""RankTraffic: what groups, jobs, traces and matrices say about pairs of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from counterpoint.plan.job.cluster import Cluster, ClusterGpu, Level
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import Model, layer_parameters
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.group import Axis
from counterpoint.plan.placement.traffic import AxisTraffic, RankTraffic, sent_bytes

MODEL = Model(layers=8, hidden=1024, heads=16, vocab=32_000)
GPU = ClusterGpu(name="H100", tflops={"bf16": 989}, sms=132, memory_gib=80, memory_gb_per_s=3350)
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


def dense(traffic: RankTraffic) -> np.ndarray[Any, np.dtype[np.float64]]:
    return traffic.between(np.arange(traffic.world_size), traffic.world_size)


def test_a_collective_is_shared_among_its_partners() -> None:
    """Each of 4 ranks sends 30 bytes: 10 to each other one, 20 per pair both ways."""
    found = dense(RankTraffic.of_job(Parallel(tp=4), {"tp": 30.0}))
    assert (found == 20.0 * (1 - np.eye(4))).all()


def test_stages_exchange_with_their_neighbours_in_a_ring_where_interleaved() -> None:
    """Of 4 stages, the first and the last do not meet."""
    found = dense(RankTraffic.of_job(Parallel(pp=4), {"pp": 5.0}))
    assert (found == 10.0 * (abs(np.subtract.outer(np.arange(4), np.arange(4))) == 1)).all()
    # with several parts per stage the last stage hands back to the first
    found = dense(RankTraffic.of_job(Parallel(pp=4, virtual=2, schedule="interleaved"), {"pp": 5.0}))
    assert (found[0, 3], found[0, 2]) == (10.0, 0.0)


@pytest.mark.parametrize("axis", ["tp", "dp", "pp", "ep"])
def test_the_bytes_of_groups_are_those_of_their_pairs(axis: Axis) -> None:
    """Counting by group gives what adding up all pairs gives, between ranks and between hosts."""
    traffic = RankTraffic.of_job(Parallel(tp=2, dp=4, pp=3, ep=2), {axis: 7.0})
    hosts = np.random.default_rng(0).integers(0, 4, 24)
    for label in (np.arange(24), hosts):
        expected = np.zeros((24, 24))
        for part in traffic.parts:
            first, second, num_bytes = part.pairs()
            np.add.at(expected, (label[first], label[second]), num_bytes)
        expected = (expected + expected.T) * (1 - np.eye(24))
        assert traffic.between(label, 24) == pytest.approx(expected)


def test_a_ring_is_a_thousandth_of_its_collective_and_of_two_ranks_one_pair() -> None:
    """Of 5 ranks that send 4 bytes each, the 5 neighbours share 20 bytes both ways: 1/1000 more of them."""
    traffic = RankTraffic.of_job(Parallel(tp=5), {"tp": 4.0})
    more = dense(traffic.with_rings()) - dense(traffic)
    assert (more.sum() / 2, more[0, 1], more[0, 2]) == (pytest.approx(20e-3), pytest.approx(4e-3), 0.0)
    # two stages that hand to each other both ways are one pair, not two
    block = AxisTraffic(axis="pp", members=np.array([[0, 1]]), pair_bytes=np.array([3.0]), pattern="ring")
    assert (len(block.pairs()[0]), block.pairs()[2].sum()) == (1, 3.0)


def test_ranks_of_tp_and_pp_send_activations() -> None:
    """tp 2: per layer and sample 10 collectives of A, half of each sent; 8 layers, 32 samples."""
    activation = 2048 * 1024 * 2
    assert sent_bytes(job(Parallel(tp=2)))["tp"] == 10 * activation / 2 * 8 * 32
    # 4 more collectives of A per layer and sample
    more = sent_bytes(job(Parallel(tp=2), recompute="full"))["tp"] / sent_bytes(job(Parallel(tp=2)))["tp"]
    assert more == pytest.approx(14 / 10)
    # pp 2, tp 2: A / tp to the next stage, per micro-batch
    assert sent_bytes(job(Parallel(tp=2, pp=2)))["pp"] == 32 * 2048 * 1024 * 2 / 2


def test_replicas_send_gradients_once() -> None:
    """dp 4, mean of two stages: an all_reduce of 4-byte gradients, however many micro-batches there are."""
    parameters = (8 * layer_parameters(MODEL).shared + 2 * 32_000 * 1024) / 2
    found = sent_bytes(job(Parallel(dp=4, pp=2)))["dp_cp"]
    assert found == pytest.approx(2 * 3 / 4 * parameters * 4)


def test_shards_of_all_or_part_of_the_replicas_are_gathered_for_every_micro_batch() -> None:
    """zero 3: two gathers of 2 bytes and one reduction of 4, 8 times."""
    whole, sharded = (sent_bytes(job(Parallel(dp=4, zero=zero)))["dp_cp"] for zero in (0, 3))
    assert sharded / whole == pytest.approx(8 * (2 + 2 + 4) / (2 * 4))
    # HSDP: shards inside 2, and their gradients between 2 replicas of them
    found = sent_bytes(job(Parallel(dp=4, zero=3, shard=2)))
    assert found["replicate"] / found["shard"] == pytest.approx((1 * 4 / 2) / (0.5 * 8))


def test_the_axes_are_those_of_traffic() -> None:
    parallel = Parallel(tp=2, cp=2, dp=4, pp=2, zero=1, shard=2)
    found = sent_bytes(job(parallel))
    assert [part.axis for part in RankTraffic.of_job(parallel, found).parts] == list(found)
