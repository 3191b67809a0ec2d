"""What a shell user expects of output: `| head -1`, `>(...)`, devices, pipes and links, by real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from counterpoint.rendering.files import is_stream
from tests.support.command import COUNTERPOINT, HANG_S, ROOT

SAMPLE = str(ROOT / "samples" / "tail-effect")
MEASURE = (  # without ranks
    sys.executable,
    "-c",
    "from tests.support.example_measurement import usual\nfrom counterpoint.measurement import api\n"
    "api.measure = lambda *a, **k: usual()\n"
    "from counterpoint.cli import main; main()",
    "measure",
    "quick",
)
VERBS = {
    "diagnose": (*COUNTERPOINT, "diagnose", SAMPLE),
    "plan": (*COUNTERPOINT, "plan", "examples/plan/llama3-70b-64-gpus.toml"),
    "doctor": (*COUNTERPOINT, "doctor", "--no-bandwidth"),
    "measure": MEASURE,
}
each_verb = pytest.mark.parametrize("command", VERBS.values(), ids=VERBS)


def run(command: tuple[str, ...], *more: object, stdout: int | None = subprocess.PIPE) -> tuple[int, str, str]:
    """Exit code (doctor's 1 for a machine with problems as 0), standard output and standard error."""
    done = subprocess.run(
        [*command, *map(str, more)], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=HANG_S,
        cwd=ROOT,
    )  # fmt: skip
    return 0 if "doctor" in command and done.returncode == 1 else done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", [*VERBS.values(), (*COUNTERPOINT, "--help"), (*COUNTERPOINT, "--version")])
def test_a_reader_that_ends_ends_the_command_by_sigpipe(command: tuple[str, ...]) -> None:
    """As `| head -1`: no traceback, no word."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, _, said = run(command, stdout=writing)
    finally:
        os.close(writing)
    assert (code, said) == (-signal.SIGPIPE, "")


@each_verb
def test_json_to_dev_null_is_written_and_gone(command: tuple[str, ...]) -> None:
    assert run(command, "--json", "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()


@each_verb
def test_json_to_a_pipe_reaches_its_reader(command: tuple[str, ...], tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    code, _, said = run(command, "--json", pipe)
    reader.join(timeout=HANG_S)
    assert (code, said, pipe.is_fifo()) == (0, "", True)
    assert "schema" in json.loads(got[0])


def test_process_substitution_gets_the_json(tmp_path: Path) -> None:
    line = f'"$@" -q --json >(cat > {tmp_path}/copy.json); wait $!'
    subprocess.run(["bash", "-c", line, "bash", *VERBS["diagnose"]], check=True, timeout=HANG_S, cwd=ROOT)
    assert json.loads((tmp_path / "copy.json").read_text())["schema"] == "counterpoint.diagnosis/1"


def test_dev_stdout_goes_on_where_standard_output_stands(tmp_path: Path) -> None:
    with (tmp_path / "all").open("w") as file:
        assert run(VERBS["diagnose"], "--json", "/dev/stdout", stdout=file.fileno())[0] == 0
    written = (tmp_path / "all").read_text()
    found, end = json.JSONDecoder().raw_decode(written)
    summary = " ".join(written[end:].split())
    assert (found["schema"], found["verdict"] in summary) == ("counterpoint.diagnosis/1", True)


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "run-1.json").write_text("old")
    (tmp_path / "latest.json").symlink_to("run-1.json")
    assert run(VERBS["diagnose"], "-q", "--json", tmp_path / "latest.json")[0] == 0
    assert (tmp_path / "latest.json").is_symlink()
    assert json.loads((tmp_path / "run-1.json").read_text())["schema"] == "counterpoint.diagnosis/1"


def test_results_of_measure_to_a_device_have_no_table_next_to_it(tmp_path: Path) -> None:
    assert run(MEASURE, "--out", "/dev/null")[0] == 0
    assert not Path("/dev/null.md").exists()


@each_verb
def test_a_full_device_is_one_line(command: tuple[str, ...]) -> None:
    code, _, said = run(command, "--json", "/dev/full")
    assert (code, said.splitlines()) == (2, ["counterpoint: cannot write /dev/full: No space left on device"])


def test_a_full_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        code, _, said = run(VERBS["plan"], stdout=full.fileno())
    assert (code, said) == (2, "counterpoint: cannot write to standard output: No space left on device\n")


def test_json_to_a_closed_standard_output_is_one_line() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" --json - >&-', "bash", *VERBS["plan"]],
        capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/dev/null", True), ("/dev/stdout", True), ("/dev/fd/63", True), ("/dev/shm/x.json", False), ("/tmp", False)],
)
def test_streams_are_told_from_files(path: str, expected: bool) -> None:
    """What is there to be written to, and what a file may replace."""
    assert is_stream(Path(path)) is expected
