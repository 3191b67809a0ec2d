"""Who reads the ranks makes no difference: this process, two others, or a Dask cluster; nor to what goes wrong."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.diagnosis.api import diagnose
from counterpoint.diagnosis.reading import digest as digests
from counterpoint.diagnosis.reading.digest import Engine, digest_all
from counterpoint.errors import BadTrace, CounterpointError, Misconfigured, Unsupported
from counterpoint.trace.source import Limits, TraceFile
from tests.support import kineto_trace as kt
from tests.support.command import program


def endless(folder: Path, ranks: int) -> list[TraceFile]:
    """Files whose readers wait for ever: pipes that nobody writes to."""
    files = []
    for rank in range(ranks):
        os.mkfifo(folder / f"rank{rank}.json")
        files.append(TraceFile(path=folder / f"rank{rank}.json", label=f"rank{rank}.json", format="kineto"))
    return files


def test_a_reader_that_dies_is_an_error_in_words(tmp_path: Path) -> None:
    """Killed, as for want of memory: no BrokenProcessPool, but what happened and what to do."""

    files = endless(tmp_path, 2)
    others = set(multiprocessing.active_children())  # ranks and workers of other tests

    def kill_one() -> None:
        with (tmp_path / "rank0.json").open("wb"), (tmp_path / "rank1.json").open("wb"):  # open once their readers have
            (set(multiprocessing.active_children()) - others).pop().kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(CounterpointError, match=r"process that read a rank died.*--workers 1"):
        digest_all(files, Limits(), Engine(workers=2))
    killer.join()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a scheduler with one worker process."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as made:
        yield made.scheduler_address


@pytest.fixture(params=["processes", "dask"])
def apart(request: pytest.FixtureRequest) -> Engine:
    if request.param == "dask":
        return Engine(name="dask", scheduler=request.getfixturevalue("cluster"))
    return Engine(workers=2)


def test_every_engine_gives_the_same_diagnosis(apart: Engine, tmp_path: Path) -> None:
    job = kt.write_job(tmp_path, ranks=3)
    assert diagnose(job, engine=apart).diagnosis == diagnose(job, engine=Engine(workers=1)).diagnosis


def test_a_bad_trace_arrives_as_it_was_raised(apart: Engine, tmp_path: Path) -> None:
    """File, reason and byte offset cross the boundary of the process; of two bad files the first is named."""
    job = kt.write_job(tmp_path, ranks=4)
    for rank in (1, 2):
        kt.write_bytes(job / f"rank{rank}.json", kt.text(kt.training(rank=rank))[:-50])
    raised = []
    for engine in (Engine(workers=1), apart):
        with pytest.raises(BadTrace) as caught:
            diagnose(job, engine=engine)
        raised.append((caught.value.path, caught.value.reason, caught.value.offset))
    assert raised[0] == raised[1]
    assert raised[0][0] == str(job / "rank1.json")


def test_progress_counts_the_files(apart: Engine, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    diagnose(kt.write_job(tmp_path), engine=apart, progress=lambda done, total, what: told.append((done, total)))
    assert (2, 2) in told


def test_a_plain_script_may_call_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, counterpoint\nfrom counterpoint.diagnosis.reading.digest import Engine\n"
        "print(counterpoint.diagnose(sys.argv[1], engine=Engine(workers=2)).diagnosis.ranks)\n"
    )
    job = kt.write_job(tmp_path / "job", ranks=3)
    done = program([sys.executable, script, job])
    assert (done.stdout, done.stderr) == ("(0, 1, 2)\n", "")


def test_an_interrupt_ends_readers_without_a_word(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal; only the parent may say so."""
    endless(tmp_path, 2)
    script = (
        "import sys; from pathlib import Path\n"
        "from counterpoint.diagnosis.reading.digest import *; from counterpoint.trace.source import *\n"
        "files = [TraceFile(path=p, label='x', format='kineto') for p in Path(sys.argv[1]).iterdir()]\n"
        "try: digest_all(files, Limits(), Engine(workers=2))\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with (tmp_path / "rank0.json").open("wb"), (tmp_path / "rank1.json").open("wb"):  # open once their readers have
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate()
    assert (out, "Traceback" in err, "SpawnProcess" in err) == ("interrupted\n", False, False), err


def test_no_scheduler(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no Dask scheduler answers"):
        diagnose(kt.write_job(tmp_path), engine=Engine(name="dask", scheduler="nonsense://nowhere:1"))


def test_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(Unsupported, match=r"counterpoint\[cluster\]"):
        diagnose(kt.write_job(tmp_path), engine=Engine(name="dask", scheduler="tcp://127.0.0.1:1"))


def test_small_jobs_are_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_in_processes", None)
    assert diagnose(kt.write_job(tmp_path)).diagnosis.ranks == (0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "spark"}, {"name": "dask"}, {"scheduler": "tcp://h:1"}, {"workers": 0},
        {"name": "dask", "scheduler": "tcp://h:1", "workers": 2},
    ],
)  # fmt: skip
def test_options_that_cannot_take_effect(options: dict[str, object]) -> None:
    with pytest.raises(Misconfigured):
        Engine(**options)  # type: ignore[arg-type]
