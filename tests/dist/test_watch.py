"""`counterpoint.watch` beside trainings of four gloo ranks."""

import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import counterpoint
from counterpoint.measurement.session import Session
from counterpoint.monitoring import beside
from counterpoint.monitoring.api import TrainingWatch
from counterpoint.monitoring.exporters import JsonLines, Prometheus
from counterpoint.records.diagnosis import WatchedStep
from counterpoint.rehearsed import rank_variables
from tests.support.ranks import Ranks

# In a training what diagnoses gives way to everybody; on two busy cores it would never come to its turn here.
beside.COMMAND = (*beside.COMMAND[:2], beside.COMMAND[2].replace("os.nice(19); ", ""))
STALL_S = 0.5  # far more than four ranks on two busy cores wait for each other


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> list[str]:
        logging.getLogger("counterpoint.watch").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("counterpoint.watch").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Planted(Exception):
    """The training's own failure."""


@contextmanager
def scratch(folder: str) -> Iterator[Callable[[], list[str]]]:
    """Have temporary files made in a folder; yields what says which are left, with the processes beside this one."""
    path = Path(folder, "scratch")
    path.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    try:
        yield lambda: [found.name for found in path.glob("counterpoint-*")] + children()
    finally:
        tempfile.tempdir = before


def children() -> list[str]:
    """Command lines of the processes beside this one."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, check=False)
    return [line for line in listed.stdout.decode().splitlines() if "counterpoint.monitoring" in line]


def trained(
    watched: AbstractContextManager[Any],
    *,
    steps: int,
    stall_s: float = 0.0,
    at: Mapping[int, Callable[[], object]] | None = None,
) -> None:
    """Train a small model; something holds up every step on the last rank; calls of `at` come after their step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watched:
        for step in range(1, steps + 1):
            if stall_s and dist.get_rank() == dist.get_world_size() - 1:
                with record_function("tokenizer.encode"):
                    time.sleep(stall_s)
            model(torch.randn(64, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            (at or {}).get(step, int)()
        if isinstance(watched, TrainingWatch) and not at:
            watched.close(linger=240.0)  # machines may be busy, and what diagnoses is nice to everybody


def planted_stall(session: Session, folder: str) -> tuple[list[str], list[str]]:
    """Train with a stall; return what is logged and what is left."""
    export: list[Callable[[WatchedStep], None]] = [
        JsonLines(Path(folder, "watch.jsonl")),
        Prometheus(Path(folder, "job.prom")),
    ]
    with Lines() as lines, scratch(folder) as left:
        trained(counterpoint.watch(every=10, export=export), steps=10, stall_s=STALL_S)
        dist.barrier()
        return lines, left()


def shared_folder(session: Session, folder: str, rehearsed: bool) -> tuple[list[str], list[str]]:
    """Train as on two hosts of two ranks with a common folder; return what is logged and what is left in the folder."""
    place = {"LOCAL_RANK": str(dist.get_rank() % 2), "LOCAL_WORLD_SIZE": "2"}
    if rehearsed:
        place = rank_variables(dist.get_rank(), ranks_per_host=2, gpus=("0",))
    with patch.dict(os.environ, place), Lines() as lines:
        trained(counterpoint.watch(every=10, folder=folder), steps=10)
    dist.barrier()
    return lines, [path.name for path in Path(folder).iterdir()]


def exception(session: Session, folder: str, step: int) -> tuple[list[str], list[str]]:
    """Fail at a step, as of step 10 with a diagnosis under way; return what is logged and what is left."""

    def fail() -> None:
        dist.barrier()  # a rank that fails takes its host's folder away from ranks that are still recording
        raise Planted

    with Lines() as lines, scratch(folder) as left:
        try:
            trained(counterpoint.watch(every=10), steps=20, at={step: fail})
        except Planted:
            lines.append("planted")
        dist.barrier()
        return lines, left()


def beside_by(code: str) -> Any:
    """What diagnoses beside a training runs this code instead."""
    return patch.object(beside, "COMMAND", (sys.executable, "-c", code))


def busy(session: Session) -> list[str]:
    def end() -> None:
        dist.barrier()
        watch.close(linger=0.0)

    with beside_by("import time; time.sleep(600)"), Lines() as lines:
        watch = counterpoint.watch(every=10)
        trained(watch, steps=20, at={20: end})
    return lines + children()


def broken(session: Session) -> list[str]:
    with beside_by("import sys; sys.exit('out of luck')"), Lines() as lines:
        trained(counterpoint.watch(every=10), steps=12)
    return lines


def another_profiler(session: Session, first: int, last: int) -> tuple[list[str], int]:
    """Use a profiler of one's own on rank 1 after steps `first` to `last`; return what is logged and what it saw."""
    own = profile(activities=[ProfilerActivity.CPU], acc_events=True)
    at = {first: own.start, last: own.stop} if dist.get_rank() == 1 else {}
    with Lines() as lines:
        trained(counterpoint.watch(every=10), steps=14, at=at)
    return lines, len(own.events()) if at else 0


def only_one_rank(session: Session) -> list[str]:
    """Watch on rank 0 alone: a mistake, which must not hold up the others."""
    with Lines() as lines:
        trained(counterpoint.watch(every=10) if dist.get_rank() == 0 else nullcontext(), steps=12)
    return lines


def own_counts(session: Session) -> list[int]:
    """Count by two optimizers, by calls, and by both."""
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    counts = []
    for optimizers, calls in (([one, other], False), ([], True), ([one, other], True)):
        with counterpoint.watch(every=100) as watch:
            for _ in range(5):
                for optimizer in optimizers:
                    optimizer.step()
                if calls:
                    watch.step()
        counts.append(watch.count)
    return counts


def test_a_planted_stall_stands_in_the_log(four_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 says within the window who is late and by how much; the exporters say the same, and nothing is left."""
    logged, left = zip(*four_ranks.run(planted_stall, str(tmp_path)), strict=True)
    assert (logged[1:], left) == (([], [], []), ([], [], [], []))
    found = re.fullmatch(r"step 10: \d+ ms, \d+ % hidden, rank 3 late (\d+) ms: .+", *logged[0])
    assert found is not None, logged[0]
    assert int(found[1]) > 0.5e3 * STALL_S
    (record,) = [
        msgspec.json.decode(line, type=WatchedStep) for line in (tmp_path / "watch.jsonl").read_bytes().splitlines()
    ]
    assert (record.line, record.step, record.ranks, record.late_rank) == (logged[0][0], 10, (0, 1, 2, 3), 3)
    gauges = dict(line.rsplit(" ", 1) for line in (tmp_path / "job.prom").read_text().splitlines() if line[0] != "#")
    assert float(gauges["counterpoint_step_seconds"]) == pytest.approx(record.step_us / 1e6)
    assert any(key.startswith('counterpoint_late_seconds{rank="3",cause=') for key in gauges)


def test_a_given_folder_is_left_empty(four_ranks: Ranks, tmp_path: Path) -> None:
    answers = four_ranks.run(shared_folder, str(tmp_path), False)
    assert [re.match(r"step 10: \d", line) is not None for line in answers[0][0]] == [True]
    assert {tuple(left) for _, left in answers} == {()}


def test_a_rehearsal_is_watched_under_a_mark(four_ranks: Ranks, tmp_path: Path) -> None:
    """Its ranks share a GPU, whose index LOCAL_RANK is: who is on which host is known all the same; times are not."""
    first, *others = four_ranks.run(shared_folder, str(tmp_path), True)
    assert [line.partition("): ")[0] for line in first[0]] == ["step 10 (rehearsed: times do not hold"]
    assert [lines for lines, _ in others] == [[], [], []]


@pytest.mark.parametrize("step", [4, 9, 10, 11], ids=["between", "recording", "recorded", "diagnosing"])
def test_an_exception_passes(four_ranks: Ranks, tmp_path: Path, step: int) -> None:
    """The training's own failure comes through, wherever the watch is, and leaves no process and no file."""
    for logged, left in four_ranks.run(exception, str(tmp_path), step):
        assert (logged[-1], left) == ("planted", [])
        assert not any("not diagnosed" in line for line in logged)


def test_one_diagnosis_at_a_time(four_ranks: Ranks) -> None:
    """While one is under way the next round is given up in so many words; the end of the watch ends it."""
    first, *others = four_ranks.run(busy)
    assert first == ["step 17: not diagnosed: the diagnosis before is still under way"]
    assert others == [[], [], []]


def test_a_failed_diagnosis_is_one_warning(four_ranks: Ranks) -> None:
    assert four_ranks.run(broken) == [["step 10: not diagnosed: out of luck"], [], [], []]


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (5, 8, "step 7: not diagnosed: another profiler is in use"),
        (8, 12, "step 8: not diagnosed: another profiler was started"),
    ],
    ids=["before", "during"],
)
def test_another_profiler_comes_first(four_ranks: Ranks, first: int, last: int, why: str) -> None:
    """The training's own profiler sees what it asked for; that rank's round is given up, the others' is not."""
    answers = four_ranks.run(another_profiler, first, last)
    assert answers[1][0] == [why]
    assert answers[1][1] > 0
    assert re.match(r"step 10 \(3 of 4 ranks\): ", *answers[0][0])


def test_one_rank_alone_does_not_hold_up_the_others(two_ranks: Ranks) -> None:
    """A watch on rank 0 only is a mistake that costs no collective."""
    logged = two_ranks.run(only_one_rank)
    assert logged[1] == []
    assert re.match(r"step 10 \(1 of 2 ranks\): ", *logged[0])


def test_steps_are_counted_once(two_ranks: Ranks) -> None:
    """Of two optimizers one counts; who calls `step` is counted by that alone."""
    assert two_ranks.run(own_counts) == [[5, 5, 5], [5, 5, 5]]
