"""`counterpoint measure` for real: two ranks with gloo, from the command line to the files; every way to stop it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.measurement import Measurement
from tests.support.command import HANG_S, program

COMMAND = (sys.executable, "-c", "from counterpoint.cli import main; main()", "measure")
QUICK = ("quick", "--device", "cpu", "--rounds", "6")
VARIABLES = {key: value for key, value in os.environ.items() if key != "RANK"}


def measure(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return program([*COMMAND, *arguments], variables=VARIABLES | variables)


def started(*arguments: str | Path, logs: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=VARIABLES | {"TMPDIR": str(logs)},
    )


def ranks_of(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def wait_for_an_outcome(process: subprocess.Popen[str], logs: Path) -> None:
    until = time.monotonic() + HANG_S
    while process.poll() is None and time.monotonic() < until:
        if any(path.stat().st_size for path in logs.glob("counterpoint-measure-*/results.jsonl")):
            return
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + HANG_S
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_rank_that_dies_ends_the_run_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """Exit 2; the line names rank, signal and pair; the other rank is gone."""
    process = started(*QUICK, "--out", tmp_path / "x.json", logs=tmp_path)
    wait_for_an_outcome(process, tmp_path)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], number)
    _, stderr = process.communicate(timeout=HANG_S)
    told = stderr.startswith(f"counterpoint: rank 1 was killed by {number.name}") and "in scenario 'gemm" in stderr
    assert (process.returncode, told, stderr.count("\n"), gone(ranks)) == (2, True, 1, True)


def test_ctrl_c_ends_with_130_one_line_and_no_rank(tmp_path: Path) -> None:
    """After the first pair; neither a result nor a log is left (torch may leave a folder for its compiler)."""
    out, logs = tmp_path / "results", tmp_path / "logs"
    out.mkdir()
    logs.mkdir()
    process = started(*QUICK, "--out", out / "x.json", logs=logs)
    wait_for_an_outcome(process, logs)
    ranks = ranks_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr) == (130, "counterpoint: stopped by SIGINT\n")
    assert (len(ranks), gone(ranks), [*out.iterdir(), *logs.glob("counterpoint*")]) == (2, True, [])


def test_a_run_that_ends_well_says_so(tmp_path: Path) -> None:
    """Exit 0 and nothing on stderr, which is no terminal; on stdout the ladders, and a last line of JSON."""
    asked = (*QUICK, "--out", str(tmp_path / "x.json"), "--html", str(tmp_path / "x.html"))
    done = measure(*asked)
    assert (done.returncode, done.stderr) == (0, "")
    rungs = ("compute alone", "gloo alone", "0.00 serial", "1.00 ideal")
    assert [done.stdout.count(rung) for rung in rungs] == [4] * 4
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["suite"], line["rows"], list(line["hidden"])) == ("quick", 12, ["gloo"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.html", "x.json", "x.md"]
    measured = msgspec.json.decode((tmp_path / "x.json").read_bytes(), type=Measurement)
    assert measured.environment.command[1:] == ("measure", *asked)
    assert len(measured.rows) == len({(row.scenario, row.order) for row in measured.rows}) == 12
    rows = [row for row in measured.rows if row.order == "together"]  # where nothing started ahead
    assert [row.hidden for row in rows] == pytest.approx(
        [(r.serial_us - r.together.us) / min(r.compute_alone.us, r.best_comm_alone_us) for r in rows]
    )


def test_matmuls_are_measured_on_cpus(tmp_path: Path) -> None:
    """The suite `tensor` in small, to the table and the last line."""
    out = tmp_path / "x.json"
    done = measure(
        "tensor", "--device", "cpu", "--rounds", "5", "--mechanism", "torch", "--mechanism", "cuts", "--out", out
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = msgspec.json.decode(out.read_bytes(), type=Measurement).blocks
    assert [row.path for row in rows] == [None, None, "torch", "cuts"] * 2
    assert "Over all matmuls" in done.stdout
    assert list(json.loads(done.stdout.splitlines()[-1])["times_torch"]) == ["torch", "cuts"]


def test_exchanges_are_measured_on_cpus(tmp_path: Path) -> None:
    """The suite `expert` in small: both legs alone and beside three works."""
    out = tmp_path / "x.json"
    chosen = [word for name in ("torch", "gather") for word in ("--mechanism", name)]
    done = measure("expert", "--device", "cpu", "--rounds", "5", *chosen, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    found = msgspec.json.decode(out.read_bytes(), type=Measurement)
    alone = [(row.what, row.mechanism, row.path) for row in found.blocks]
    assert len(set(alone)) == len(alone) == 2 * 3 * 2
    assert {(mechanism, path) for _, mechanism, path in alone} == {("torch", "torch"), ("gather", "gather")}
    assert {row.workload.partition(" ")[0] for row in found.rows} == {"experts", "gemm", "all_gather"}
    assert len(found.rows) == 3 * len(alone)
    assert {row.marked for row in found.rows} | {row.marked for row in found.blocks} == {None}


def test_an_interrupt_before_the_first_pair_is_one_line(tmp_path: Path) -> None:
    process = started(*QUICK, "--out", tmp_path / "x.json", logs=tmp_path)
    until = time.monotonic() + HANG_S
    while len(ranks_of(process.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr) == (130, "counterpoint: stopped by SIGINT\n")


BAD = {
    "no GPU": (
        ("quick",),
        {"CUDA_VISIBLE_DEVICES": ""},
        "measure needs at least 2, or to try it on CPUs: --device cpu",
    ),
    "suite": (("nonsense", "--device", "cpu"), {}, "no suite 'nonsense'"),
    "mechanism": (("quick", "--device", "cpu", "--mechanism", "x"), {}, "no mechanism 'x' on cpu; choose from: gloo"),
    "rounds": (("quick", "--device", "cpu", "--rounds", "2"), {}, "rounds 2; at least 5"),
    "folder": (("quick", "--device", "cpu", "--out", "/nowhere/x.json"), {}, "there is no folder /nowhere"),
    "table": (("quick", "--device", "cpu", "--out", "x.md"), {}, "is where the table goes"),
    "json": (("quick", "--device", "cpu", "--json", ""), {}, "--json without a name"),
    "torchrun": (("quick", "--device", "cpu"), {"RANK": "0"}, "without torchrun"),
}


@pytest.mark.parametrize(("arguments", "variables", "text"), BAD.values(), ids=BAD)
def test_a_bad_request_is_one_line(arguments: tuple[str, ...], variables: dict[str, str], text: str) -> None:
    """Exit 2 and one line, before any rank starts."""
    done = measure(*arguments, **variables)
    assert (done.returncode, text in done.stderr, done.stderr.count("\n")) == (2, True, 1)
