"""Digests in files give the answer of their traces, many are joined by their summaries, and bad ones are refused."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import polars
import pytest

from counterpoint.cli import app
from counterpoint.diagnosis import api, many_ranks
from counterpoint.diagnosis.reading.digest import Engine, RankDigest, pack_digest
from counterpoint.diagnosis.reading.packing import file_of_parts, pack
from counterpoint.diagnosis.summary import digest_content, summarise
from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import Diagnosis
from tests.support.job_builder import comm, digested, op, rank

SAMPLE = Path(__file__).parents[3] / "samples" / "fsdp-host-stall"
LATE, STALL_US = 5, 4000.0


def digests_of(ranks: int) -> list[RankDigest]:
    """Ranks of which one computes longer before the second all-reduce, on clocks that differ by hosts of four."""
    found = []
    for number in range(ranks):
        late = STALL_US if number == LATE else 0.0
        parts = [op("matmul", 0.0, 1000.0), comm("all_reduce", 1000.0 + number, 2000.0, seq=0)]
        parts += [op("matmul", 2100.0, 3000.0 + late), comm("all_reduce", 3000.0 + late + number, 9000.0, seq=1)]
        parts += [op("matmul", 9100.0, 10_000.0), comm("all_reduce", 10_000.0 + number, 11_000.0, seq=2)]
        digest = digested(rank(*parts), number, ranks)
        found.append(replace(digest, origin_ns=digest.origin_ns + 777_000 * (number // 4), path=f"rank{number}.json"))
    return found


def write(digests: list[RankDigest], folder: Path) -> Path:
    folder.mkdir()
    for each in digests:
        (folder / f"rank{each.rank}.digest").write_bytes(digest_content(each))
    return folder


def without_files(diagnosis: Diagnosis) -> Diagnosis:
    return msgspec.structs.replace(diagnosis, source=msgspec.structs.replace(diagnosis.source, files=()))


def test_digests_give_the_answer_of_their_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["digest", str(SAMPLE), "--out", str(tmp_path / "digests"), "--workers", "1"], standalone_mode=False)
    assert "wrote 8 digests" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "digests").iterdir()) == [f"rank{r}.digest" for r in range(8)]
    of_digests, of_traces = (
        api.diagnose(source, engine=Engine(workers=1)).diagnosis for source in (tmp_path / "digests", SAMPLE)
    )
    assert without_files(of_digests) == without_files(of_traces)


def test_accounts_of_many_ranks_are_those_of_all_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few ranks looked at closely, every rank's account, its waits and the late rank stay as with all ranks."""
    digests = digests_of(16)
    whole = api.diagnose_digests(digests, []).diagnosis
    for module in (api, many_ranks):
        monkeypatch.setattr(module, "MOST_DETAILED", 6)
    monkeypatch.setattr(many_ranks, "_LATE_SEEDS", 2)
    found = api.diagnose(write(digests, tmp_path / "digests"))
    assert len(found.analysis.job.ranks) <= 6
    assert (found.diagnosis.ranks, found.diagnosis.missing_ranks) == (tuple(range(16)), ())
    assert [s.rank for s in found.diagnosis.stragglers] == [s.rank for s in whole.stragglers] == [LATE]
    for name in ("duration_us", "compute_us", "exposed_comm_us", "wait_us", "transfer_us", "exposed_wait_us"):
        ours, all_traces = ([getattr(a, name) for a in d.per_rank] for d in (found.diagnosis, whole))
        np.testing.assert_allclose(ours, all_traces, atol=1.0, err_msg=name)
    assert found.diagnosis.totals.exposed_wait_us == pytest.approx(whole.totals.exposed_wait_us, abs=1.0)
    assert sum(offset or 0.0 for offset in found.diagnosis.clock_offsets_us.values()) == pytest.approx(
        sum(offset or 0.0 for offset in whole.clock_offsets_us.values()), abs=16.0
    )


def test_the_late_rank_of_summaries() -> None:
    many = many_ranks.join_many([summarise(each) for each in digests_of(12)])
    assert int(many.late_us.argmax()) == LATE
    assert many.late_us[LATE] == pytest.approx(STALL_US, abs=20.0)


