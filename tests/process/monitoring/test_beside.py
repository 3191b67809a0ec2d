"""The process beside a training, and `counterpoint diagnose` of a hang, as they are started."""

import gzip
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from counterpoint.monitoring import beside
from counterpoint.records.diagnosis import WatchedStep
from counterpoint.records.hang import Hang
from tests.support.command import HANG_S, counterpoint
from tests.support.flight_dump import call, dump, write

SAMPLE = Path(__file__).parents[3] / "samples" / "fsdp-2-ranks"


def run(
    tmp_path: Path, rank: int, *, parent: int | None = None, meeting: str = ""
) -> subprocess.CompletedProcess[bytes]:
    traces = tmp_path / f"host{rank}" / "step500"
    traces.mkdir(parents=True)
    (traces / f"rank{rank}.json").write_bytes(gzip.decompress((SAMPLE / f"rank{rank}.json.gz").read_bytes()))
    digests = tmp_path / "digests" / meeting / "step500"
    todo = beside.Round(
        parent=os.getpid() if parent is None else parent, traces=str(traces), ranks=(rank,), digests=str(digests),
        world_size=2, step=500,
    )  # fmt: skip
    text, variables = msgspec.json.encode(todo), beside.environment()
    done = subprocess.run(beside.COMMAND, input=text, capture_output=True, env=variables, check=False, timeout=HANG_S)
    assert parent is not None or not traces.exists()
    return done


def test_two_hosts_meet(tmp_path: Path) -> None:
    """The host of rank 1 leaves a digest, that of rank 0 joins it with its own; traces and digests are removed."""
    digests = tmp_path / "digests"
    (digests / "step400").mkdir(parents=True)  # of a round that nobody joined
    other = run(tmp_path, 1)
    assert (other.returncode, other.stdout, other.stderr) == (0, b"", b"")
    assert [path.name for path in (digests / "step500").iterdir()] == ["rank1.digest"]
    record = msgspec.json.decode(run(tmp_path, 0).stdout, type=WatchedStep)
    assert (record.ranks, record.step) == ((0, 1), 500)
    assert list(digests.iterdir()) == []


def test_it_ends_with_the_training(tmp_path: Path) -> None:
    done = run(tmp_path, 0, parent=1 << 22)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_host_that_does_not_see_the_folder(tmp_path: Path) -> None:
    done = run(tmp_path, 1, meeting="elsewhere")
    assert done.returncode == 2
    assert b"watch(folder=...)" in done.stderr


@pytest.mark.parametrize("option", [(), ("--json", "-")])
def test_diagnose_of_a_hang(tmp_path: Path, option: tuple[str, ...]) -> None:
    groups = {"0": ("default_pg", range(2))}
    folder = write(
        tmp_path / "dumps", {0: dump([call(1), call(2, state="started")], groups), 1: dump([call(1)], groups)}
    )
    done = counterpoint("diagnose", folder, *option)
    verdict = "Rank 1 has not entered all_reduce #2 of group 0 (default_pg)"
    assert done.returncode == 0, done.stderr
    if option:
        assert msgspec.json.decode(done.stdout, type=Hang).verdict.startswith(verdict)
    else:
        assert done.stdout.startswith(verdict)
        assert "not entered" in done.stdout.partition("Group 0 (default_pg)")[2]


def test_a_gate_on_a_hang_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", {0: dump([call(1)], {"0": ("default_pg", range(1))})})
    done = counterpoint("diagnose", folder, "--gate", "hidden>50%")
    assert (done.returncode, "flight-recorder dumps have no" in done.stderr) == (2, True)
