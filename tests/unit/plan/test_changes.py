"""Other jobs like this one: every flag and field changes what it says, and nothing else."""

from __future__ import annotations

import tomllib
from itertools import permutations
from typing import Any

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.changes import build_job, on_nodes, swept
from counterpoint.plan.job.cluster import find_gpu
from counterpoint.plan.job.job import Job, parse_job

TABLES = tomllib.loads("""
model = { name = "llama3-8b" }
training = { sequence = 4096, global_batch = 64 }
parallel = { dp = 16, tp = 2, zero = 1 }
cluster = { gpu = "H100", network = "h100-ndr-400" }
""")


def job(name: str, value: str, tables: dict[str, Any] = TABLES) -> Job:
    return build_job(tables, {name: value})


def rates(of: Job) -> list[float]:
    return [level.gb_per_s for level in of.cluster.levels if level.kind == "network"]


def test_more_nodes_are_more_replicas_of_the_same_batch_or_of_a_larger_one() -> None:
    more = job("nodes", "8")
    assert (more.parallel.dp, more.parallel.tp, more.cluster.num_gpus, more.training.global_batch) == (32, 2, 64, 64)
    assert job("weak_nodes", "8").training.global_batch == 128


def test_a_node_is_that_of_the_network() -> None:
    """Also for a job that fills a part of one, or says nothing of how it is divided."""
    for parallel in ({"dp": 4}, {}):
        assert job("nodes", "2", TABLES | {"parallel": parallel}).parallel.world_size == 16


def test_nodes_of_levels_that_are_written_out() -> None:
    level = {"name": "nvlink", "kind": "nvlink", "size": 8, "gb_per_s": 300, "latency_us": 1}
    above = {"name": "net", "kind": "network", "size": 32, "gb_per_s": 50, "latency_us": 3}
    written = TABLES | {"cluster": {"gpu": "H100", "levels": [level, above]}}
    assert [job("nodes", n, written).cluster.levels[-1].size for n in ("2", "8")] == [32, 64]


@pytest.mark.parametrize(
    ("name", "value", "factor"),
    [("cluster.nic_gbit", "800", 2.0), ("cluster.nics", "4", 0.5), ("cluster.failed_nics", "2", 1.0)],
)
def test_the_network_between_nodes(name: str, value: str, factor: float) -> None:
    """400 Gb/s and 8 NICs are what this network has; NVLink stays as it was."""
    changed, before = job(name, value), parse_job(TABLES)
    assert rates(changed)[: len(rates(before))] == [factor * rate for rate in rates(before)]
    assert changed.cluster.levels[0] == before.cluster.levels[0]
    assert changed.cluster.levels[1].failed_nics == (2 if name == "cluster.failed_nics" else 0)


def test_a_changed_network_can_still_grow() -> None:
    """Past what its lowest switch joins: the levels above are written out, too."""
    changed = build_job(TABLES, {"training.global_batch": "512", "cluster.nic_gbit": "800"})
    levels = on_nodes(changed, 64, batch_grows=False).cluster.levels
    assert [(level.name, level.gb_per_s) for level in levels[:3]] == [
        ("nvlink", 370.8),
        ("rail", 100.0),
        ("spine", 100.0),
    ]


def test_oversubscription_is_of_the_topmost_level() -> None:
    """That the job crosses: on 32 GPUs the rails, on 4,096 the core; where it changed nothing, nobody would see it."""
    larger = {"training.global_batch": "2048", "nodes": "512"}
    factors = [
        [level.oversubscription for level in build_job(TABLES, each | {"cluster.oversubscription": "4"}).cluster.levels]
        for each in ({}, larger)
    ]
    assert factors == [[1.0, 4.0, 1.0, 1.0], [1.0, 1.0, 1.0, 4.0]]