def test_collectives_without_numbers_are_joined_by_order_or_not_at_all() -> None:
    """Where ranks have equally many, order joins them; else their waits stay unknown, and a note says so."""
    numbered = [summarise(each) for each in digests_of(4)]
    plain = [replace(each, ident=np.full(3, -1)) for each in numbered]
    assert many_ranks.join_many(plain).late_us[0:4] == pytest.approx(many_ranks.join_many(numbered).late_us[0:4])
    short = replace(plain[0], **{name: getattr(plain[0], name)[:2] for name in ("kind", "ident", "start", "end")})
    uneven = many_ranks.join_many([short, *plain[1:]])
    assert [a.wait_us for a in uneven.accounts] == [None] * 4
    assert "collectives of 1 groups are not numbered" in " ".join(uneven.notes)


def damaged(content: bytes, where: str) -> bytes:
    digest = digests_of(1)[0]
    match where:
        case "version":
            return content.replace(b"digest/1", b"digest/9")
        case "truncated":
            return content[:-20]
        case "flipped":
            return content[:-200] + bytes([content[-200] ^ 255]) + content[-199:]
        case "index":
            digest = replace(digest, gpu=replace(digest.gpu, name=digest.gpu.name + 99))
        case "operator":
            digest = replace(digest, gpu=replace(digest.gpu, operator=digest.gpu.name + 99))
        case "inputs":
            digest = replace(digest, gpu=replace(digest.gpu, inputs=digest.gpu.name + len(digest.inputs)))
        case "stack" | "module" | "phase":
            column = getattr(digest.origins, where)
            digest = replace(digest, origins=replace(digest.origins, **{where: column + 99}))
        case "origin":
            digest = replace(digest, origins=replace(digest.origins, stack=digest.origins.stack[:1]))
        case "length":
            digest = replace(digest, comm=replace(digest.comm, start=digest.comm.start[:1]))
        case "step":
            digest = replace(digest, steps=replace(digest.steps, found_by="guess"))
        case "bomb":
            return file_of_parts((b"", bytes(1 << 28)))
    return file_of_parts((pack(summarise(digests_of(1)[0])), pack_digest(digest)))


@pytest.mark.parametrize(
    "where",
    [
        "version",
        "truncated",
        "flipped",
        "index",
        "operator",
        "inputs",
        "stack",
        "module",
        "phase",
        "origin",
        "length",
        "step",
        "bomb",
    ],
)
def test_a_bad_digest_is_refused(where: str, tmp_path: Path) -> None:
    path = tmp_path / "rank0.digest"
    path.write_bytes(damaged(digest_content(digests_of(1)[0]), where))
    with pytest.raises(BadTrace, match="digest") as caught:
        api.diagnose(path)
    assert caught.value.path == str(path)


def test_a_bad_summary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MOST_DETAILED", 1)
    digests = digests_of(2)
    folder = write(digests, tmp_path / "digests")
    bad = replace(summarise(digests[1]), kind=np.array([0, 0, 7], np.int32))
    (folder / "rank1.digest").write_bytes(file_of_parts((pack(bad), pack_digest(digests[1]))))
    with pytest.raises(BadTrace, match="columns that do not fit"):
        api.diagnose(folder)


def test_two_recordings_are_not_written_over_each_other(tmp_path: Path) -> None:
    from counterpoint.commands.digest import digest
    from counterpoint.errors import Misconfigured

    paths = [str(SAMPLE / "rank0.json.gz"), str(SAMPLE.parent / "fsdp-healthy" / "rank0.json.gz")]
    with pytest.raises(Misconfigured, match="of one rank"):
        digest(paths, out=tmp_path / "digests", workers=1, max_trace_gb=8.0, quiet=True)
    assert not (tmp_path / "digests").exists()


def test_the_ranks_of_a_group_are_written_once() -> None:
    """A digest of a rank in a job of thousands stays small: each collective names its group by a number."""
    digest = digests_of(1)[0]
    ranks = tuple(range(10_000))
    wide = replace(digest, comm=replace(digest.comm, group_ranks=(ranks,) * len(digest.comm)))
    once = replace(digest, comm=replace(digest.comm, group_ranks=(ranks, *(None,) * (len(digest.comm) - 1))))
    assert len(pack_digest(wide)) <= len(pack_digest(once)) + 16
    assert json.dumps(summarise(wide).kinds[0].ranks) == json.dumps(ranks)


def test_the_frames_of_digests_are_written_for_duckdb(tmp_path: Path) -> None:
    """Every frame of digests becomes a Parquet file, which holds the same values."""
    for name, frame in api.diagnose(write(digests_of(3), tmp_path / "digests")).frames.items():
        frame.write_parquet(tmp_path / f"{name}.parquet")
        assert polars.read_parquet(tmp_path / f"{name}.parquet").equals(frame), name
