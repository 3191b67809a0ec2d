"""`counterpoint doctor` as a command: the JSON contract, files and streams, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.doctor import Checkup
from tests.support.command import COUNTERPOINT, counterpoint, program


def doctor(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    unset = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)} | variables
    return program([*COUNTERPOINT, "doctor", *arguments], variables=environment)


def test_json_to_standard_output_is_json_alone() -> None:
    done = doctor("--json", "-", "--no-bandwidth")
    assert (json.loads(done.stdout)["schema"], done.stderr) == ("counterpoint.doctor/1", "")


def test_json_to_a_file_is_the_same_checkup(tmp_path: Path) -> None:
    doctor("--json", tmp_path / "checkup.json", "--no-bandwidth", "-q")
    found = msgspec.json.decode((tmp_path / "checkup.json").read_bytes(), type=Checkup)
    assert "environment" in {check.name for check in found.checks}


def test_a_problem_is_exit_code_1_and_quiet_prints_nothing() -> None:
    done = doctor("-q", "--no-bandwidth", CUDA_LAUNCH_BLOCKING="1")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_a_warning_is_exit_code_1_only_when_strict(options: tuple[str, ...], code: int) -> None:
    done = doctor("-q", "--json", "-", "--no-bandwidth", *options, NCCL_ALGO="Ring")
    problems = [check["name"] for check in json.loads(done.stdout)["checks"] if check["status"] == "problem"]
    assert (problems, done.returncode) == ([], code)


@pytest.mark.parametrize(
    "arguments",
    [("--json", "no/such/folder/x.json"), ("--json", "."), ("--timeout", "0"), ("--colour",), ("everything",)],
)
def test_wrong_use_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = counterpoint("doctor", "--no-bandwidth", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


def test_nothing_is_loaded_into_the_main_process() -> None:
    probe = (
        "import atexit, sys; from pathlib import Path\n"
        "heavy = lambda: [m for m in ('torch', 'pynvml', 'polars') if m in sys.modules]\n"
        "maps = lambda: Path('/proc/self/maps').read_text()\n"
        "mapped = lambda: [name for name in ('libcuda', 'libnvidia-ml', 'libnccl') if name in maps()]\n"
        "atexit.register(lambda: print(heavy(), mapped()))\n"
        "from counterpoint.cli import main; sys.argv = ['counterpoint', 'doctor', '-q']; main()"
    )
    done = program([sys.executable, "-c", probe])
    assert done.stdout == "[] []\n", done.stderr


def test_a_terminal_without_these_letters_gets_question_marks() -> None:
    done = doctor("--no-bandwidth", PYTHONIOENCODING="ascii")
    assert ("Traceback" in done.stderr, "? environment" in done.stdout) == (False, True)


def test_an_empty_name_is_refused() -> None:
    """`--json ""` is a variable that was not set, not a wish for JSON and a report in one stream."""
    done = doctor("--json", "")
    assert (done.returncode, done.stdout, "give a file, or -" in done.stderr) == (2, "", True)