@pytest.mark.parametrize(
    ("name", "value", "read", "expected"),
    [
        ("gpu", "B200", lambda job: job.cluster.gpu.name, "B200"),
        ("training.global_batch", "128", lambda job: job.training.global_batch, 128),
        ("training.precision", "fp8", lambda job: job.training.precision, "fp8"),
        ("mechanism", "zero_sm", lambda job: job.mechanism, "zero_sm"),
        ("overlap.tp", "zero_sm", lambda job: (job.mechanism, job.mechanisms), ("nccl", {"tp": "zero_sm"})),
        ("compression.method", "powersgd", lambda job: job.compression.rank, 4),
        ("training.asynchronous", "true", lambda job: job.training.asynchronous, True),
        ("ranks.slow", "1.5", lambda job: job.ranks.slow, 1.5),
        ("cluster.clock_ghz", "1.4", lambda job: job.cluster.gpu.clock_ghz, 1.4),
        ("cluster.power_watts", "500", lambda job: job.cluster.gpu.power_watts, 500.0),
        ("parallel.tp", "4", lambda job: job.parallel.tp, 4),
        ("training.flash_attention", "false", lambda job: job.training.flash_attention, False),
    ],
)
def test_a_value_arrives(name: str, value: str, read: Any, expected: object) -> None:
    """Where it belongs; a cluster larger than the job is no error."""
    tables = TABLES | {
        "cluster": TABLES["cluster"] | {"gpus": 64},
        "training": TABLES["training"] | {"global_batch": 256},
    }
    assert read(job(name, value, tables)) == expected


