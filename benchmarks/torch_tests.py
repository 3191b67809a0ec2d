"""Run PyTorch's own distributed tests on backend `counterpoint`, beside the backend that they are written for.

    python benchmarks/torch_tests.py ~/pytorch --out results/torch-tests-cpu.json

PATH is a checkout of pytorch at the tag of the installed torch. Each file runs as it is, with gloo (with GPUs: NCCL).
Then the tests that passed run again, unmodified, with `counterpoint` wherever the backend is asked for by name, and
with communicators that take every call they can. A test that hangs or crashes fails alone. One that does not pass runs
once more, since some of these tests share ports; if it passes then, it counts, and is named.

Prints, and writes, how many passed and which did not; exits with 1 if fewer than 99 % did. Tests that make no group are
not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exchanged_backend import VARIABLE
from provenance import gpu_provenance, provenance, write_result
from step_rig import NO_MULTICAST
from tables import print_table

FILES = (
    "test_distributed_spawn.py",
    "test_c10d_common.py",
    "test_c10d_gloo.py",
    "test_c10d_spawn_gloo.py",
    "test_c10d_object_collectives.py",
    "test_c10d_functional_native.py",
    "test_functional_api.py",
    "test_pg_wrapper.py",
    "test_device_mesh.py",
    "test_collective_utils.py",
    "_composable/test_replicate.py",
    "algorithms/test_join.py",
    "optim/test_zero_redundancy_optimizer.py",
    "checkpoint/test_file_system_checkpoint_cpu.py",
    "pipelining/test_schedule_multiproc.py",
    "tensor/test_api.py",
    "tensor/test_dtensor.py",
    "tensor/test_embedding_ops.py",
    "tensor/test_experimental_ops.py",
    "tensor/test_init.py",
    "tensor/test_math_ops.py",
    "tensor/test_matrix_ops.py",
    "tensor/test_optimizers.py",
    "tensor/test_random_ops.py",
    "tensor/test_redistribute.py",
    "tensor/test_tensor_ops.py",
    "tensor/test_utils.py",
    "tensor/parallel/test_parallelize_api.py",
    "tensor/parallel/test_tp_examples.py",
    "tensor/parallel/test_tp_style.py",
)
COLUMNS = (
    "file",
    "tests",
    "passed by {base}, with a group",
    "of these by counterpoint",
    "calls",
    "taken by a communicator",
    "not passed",
    "passed at the second try",
)
LEAST = 0.99
NAME = "asks whether the group's name is gloo"
BARRIER = "torch has `monitored_barrier` for groups whose name is gloo only"
EXPECTED = {  # why a test cannot pass
    "test_get_backend": NAME,
    "test_init_process_group_for_all_backends": NAME,
    "test_monitored_barrier": BARRIER,
    "test_monitored_barrier_gloo": BARRIER,
    "test_monitored_barrier_gloo_subgroup": BARRIER,
}


@dataclass
class Outcome:
    """Holds what a file's tests did on both backends.

    Args:
        file: its path below test/distributed.
        base: by test, what it did on the backend that it is written for.
        ours: by test that passed there, what it did on `counterpoint`, and its error.
        calls: by way, how many calls of the backend the tests made; `group`: how many groups.
        with_group: tests that made a group of the backend, and classes that made one for all their tests.
    """

    file: str
    base: dict[str, dict[str, str]] = field(default_factory=dict)
    ours: dict[str, dict[str, str]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    with_group: set[str] = field(default_factory=set)

    @property
    def passed(self) -> list[str]:
        """Return the tests that passed on the backend that they are written for, and make a group."""
        return [test for test in self.ours if {test, test.partition("::")[0]} & self.with_group]

    @property
    def retried(self) -> list[str]:
        """Return those of them that passed on `counterpoint` at the second try only."""
        return [test for test in self.passed if test not in self.missing and "first" in self.ours[test]]

    @property
    def missing(self) -> list[str]:
        """Return those of them that did not pass on `counterpoint`."""
        return [test for test in self.passed if self.ours[test]["outcome"] != "passed"]


class Runner:
    """Runs tests of a checkout of pytorch, in one process of pytest for each job, which is replaced if a test hangs.

    Args:
        path: the checkout.
        device: cpu or cuda.
        ranks: how many processes a test of `distributed_test.py` starts; most others have a number of their own.
        seconds: most that a test may take.
        folder: where logs go.
        jobs: how many of a file's tests run at the same time.
    """

    def __init__(self, path: Path, device: str, ranks: int, seconds: float, folder: Path, jobs: int = 1) -> None:
        self.tests = (path / "test" / "distributed").resolve()
        self.device, self.ranks, self.seconds, self.folder, self.jobs = device, ranks, seconds, folder, jobs
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "site").mkdir(exist_ok=True)
        (folder / "site" / "sitecustomize.py").write_text("import exchanged_backend\n")

    @property
    def base(self) -> str:
        """Return the name of the backend that the tests are written for."""
        return "gloo" if self.device == "cpu" else "nccl"

    @property
    def exchanged(self) -> list[str]:
        """Return the names in whose place `counterpoint` is asked for."""
        config = ["cpu:gloo"] if self.device == "cpu" else ["cuda:nccl", "cpu:gloo,cuda:nccl"]
        return [self.base, "undefined", *config]

    def names(self, file: str) -> dict[str, bool]:
        """Return the tests of a file, and whether they use ranks that their class started."""
        found = self.folder / f"{_flat(file)}.names"
        with self._pytest(file, {"list": str(found)}, ["--collect-only", file], "collect") as process:
            process.wait(timeout=300)
        listed = json.loads(found.read_text()) if found.exists() else []
        return {name.partition("::")[2]: shared for name, shared in listed}

    def run(self, file: str, names: Sequence[str], *, ours: bool, calls: Path) -> dict[str, dict[str, str]]:
        """Return what each test did: passed, failed, skipped, hung or crashed."""
        shares = [names[number :: self.jobs] for number in range(min(self.jobs, len(names)))]
        with ThreadPoolExecutor(self.jobs) as pool:
            done = list(pool.map(lambda job: self._share(file, job, shares[job], ours, calls), range(len(shares))))
        results = {name: result for share in done for name, result in share.items()}
        return {name: results.get(name, {"outcome": "crashed", "text": "not run"}) for name in names}

    def _share(self, file: str, job: int, names: Sequence[str], ours: bool, calls: Path) -> dict[str, dict[str, str]]:
        """Return what those tests did that are a job's."""
        way, left = "counterpoint" if ours else self.base, list(names)
        results: dict[str, dict[str, str]] = {}
        log = self.folder / f"{_flat(file)}.{way}.{job}.jsonl"
        while left:
            log.unlink(missing_ok=True)
            asked = {"results": str(log), "fork": self.device == "cpu"}
            if ours:
                asked |= {"names": self.exchanged, "calls": str(calls)}
            with self._pytest(file, asked, [f"{file}::{name}" for name in left], f"{way}.{job}") as process:
                hung = self._wait(process, log)
            ended, running = _read(log)
            if not ended and running is None:
                return results | {name: {"outcome": "crashed", "text": "no test started"} for name in left}
            results |= ended
            if running is not None:
                results[running] = {"outcome": "hung" if hung else "crashed", "text": ""}
            left = [name for name in left if name not in results] if running is not None else []
        return results

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> bool:
        """Wait until pytest has ended or a test takes too long; return whether one did."""
        begin, size = time.monotonic(), -1
        while process.poll() is None:
            now = log.stat().st_size if log.exists() else 0
            if now != size:
                begin, size = time.monotonic(), now
            if time.monotonic() - begin > self.seconds + 30:  # torch ends its own after `seconds`
                return True
            time.sleep(0.2)
        return False

    @contextlib.contextmanager
    def _pytest(
        self, file: str, asked: dict[str, Any], arguments: list[str], way: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start pytest in a session of its own, all of which is ended with it."""
        root = Path(__file__).resolve().parents[1]
        paths = [
            self.folder / "site",
            root / "benchmarks",
            root / "src",
            self.tests.parent,
            self.tests,
            (self.tests / file).parent,
        ]
        with tempfile.TemporaryDirectory() as scratch, (self.folder / f"{_flat(file)}.{way}.log").open("ab") as log:
            for name in ("barrier", "test_dir", "init_dir"):  # what torch's run_test.py makes
                (Path(scratch) / name).mkdir()
            environment = (
                os.environ
                | NO_MULTICAST
                | {
                    "PYTHONPATH": os.pathsep.join(map(str, paths)),
                    VARIABLE: json.dumps(asked),
                    "BACKEND": self.base,
                    "WORLD_SIZE": str(self.ranks),
                    "TEMP_DIR": scratch,
                    "INIT_METHOD": "env://",
                    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(self.seconds)),
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_ADDR2LINE": "1",
                }
            )
            if self.device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            command = [sys.executable, "-m", "pytest", "-q", "-p", "exchanged_backend", "-p", "no:cacheprovider",
                       "--noconftest", "-c", os.devnull, "--rootdir", str(self.tests), *arguments]  # fmt: skip
            process = subprocess.Popen(
                command, cwd=self.tests, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _flat(file: str) -> str:
    return file.replace("/", ".")


def _read(log: Path) -> tuple[dict[str, dict[str, str]], str | None]:
    """Return what the tests in a log did, and the one that had started but not ended."""
    ended: dict[str, dict[str, str]] = {}
    running = None
    for line in log.read_text().splitlines() if log.exists() else []:
        row = json.loads(line)
        name = row["test"].partition("::")[2]
        if row["kind"] == "start":
            running = name
        else:
            running = None
            ended[name] = {"outcome": row["outcome"], "text": row["text"]}
    return ended, running


def measure(runner: Runner, file: str, parts: Sequence[tuple[int, int]], only: str | None) -> Outcome:
    """Run a file's tests on both backends."""
    begin, outcome = time.monotonic(), Outcome(file)
    shared = runner.names(file)
    names = [name for name in shared if only is None or only in name]
    if parts:
        names = [name for name in names if any(zlib.crc32(name.encode()) % of == part - 1 for part, of in parts)]
    calls = runner.folder / f"{_flat(file)}.calls"
    calls.unlink(missing_ok=True)
    outcome.base = runner.run(file, names, ours=False, calls=calls)
    passed = [name for name, result in outcome.base.items() if result["outcome"] == "passed"]
    outcome.ours = runner.run(file, passed, ours=True, calls=calls)
    again = [name for name, result in outcome.ours.items() if result["outcome"] != "passed"]
    for name, result in runner.run(file, again, ours=True, calls=calls).items():
        outcome.ours[name] = result | {"first": outcome.ours[name]["text"]}
    for line in calls.read_text().splitlines() if calls.exists() else []:
        test, _, way = line.rpartition("\t")
        outcome.calls["taken" if way in ("zero_sm", "hosts") else way] += 1
        name = test.partition("::")[2].rpartition(" ")[0]  # pytest adds "(call)"
        outcome.with_group.add(name.partition("::")[0] if shared.get(name) else name)
    print(
        f"{file}: {len(passed)} of {len(names)} pass on {runner.base}, {len(outcome.passed)} of them make a group, "
        f"{len(outcome.missing)} of these not on counterpoint ({time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    for test in outcome.missing:
        print(f"  {outcome.ours[test]['outcome']}: {_explained(test)}", flush=True)
    return outcome


def report(outcomes: Sequence[Outcome], base: str) -> tuple[list[str], list[list[str]], float]:
    """Return a table's head and rows, and which part of the tests passed."""
    rows = [
        [
            one.file,
            str(len(one.base)),
            str(len(one.passed)),
            str(len(one.passed) - len(one.missing)),
            str(one.calls["taken"] + one.calls["torch"]),
            str(one.calls["taken"]),
            "; ".join(map(_explained, one.missing)),
            ", ".join(map(_short, one.retried)),
        ]
        for one in outcomes
    ]
    passed, missing = sum(len(one.passed) for one in outcomes), sum(len(one.missing) for one in outcomes)
    total = ["all", *(str(sum(int(row[column]) for row in rows)) for column in range(1, 6)), str(missing), ""]
    return [column.format(base=base) for column in COLUMNS], [*rows, total], 1 - missing / max(passed, 1)


def _version(path: Path) -> str | None:
    """Return the version of a checkout of pytorch."""
    file = path / "version.txt"
    return file.read_text().strip() if file.exists() else None


def _short(test: str) -> str:
    return test.rpartition("::")[2]


def _explained(test: str) -> str:
    """Return a test's name, and why it cannot pass."""
    return f"{_short(test)} ({EXPECTED.get(_short(test), 'unexplained')})"


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    return int(number), int(count)


def main() -> int:
    """Run the tests that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a checkout of pytorch at the tag of the installed torch")
    parser.add_argument(
        "--files", nargs="+", default=FILES, help="below test/distributed; those that are absent: left out"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="tests at the same time")
    parser.add_argument("--ranks", type=int, help="of the tests of distributed_test.py; 4, with GPUs 2")
    parser.add_argument("--seconds", type=float, default=60.0, help="most that a test may take")
    parser.add_argument(
        "--parts", type=_part, nargs="+", default=(), help="2/4: the second of four parts, drawn by the tests' names"
    )
    parser.add_argument("--only", help="tests whose names contain this")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "counterpoint-torch-tests")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON, and its table next to it")
    asked = parser.parse_args()
    ranks = asked.ranks or (4 if asked.device == "cpu" else 2)
    runner = Runner(asked.path, asked.device, ranks, asked.seconds, asked.logs, asked.jobs)
    files = [file for file in asked.files if (runner.tests / file).is_file()]
    outcomes = [measure(runner, file, asked.parts, asked.only) for file in files]
    columns, rows, share = report(outcomes, runner.base)
    print_table(columns, rows)
    absent = ", ".join(sorted(set(asked.files) - set(files))) or "no file"
    print(f"{share:.2%} of what passes on {runner.base} passes on counterpoint; absent: {absent}")
    if asked.out:
        facts = provenance(["torch"]) if asked.device == "cpu" else gpu_provenance(["torch"], world_size=2)
        tests = {
            one.file: {
                "base": one.base,
                "counterpoint": one.ours,
                "calls": one.calls,
                "with_group": sorted(one.with_group),
            }
            for one in outcomes
        }
        write_result(
            asked.out,
            {"provenance": facts, "checkout": _version(asked.path), "share": share, "tests": tests},
            columns,
            rows,
        )
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
