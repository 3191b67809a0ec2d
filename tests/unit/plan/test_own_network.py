"""One's own network: fitted to what nccl-tests printed, kept in a file, named by a job."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.errors import Misconfigured
from counterpoint.machine.bus_bandwidth import bus_factor
from counterpoint.plan.job.changes import build_job
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import job_toml, parse_job, read_tables
from counterpoint.plan.network.estimate import estimate
from counterpoint.plan.network.fit import FEWEST_SIZES, NetworkFit, fit_network
from counterpoint.plan.network.group import Group
from counterpoint.plan.network.network import Network, levels, nccl_protocols, network_of, read_network
from counterpoint.plan.step.step import predict_step

PROGRAMS = {"all_reduce": "all_reduce_perf", "all_gather": "all_gather_perf"}
SIZES = [1 << power for power in range(16, 31)]


NCCL = Network(
    cluster=Cluster(gpu=find_gpu("A100"), levels=levels("a100-hdr-200", 32)), protocols=nccl_protocols()
)  # fmt: skip


def us(num_bytes: int, ranks: int, operation: str = "all_reduce") -> float:
    """A made-up machine with twice the latencies of NCCL's model, whose NICs reach half of their rate."""
    group = Group(ranks=ranks, stride=8 if ranks == 4 else 1)
    found = estimate(operation, num_bytes, group, NCCL)
    return 2.0 * found.latency_us + (2.0 if ranks != 8 else 1.1) * found.bandwidth_us