def test_the_tables_asked_about_stay_as_they_were() -> None:
    before = repr(TABLES)
    for name, value in (("nodes", "8"), ("gpu", "B200"), ("mechanism", "zero_sm"), ("parallel.tp", "4")):
        build_job(TABLES, {name: value})
    assert repr(TABLES) == before


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("nodes", "many", "nodes = many: give a number of nodes"),
        ("nodes", "-1", "nodes = -1: give a number of nodes, from 1 to"),
        ("nodes", "3", "does not divide training.global_batch"),
        ("cluster.nic_gbit", "0", "cluster.nic_gbit = 0: give a number from 0.001 to"),
        ("cluster.failed_nics", "8", "failed_nics = 8 of 8"),
        ("compression.method", "gzip", 'compression.method = "gzip": give one of powersgd, quantized, randomk, topk'),
        ("gpu", "H300", "known are A100, A100-40"),
        ("ranks.slow", "0.5", "ranks.slow = 0.5: give a number from 1 to 1,000"),
        ("tp", "1", "tp is not known: give a field, such as parallel.tp"),
        ("micro_bach", "1", "micro_bach is not known: give a field, such as training.micro_batch"),
        ("paralel.tp", "1", "paralel is not known: give parallel, or another of model"),
        ("parallel", "1", "parallel is not known"),
        ("parallel.dp.x", "1", "parallel.dp.x: dp is no table"),
        ("parallel.colour", "1", "parallel.colour is not known: give one of dp"),
        ("parallel.shards", "1", "parallel.shards is not known: give shard, or another of dp"),
    ],
)
def test_what_cannot_be_is_said(name: str, value: str, said: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        job(name, value)
    assert said in str(raised.value)


@pytest.mark.parametrize("network", ["nvlink-h100", "h100-ndr-400"])
@pytest.mark.parametrize("name", ["nic_gbit", "nics", "failed_nics", "oversubscription"])
def test_a_job_inside_a_node_uses_no_nics(network: str, name: str) -> None:
    one = TABLES | {"cluster": {"gpu": "H100", "network": network}, "parallel": {"dp": 8}}
    with pytest.raises(Misconfigured, match="all ranks are below one nvlink"):
        job(f"cluster.{name}", "4", one)


def test_a_sweep_keeps_why_a_value_cannot_be() -> None:
    found = swept(TABLES, {}, "nodes", ["4", "5", "8"])
    assert [value for value, one in found if isinstance(one, Job)] == ["4", "8"]
    assert isinstance(found[1][1], Misconfigured)


def test_a_swept_field_replaces_its_own_change_and_keeps_others() -> None:
    """Half the NICs are half the rate, whatever was set before."""
    found = dict(swept(TABLES, {"cluster.nics": "2"}, "cluster.nics", ["4"]))["4"]
    assert isinstance(found, Job)
    assert rates(found)[0] == rates(job("cluster.nics", "4"))[0]
    others = [each for _, each in swept(TABLES, {"mechanism": "zero_sm"}, "parallel.dp", ["8", "16"])]
    read = [(each.mechanism, each.parallel.dp) for each in others if isinstance(each, Job)]
    assert read == [("zero_sm", 8), ("zero_sm", 16)]


def test_a_field_that_a_flag_decides_on_cannot_be_swept() -> None:
    with pytest.raises(Misconfigured, match=r"nodes with parallel\.dp: both decide on it"):
        swept(TABLES, {"nodes": "8"}, "parallel.dp", ["8", "16"])


def test_a_named_network_is_not_put_over_levels_that_are_written_out() -> None:
    level = {"name": "net", "kind": "network", "size": 32, "gb_per_s": 50, "latency_us": 3}
    with pytest.raises(Misconfigured, match="give either network, a name, or levels"):
        build_job(TABLES | {"cluster": {"gpu": "H100", "levels": [level]}}, {"network": "h100-roce-400"})


LINKED = (
    {"nodes": "512", "training.global_batch": "4096"},
    {"nodes": "512", "training.global_batch": "8192", "training.micro_batch": "2"},
    {"cluster.nic_gbit": "800", "network": "h100-roce-400", "nodes": "16", "cluster.oversubscription": "2"},
    {"parallel.shard": "32", "nodes": "8", "parallel.zero": "2"},
    {"network": "nvlink-h100", "nodes": "1", "parallel.zero": "0"},
    {"weak_nodes": "64", "cluster.failed_nics": "1", "gpu": "H200", "training.precision": "fp8", "mechanism": "nccl"},
    {"gpu": "H200", "cluster.power_watts": "500", "mechanism": "zero_sm", "overlap.dp": "nccl"},
)


@pytest.mark.parametrize("changes", LINKED, ids=", ".join)
def test_flags_that_belong_together_are_one_job_in_any_order(changes: dict[str, str]) -> None:
    found = [build_job(TABLES, dict(order)) for order in permutations(changes.items())]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": "4", "weak_nodes": "8"}, "weak_nodes with nodes: both decide on it"),
        ({"nodes": "4", "cluster.gpus": "64"}, "nodes with cluster.gpus: both decide on it; give one of them"),
        ({"weak_nodes": "4", "training.global_batch": "64"}, "weak_nodes with training.global_batch: both decide"),
        ({"gpu": "H200", "cluster.gpu": "H100"}, "gpu with cluster.gpu: both decide on it"),
        ({"nodes": "1024", "training.global_batch": "64"}, "does not divide training.global_batch = 64"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(changes: dict[str, str], said: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        build_job(TABLES, changes)
    assert said in str(raised.value)


def test_another_gpu_has_no_clock_or_profile_of_the_first() -> None:
    """What the file says of its own GPU goes with it."""
    limited = TABLES | {"cluster": TABLES["cluster"] | {"power_watts": 500, "machine": "mine.json"}}
    assert job("gpu", "H200", limited).cluster.gpu == find_gpu("H200")


@pytest.mark.parametrize("field", ["parallel.tp", "parallel.cp", "parallel.pp"])
def test_a_sweep_over_a_degree_keeps_the_gpus(field: str) -> None:
    """Replicas take what it leaves, whatever else was asked."""
    for changes, ranks in (({}, 32), ({"nodes": "8"}, 64)):
        found = [each for _, each in swept(TABLES, changes, field, ["1", "2", "4"])]
        assert [each.parallel.world_size for each in found if isinstance(each, Job)] == 3 * [ranks]
