"""What `watch` says of a diagnosis, and where it goes."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

import counterpoint
from counterpoint.diagnosis.reading.digest import Engine, RankDigest, digest_file, pack_digest, unpack_digest
from counterpoint.errors import BadTrace, Misconfigured
from counterpoint.monitoring.beside import put, wait_for, watched_step
from counterpoint.monitoring.exporters import JsonLines, Prometheus, TensorBoard, numbers
from counterpoint.records.diagnosis import Diagnosis, Finding, WatchedStep
from counterpoint.trace.source import Limits, TraceFile
from counterpoint.trace.timeline import HostKind
from tests.support.job_builder import Rank, comm, diagnosed, host, op, rank

SAMPLES = Path(__file__).parents[3] / "samples"


def sample(name: str) -> Diagnosis:
    return counterpoint.diagnose(SAMPLES / name, engine=Engine(workers=1)).diagnosis


@pytest.fixture(scope="module")
def stalled() -> WatchedStep:
    return watched_step(sample("fsdp-host-stall"), 1500, ("a note",))


def test_the_line_names_rank_and_operation(stalled: WatchedStep) -> None:
    """Time, share hidden, who is late by how much a step, and in what."""
    late_ms = (stalled.late_us or 0) / 1e3
    assert stalled.line == (
        f"step 1500: {stalled.step_us / 1e3:.0f} ms, {100 * (stalled.hidden or 0):.0f} % hidden, "
        f"rank 5 late {late_ms:.0f} ms: tokenizer.encode"
    )
    assert (stalled.late_rank, stalled.late_cause, stalled.late_detail) == (5, "host_stall", "tokenizer.encode")
    assert stalled.notes[-1] == "a note"


def test_a_job_in_which_nobody_is_late() -> None:
    """The dearest finding takes the place, and the ranks that are missing are counted."""
    found = watched_step(sample("fsdp-healthy"), 7, ())
    assert found.late_rank is None
    assert found.findings[0].title[1:] in found.line


def test_recording_that_slows_hosts_makes_nobody_late() -> None:
    """Launches slowed by no more than recording slows the step are its doing; a stall in an operation never is."""
    found = sample("fsdp-host-stall")
    step_us = found.totals.duration_us / len(found.steps)
    (late, *others) = found.stragglers
    slow = [msgspec.structs.replace(late, detail=detail, delay_us=0.3 * step_us) for detail in ("launch", "encode")]
    launching, stalling = (msgspec.structs.replace(found, stragglers=(s, *others)) for s in slow)
    assert watched_step(launching, 500, (), 0.5 * step_us).late_rank is None
    assert watched_step(launching, 500, (), 0.9 * step_us).late_rank == late.rank
    assert watched_step(launching, 500, ()).late_rank == late.rank
    assert watched_step(stalling, 500, (), 0.5 * step_us).late_rank == late.rank


def test_the_line_tells_usual_steps_from_recorded_ones() -> None:
    found = sample("fsdp-healthy")
    assert watched_step(found, 500, (), 100e3).line.startswith("step 500: 100 ms (156 ms while recorded), ")
    assert watched_step(found, 500, (), 150e3).line.startswith("step 500: 156 ms, ")


def test_the_edge_of_a_recording_is_nobodys_fault() -> None:
    """The trace of one rank ends 10 ms before those of the others: that says nothing of the training."""
    (late, *others) = sample("fsdp-host-stall").stragglers
    edge = msgspec.structs.replace(late, cause="unknown", detail="nothing_recorded")
    found = msgspec.structs.replace(sample("fsdp-host-stall"), stragglers=(edge, *others))
    title = "Nothing was recorded"
    cut = Finding(kind="not_recorded", cost_us=9e6, severity="high", title=title, evidence="", advice="")
    said = watched_step(msgspec.structs.replace(found, findings=(cut, *found.findings)), 500, ())
    assert (said.late_rank, title in said.line, "nothing was" in said.line) == (None, False, False)


def test_a_host_that_is_late_before_its_first_event_is_not_blamed() -> None:
    """One of three ranks begins to record 10 ms after the others."""
    edge = 10_000.0

    def recorded(first: float) -> Rank:
        gathers = [comm("AllGather", first, edge + 100.0, seq=1), comm("AllGather", edge + 300.0, edge + 400.0, seq=2)]
        return rank(op("gemm", edge + 100.0, edge + 300.0), *gathers, steps=[(0.0, edge + 500.0)])

    found = diagnosed(*(recorded(edge if number == 2 else 50.0) for number in range(3)))
    assert [one.detail for one in found.stragglers] == ["nothing_recorded"]
    assert watched_step(found, 500, ()).late_rank is None


def test_the_line_of_one_rank_is_of_its_gpu_and_host() -> None:
    """It communicates with nobody: how long its GPU idles, for what, and in which operation of the host."""
    item = host("aten::item", 100.0, 700.0, HostKind.OP)
    gemms = [op("gemm", 10.0, 100.0), op("gemm", 720.0, 1000.0, launch=705.0)]
    found = diagnosed(rank(*gemms, item, steps=[(0.0, 1000.0)]))
    line = watched_step(found, 500, ()).line
    assert line == "step 500: 1.0 ms, GPU idle 63 %, 0.6 ms: the GPUs run out of work at synchronisations (aten::item)"


def test_lines_of_json(tmp_path: Path, stalled: WatchedStep) -> None:
    export = JsonLines(tmp_path / "watch.jsonl")
    for _ in range(2):
        export(stalled)
    lines = (tmp_path / "watch.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=WatchedStep) for line in lines] == [stalled, stalled]


def test_prometheus_reads_the_last_record(tmp_path: Path, stalled: WatchedStep) -> None:
    export = Prometheus(tmp_path / "job.prom")
    export(stalled)
    export(msgspec.structs.replace(stalled, step=2000, late_rank=None, late_us=None, hidden=None))
    assert [path.name for path in tmp_path.iterdir()] == ["job.prom"]
    lines = (tmp_path / "job.prom").read_text().splitlines()
    assert "counterpoint_watched_step 2000" in lines
    assert "counterpoint_late_seconds 0.0" in lines
    assert not any("hidden" in line for line in lines)
    assert len(lines) == 2 * sum(line.startswith("# TYPE") for line in lines)


def test_tensorboard_gets_figures_and_the_line(stalled: WatchedStep) -> None:
    calls: list[tuple[object, ...]] = []

    class Writer:
        def add_scalar(self, *call: object) -> None:
            calls.append(call)

        add_text = add_scalar

        def flush(self) -> None:
            calls.append(("flush",))

    TensorBoard(Writer())(stalled)
    figures = [(f"counterpoint/{name}", value, 1500) for name, value in numbers(stalled).items()]
    assert calls == [*figures, ("counterpoint/watch", stalled.line, 1500), ("flush",)]


def sample_digest() -> RankDigest:
    path = SAMPLES / "fsdp-2-ranks" / "rank0.json.gz"
    return digest_file(TraceFile(path=path, label="rank0", format="kineto"), Limits())[0]


def test_a_digest_survives_the_way() -> None:
    digest = sample_digest()
    back = unpack_digest(pack_digest(digest), "there")
    assert (back.rank, back.names, back.job) == (digest.rank, digest.names, digest.job)
    tables = [(getattr(digest, name), getattr(back, name)) for name in ("gpu", "comm", "steps", "gaps", "waits")]
    tables += [(getattr(digest.gaps, name), getattr(back.gaps, name)) for name in ("operations", "functions", "pauses")]
    for table, other in tables:
        for name in set(table.__dataclass_fields__) - {"operations", "functions", "pauses"}:
            sent, got = getattr(table, name), getattr(other, name)
            np.testing.assert_array_equal(np.asarray(got, object), np.asarray(sent, object))


def test_a_damaged_digest_is_refused() -> None:
    content = pack_digest(sample_digest())
    raw = msgspec.msgpack.decode(content)
    raw["digest"]["flops"] = [[1 << 40], b""]
    for damaged in (content[:-1], b"", msgspec.msgpack.encode(raw)):
        with pytest.raises(BadTrace, match="there: not a digest"):
            unpack_digest(damaged, "there")


def test_ranks_that_do_not_come_are_left_out(tmp_path: Path) -> None:
    """Rank 0 takes digests and excuses as they are there, and waits for others no longer than it is told."""
    folder = tmp_path / "step10"
    put(folder, "rank2.missing", b"busy")
    (folder / "rank1.digest").write_bytes(b"")
    found = [(rank, path.name) for rank, path in wait_for(folder, {1, 2, 3}, still_s=0.2)]
    assert found == [(1, "rank1.digest"), (2, "rank2.missing")]


@pytest.mark.parametrize("options", [{"every": 4}, {"steps": 0}, {"folder": "/no/such/folder"}])
def test_options_that_mean_nothing_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(Misconfigured):
        counterpoint.watch(**options)  # type: ignore[arg-type]
