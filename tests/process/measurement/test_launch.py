"""The launcher with ranks that have no torch: every way to end, in seconds, in one line, without orphans."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout, Unsupported
from counterpoint.measurement.api import launch, read_outcomes
from counterpoint.records.measurement import Plan, Scenario
from tests.support.command import HANG_S
from tests.support.ranks import SOON_S

ROOT = Path(__file__).parents[3]
WORKER = "tests.support.fake_worker"
QUIET_S = 5.0  # of ranks that hang: a busy machine lets none of them stand still for so long


@pytest.fixture(autouse=True)
def workers_find_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


def plan_of(folder: Path, *names: str, world_size: int = 2) -> Plan:
    parts = tuple(Scenario(name=name, workload="gemm", collective="all_gather", mechanisms=("gloo",)) for name in names)
    (folder / "results.jsonl").touch()
    return Plan(
        suite="fake", device="cpu", world_size=world_size, parts=parts,
        results=str(folder / "results.jsonl"), errors=str(folder / "errors"),
    )  # fmt: skip


def run(folder: Path, *names: str, timeout_s: float = HANG_S, startup_s: float = HANG_S, world_size: int = 2) -> None:
    plan = plan_of(folder, *names, world_size=world_size)
    launch(plan, folder=folder, timeout_s=timeout_s, startup_s=startup_s, module=WORKER)


def ending(folder: Path, *names: str, **options: float) -> CounterpointError:
    with pytest.raises(CounterpointError) as caught:
        run(folder, *names, **options)  # type: ignore[arg-type]
    return caught.value


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted((folder / "errors").glob("pid*")) if path.read_text()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(ranks: list[int]) -> list[int]:
    until = time.monotonic() + SOON_S
    while time.monotonic() < until and any(map(runs, ranks)):
        time.sleep(0.02)
    return [pid for pid in ranks if runs(pid)]


def test_every_scenario_is_run(tmp_path: Path) -> None:
    run(tmp_path, "ok 1", "ok 2")
    assert [outcome.scenario for outcome in read_outcomes(tmp_path / "results.jsonl")] == ["ok 1", "ok 2"]


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    plan = plan_of(tmp_path, "ok 1", "ok 2")
    launch(plan, folder=tmp_path, timeout_s=HANG_S, module=WORKER, progress=lambda *it: told.append(it))
    assert told[-1] == (2, 2, "")


def test_what_ranks_print_goes_to_their_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "ok")
    assert ((tmp_path / "rank1.log").read_text(), capfd.readouterr()) == ("rank 1 is here\n", ("", ""))


TELL = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""


def test_ranks_get_torchruns_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan = plan_of(tmp_path)
    launch(plan, folder=tmp_path, timeout_s=HANG_S, module="tell")
    seen = msgspec.json.decode((tmp_path / "plan.json1").read_bytes())
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "NCCL_NVLS_ENABLE": "0"}
    assert (place.items() <= seen.items(), int(seen["MASTER_PORT"]) > 1023) == (True, True)


ENDINGS = [
    ("rank1: kill 9", PeerTimeout, r"rank 1 was killed by SIGKILL .* in scenario 'rank1: kill 9'; log: .*/rank1.log"),
    ("rank0: kill 11", PeerTimeout, r"rank 0 was killed by SIGSEGV in scenario"),
    ("all: raise RuntimeError", PeerTimeout, r"ranks 0, 1 failed in scenario '.*': RuntimeError: needs 12 GiB"),
    ("all: raise Misconfigured", Misconfigured, r"^needs 12 GiB, there are 8 \(ranks 0, 1 in scenario '.*'\)$"),
    ("rank1: raise Unsupported", Unsupported, r"^needs 12 GiB, there are 8 \(rank 1 in scenario '.*'\)$"),
    ("rank1: exit 3", PeerTimeout, r"rank 1 exited with 3 in scenario '.*': the last line of the log; log: "),
]


@pytest.mark.parametrize(("name", "kind", "text"), ENDINGS, ids=[name for name, *_ in ENDINGS])
def test_a_rank_that_ends_badly_is_named(tmp_path: Path, name: str, kind: type[Exception], text: str) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        run(tmp_path, "ok", name)
    assert ("\n" in str(caught.value), time.monotonic() - began < SOON_S) == (False, True)


@pytest.mark.parametrize("name", ["rank1: kill 9", "all: raise RuntimeError", "rank0: hang", "rank1: stop"])
def test_no_rank_is_left(tmp_path: Path, name: str) -> None:
    ending(tmp_path, "ok", name, timeout_s=QUIET_S)
    assert [len(pids(tmp_path)), *map(runs, pids(tmp_path))] == [2, False, False]


def test_a_hang_names_where_each_rank_was(tmp_path: Path) -> None:
    error = ending(tmp_path, "ok", "rank0: hang", timeout_s=QUIET_S)
    text = r"no progress for 5 s in scenario 'rank0: hang': rank 0 was in act \(fake_worker.py:\d+\); rank 1 was in"
    assert re.search(text, str(error))


def test_a_stopped_rank_is_told_from_one_that_waits(tmp_path: Path) -> None:
    assert "rank 1 did not answer (stopped" in str(ending(tmp_path, "ok", "rank1: stop", timeout_s=QUIET_S))


def test_finished_scenarios_are_kept(tmp_path: Path) -> None:
    ending(tmp_path, "ok 1", "rank1: kill 9", "ok 2")
    assert [outcome.scenario for outcome in read_outcomes(tmp_path / "results.jsonl")] == ["ok 1"]


PARENT = """
import sys
from pathlib import Path
from tests.process.measurement.test_launch import run
run(Path(sys.argv[1]), "ok", "all: hang")
"""


@pytest.fixture(name="parent")
def parent_fixture(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has launched two ranks, which hang."""
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + HANG_S
    while len(pids(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_orphans_whatever_ends_the_parent(
    tmp_path: Path, parent: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    ranks = pids(tmp_path)
    parent.send_signal(number)
    parent.wait(SOON_S)
    assert (len(ranks), wait_until_gone(ranks)) == (2, [])


def test_a_rank_whose_parent_died_before_it_asked_ends_itself() -> None:
    code = "from counterpoint.measurement.worker import die_with_parent; die_with_parent(); print('alive')"
    variables = {**os.environ, "COUNTERPOINT_PARENT_PID": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
