"""At the command line a bad trace is one line on stderr, exit code 2, and nothing written."""

import gzip
import resource
import subprocess
from pathlib import Path

import pytest

from tests.support import kineto_trace as kt
from tests.support.command import COUNTERPOINT, HANG_S, Ended, counterpoint

MAIN = [*COUNTERPOINT, "diagnose"]
WHOLE = kt.text(kt.training())
BAD = {
    "truncated.json": WHOLE[:-100],
    "truncated.json.gz": gzip.compress(WHOLE)[:-100],
    "checksum.json.gz": gzip.compress(WHOLE)[:-8] + bytes(8),
    "text.txt": b"no trace",
    "negative.json": kt.text([kt.kernel("k", -1.0, 1.0)]),
    "\x1b[31mred.json": b"",
}


def run(*arguments: object) -> Ended:
    return counterpoint("diagnose", *arguments)


@pytest.mark.parametrize("name", BAD)
def test_one_line_and_exit_code_2(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(BAD[name])
    outputs = [tmp_path / "report.html", tmp_path / "perfetto.json", tmp_path / "d.json"]
    done = run(path, "--out", outputs[0], "--perfetto", outputs[1], "--json", outputs[2])
    line = done.stderr.removesuffix("\n")
    assert (done.returncode, done.stdout, line.startswith("counterpoint: "), line.isprintable()) == (2, "", True, True)
    assert list(tmp_path.iterdir()) == [path]


def test_a_worker_process_reports_like_its_parent(tmp_path: Path) -> None:
    kt.write_job(tmp_path / "job")
    bad = kt.write_bytes(tmp_path / "job" / "rank1.json", WHOLE[:-100])
    alone, together = run(bad), run(tmp_path / "job", "--workers", 2)
    assert (together.returncode, together.stderr) == (2, alone.stderr)


@pytest.mark.parametrize(
    "middle",
    [bytes(1 << 20), b" " * (1 << 20), b'{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1},\n' * (1 << 14)],
    ids=["zeros", "spaces", "events"],
)
def test_a_bomb_costs_little(middle: bytes, tmp_path: Path) -> None:
    """A file of 20 MB or less that would expand to 20 GB is given up within 1 GiB of memory and seconds."""
    block, parts = gzip.compress(middle), 20_000_000
    with (tmp_path / "bomb.json.gz").open("wb") as file:
        file.write(gzip.compress(b'{"traceEvents": ['))
        for _ in range(min(20 * (1 << 10), parts // len(block))):
            file.write(block)
    done = subprocess.run(
        [*MAIN, str(tmp_path / "bomb.json.gz"), "--max-trace-gb", "0.1"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30)),
    )
    assert (done.returncode, done.stderr.count("\n"), "bomb.json.gz: " in done.stderr) == (2, 1, True), done.stderr


@pytest.mark.parametrize("limit", ["nan", "inf", "1e308"])
def test_a_limit_beyond_all_memory_is_one_line(limit: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--max-trace-gb", limit)
    assert (done.returncode, done.stderr.splitlines()) == (
        2, [f"counterpoint: --max-trace-gb {float(limit)}: give GiB of memory, such as 64"]
    )  # fmt: skip


def test_missing_ranks_are_no_error(tmp_path: Path) -> None:
    (kt.write_job(tmp_path, ranks=3) / "rank1.json").unlink()
    done = run(tmp_path)
    assert (done.returncode, "no trace of rank 1 (of 3 ranks)" in " ".join(done.stdout.split())) == (0, True), (
        done.stdout
    )