def text(
    ranks: int, sizes: list[int] = SIZES, *, operation: str = "all_reduce", hosts: int | None = None,
    gpu: str = "NVIDIA A100-SXM4-80GB", factor: float = 1.0,
) -> str:  # fmt: skip
    """What nccl-tests prints there."""
    hosts = hosts or max(ranks // 8, 1)
    lines = [f"# Collective test starting: {PROGRAMS[operation]}", "# nThread 1 nGpus 1 minBytes 8 maxBytes 8"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid  7 on host{rank * hosts // ranks} device  {rank % 8} [0x07] {gpu}"
        for rank in range(ranks)
    ]
    for size in sizes:
        time = round(us(size, ranks) * factor, 1)
        rate = size / time / 1e3
        bus = rate * bus_factor(operation, ranks)
        lines.append(f"  {size}  1  float  sum  -1  {time}  {rate:.2f}  {bus:.2f}  0  {time}  {rate:.2f}  {bus:.2f}  0")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("network")
    (path / "nodes.txt").write_text(text(32))
    (path / "node.txt").write_text(text(8))
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> NetworkFit:
    return fit_network([str(folder / "nodes.txt"), str(folder / "node.txt")], network="a100-hdr-200")


@pytest.fixture(scope="module")
def file(folder: Path, found: NetworkFit) -> Path:
    (folder / "mine.json").write_bytes(msgspec.json.encode(found.network))
    return folder / "mine.json"


def tables(file: Path, **cluster: Any) -> dict[str, Any]:
    return {
        "model": {"name": "llama2-7b"},
        "training": {"sequence": 2048, "global_batch": 64},
        "parallel": {"dp": 32, "overlap_dp": False},
        "cluster": {"gpu": "A100", "network": str(file)} | cluster,
    }


def test_the_error_is_of_sizes_left_out_and_beside_nccls_model(found: NetworkFit) -> None:
    """Each operation and number of ranks: nearly none, where NCCL's own model is off by much more."""
    assert [(each.operation, each.ranks, each.sizes) for each in found.errors] == [
        ("all_reduce", 8, len(SIZES)),
        ("all_reduce", 32, len(SIZES)),
    ]
    assert all(each.mean <= each.worst < 0.02 < 0.1 < each.nccl_mean for each in found.errors)


@pytest.mark.parametrize("ranks", [8, 32])
def test_a_job_on_it_takes_what_was_measured(file: Path, ranks: int) -> None:
    """Instead of what is shipped for A100, inside the node and between nodes."""
    network = network_of(parse_job(tables(file)).cluster)
    for size in (1 << 22, 1 << 26, 1 << 29):
        estimated = estimate("all_reduce", size, Group(ranks=ranks), network)
        assert estimated.us == pytest.approx(us(size, ranks), rel=0.02)
        assert "one's own rows" in estimated.validated


def test_what_was_not_measured_keeps_the_shipped_figures(file: Path) -> None:
    """An all_to_all in a node is that of A100."""
    named = parse_job(tables(file) | {"cluster": {"gpu": "A100", "network": "a100-hdr-200"}})
    mine, theirs = (
        estimate("all_to_all", 1 << 28, Group(ranks=8), network_of(job.cluster)).us
        for job in (parse_job(tables(file)), named)
    )
    assert mine == theirs


def test_it_stays_after_a_change(file: Path) -> None:
    """With twice the NICs' rate figures are still those that were fitted; on another network they are not."""
    job = build_job(tables(file), {"cluster.nic_gbit": "400"})
    assert job.cluster.fits == str(file)
    assert predict_step(job).step_us < predict_step(parse_job(tables(file))).step_us
    assert build_job(tables(file), {"network": "a100-hdr-200"}).cluster.fits == ""


def test_a_jobs_file_names_it_relative_to_itself(file: Path) -> None:
    """And a flag relative to where the command runs."""
    (file.parent / "job.toml").write_text(
        'model.name = "llama2-7b"\ntraining = { sequence = 2048, global_batch = 64 }\nparallel = { dp = 32 }\n'
        'cluster = { gpu = "A100", network = "mine.json" }\n'
    )
    job = parse_job(read_tables(file.parent / "job.toml"))
    assert job.cluster.fits == str(file)
    assert build_job(tables(file, network="a100-hdr-200"), {"network": str(file)}).cluster == job.cluster


def test_a_written_job_has_it_also_with_other_levels(file: Path) -> None:
    """`--write-job`: the file by its name, and its figures besides levels that were changed."""
    for changes in ({}, {"cluster.nic_gbit": "100"}):
        job = build_job(tables(file), changes)
        again = parse_job(tomllib.loads(job_toml(job)))
        assert (again.cluster, predict_step(again).step_us) == (job.cluster, predict_step(job).step_us)


def test_one_host_needs_no_network_and_one_rank_on_each_node_is_that_far_apart(folder: Path) -> None:
    """NVLink of the GPU that the file names."""
    assert [level.name for level in fit_network([str(folder / "node.txt")]).network.levels] == ["nvlink"]
    # four hosts with one rank each: rails
    (folder / "rails.txt").write_text(text(4, hosts=4))
    found = fit_network([str(folder / "rails.txt")], network="a100-hdr-200")
    assert {kind for protocol in found.network.protocols for kind in protocol.kinds} == {"network"}


def test_a_latency_and_a_rate_are_found_again(found: NetworkFit) -> None:
    """Between nodes, all latencies of NCCL's model twice and all bandwidths half; in the node, 1 / 1.1 of them."""
    nccl = {(each.name, each.algorithms): each for each in nccl_protocols() if each.serves("all_reduce", "", "")}
    for fitted in found.network.protocols:
        own, longer = nccl[fitted.name, fitted.algorithms], 2.0 if fitted.kinds == ("network",) else 1.1
        assert fitted.base_us == pytest.approx(2 * own.base_us, rel=0.01)
        assert fitted.hop_us["network"] == pytest.approx(2 * own.hop_us["network"], rel=0.01)
        assert fitted.efficiency["nvlink"] == pytest.approx(own.efficiency["nvlink"] / longer, rel=0.01)


def test_a_latency_below_nothing_is_none(tmp_path: Path) -> None:
    """Times that only grow with bytes: the rate explains them, and a file that can be read is written."""
    lines = text(8).splitlines()
    for size in SIZES:
        time, rate = size / 100e3, 100.0
        bus = rate * bus_factor("all_reduce", 8)
        lines = [line for line in lines if not line.startswith(f"  {size}  ")]
        lines.append(f"  {size}  1  float  sum  -1  {time:.4f}  {rate:.2f}  {bus:.2f}  0")
    (tmp_path / "out.txt").write_text("\n".join(lines))
    found = fit_network([str(tmp_path / "out.txt")])
    (tmp_path / "mine.json").write_bytes(msgspec.json.encode(found.network))
    assert read_network(str(tmp_path / "mine.json")) == found.network


@pytest.mark.parametrize(
    ("given", "options", "match"),
    [
        (text(32), {}, "give --network"),
        (text(32), {"network": "magic"}, "'magic': choose from"),
        (text(32), {"network": "a100-hdr-200", "gpu": "Z100"}, "known are"),
        (text(32), {"network": "a100-hdr-200", "ranks": 16}, "lists 32 ranks up to 31, not 16"),
        (text(32, gpu="Matrox"), {"network": "a100-hdr-200"}, "give --gpu"),
        (text(32, SIZES[: FEWEST_SIZES - 1]), {"network": "a100-hdr-200"}, "all_reduce over 32 ranks has 5 sizes"),
        (text(32, hosts=8), {"network": "a100-hdr-200"}, "4 on each host of 8 GPUs"),
        (text(32, hosts=2), {"network": "a100-hdr-200"}, "16 ranks on one host"),
        (text(16, hosts=2), {"network": "nvlink-a100"}, "8 GPUs are all it joins"),
        ("garbage", {"network": "a100-hdr-200"}, "no row of nccl-tests"),
        ("\x1b[2J" * 99, {}, "no row of nccl-tests"),
    ],
)
def test_what_cannot_be_fitted_is_refused(tmp_path: Path, given: str, options: dict[str, Any], match: str) -> None:
    (tmp_path / "out.txt").write_text(given)
    with pytest.raises(Misconfigured, match=match) as error:
        fit_network([str(tmp_path / "out.txt")], **options)
    assert str(error.value).isprintable()


def test_times_that_follow_no_law_are_refused(tmp_path: Path) -> None:
    """Each size a hundred times as long as the next, or as short."""
    parts = [text(32, [size], factor=100.0 if at % 2 else 1.0) for at, size in enumerate(SIZES)]
    (tmp_path / "out.txt").write_text("\n".join([parts[0], *(part.splitlines()[-1] for part in parts[1:])]))
    with pytest.raises(Misconfigured, match="follow no law of sizes"):
        fit_network([str(tmp_path / "out.txt")], network="a100-hdr-200")


def test_two_kinds_of_gpu_and_a_file_that_comes_twice_are_refused(folder: Path) -> None:
    with pytest.raises(Misconfigured, match="comes twice"):
        fit_network([str(folder / "node.txt")] * 2)
    (folder / "h100.txt").write_text(text(8, gpu="NVIDIA H100 80GB HBM3"))
    with pytest.raises(Misconfigured, match="one kind of GPU"):
        fit_network([str(folder / "node.txt"), str(folder / "h100.txt")])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"levels": []}, "a network has levels"),
        ({"levels": [{"name": "x"}]}, "missing required field"),
        ({"protocols": [{"name": "LL"}]}, "missing required field"),
        ({"surplus": 1}, "unknown field"),
        ({"schema": "counterpoint.network/9"}, "Invalid enum value"),
    ],
)
def test_a_file_that_was_changed_is_refused(file: Path, tmp_path: Path, change: dict[str, Any], match: str) -> None:
    content = json.loads(file.read_text())
    (tmp_path / "changed.json").write_text(json.dumps(content | change))
    with pytest.raises(Misconfigured, match=rf"changed\.json is no network: .*{match}"):
        parse_job(tables(tmp_path / "changed.json"))


@pytest.mark.parametrize("name", ["base_us", "join", "fill", "believed", "own_gb_per_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e9, 1e300])
def test_a_figure_that_cannot_be_is_refused(file: Path, tmp_path: Path, name: str, value: float) -> None:
    content = json.loads(file.read_text())
    content["protocols"][0][name] = value
    (tmp_path / "changed.json").write_text(json.dumps(content))
    with pytest.raises(Misconfigured, match="is no network"):
        parse_job(tables(tmp_path / "changed.json"))


@pytest.mark.parametrize("name", ["none.json", ".json", "\0.json"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Misconfigured, match="--fit has written"):
        parse_job(tables(tmp_path / name))


def test_a_file_is_read_once(file: Path) -> None:
    assert read_network(str(file)) is read_network(str(file))
