"""`counterpoint doctor`: what is printed, the JSON contract, exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from counterpoint.machine.checkup import examine
from counterpoint.machine.readings import Readings
from counterpoint.records.machine import Check, Checkup
from counterpoint.report.checkup import render_checkup, verdict


def doctor(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from counterpoint.cli import main; main()", "doctor", *map(str, arguments)]
    unset = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)} | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def printed(checkup: Checkup, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    render_checkup(checkup, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def checkup(*checks: Check) -> Checkup:
    return Checkup(host="node-1", gpus=("NVIDIA H200",) * 8, driver="580.159.04", checks=checks)


MIG = Check(name="mig", status="problem", seen="GPU 3: MIG is on", means="no peer access", fix="nvidia-smi -mig 0")
ECC = Check(name="ecc", status="ok", seen="none")


def test_json_to_standard_output_is_json_alone() -> None:
    """Nothing before it, nothing after it, nothing on stderr."""
    done = doctor("--json", "-", "--no-bandwidth")
    assert (json.loads(done.stdout)["schema"], done.stderr) == ("counterpoint.doctor/1", "")


def test_json_to_a_file_is_the_same_checkup(tmp_path: Path) -> None:
    """The file decodes as the record that the contract names."""
    doctor("--json", tmp_path / "checkup.json", "--no-bandwidth", "-q")
    found = msgspec.json.decode((tmp_path / "checkup.json").read_bytes(), type=Checkup)
    assert "environment" in {check.name for check in found.checks}


def test_quiet_prints_nothing() -> None:
    """The exit code is the answer."""
    assert doctor("-q", "--no-bandwidth").stdout == ""


def test_a_problem_is_exit_code_1() -> None:
    """Planted by a variable, so that it can be on any machine."""
    assert doctor("-q", "--no-bandwidth", CUDA_LAUNCH_BLOCKING="1").returncode == 1


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_a_warning_is_exit_code_1_only_when_strict(options: tuple[str, ...], code: int) -> None:
    """NCCL_ALGO is worth a look, and no reason to stop."""
    done = doctor("-q", "--json", "-", "--no-bandwidth", *options, NCCL_ALGO="Ring")
    problems = [check["name"] for check in json.loads(done.stdout)["checks"] if check["status"] == "problem"]
    assert (problems, done.returncode) == ([], code)


@pytest.mark.parametrize(
    "arguments",
    [("--json", "no/such/folder/x.json"), ("--json", "."), ("--timeout", "0"), ("--colour",), ("everything",)],
)
def test_wrong_use_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    """Refused before the machine is touched, or in one line after it; never a traceback."""
    done = doctor("--no-bandwidth", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


def test_nothing_is_loaded_into_the_main_process() -> None:
    """Neither torch nor NVML nor a driver: what hangs or crashes does it elsewhere."""
    probe = (
        "import atexit, sys; from pathlib import Path\n"
        "heavy = lambda: [m for m in ('torch', 'pynvml', 'polars') if m in sys.modules]\n"
        "maps = lambda: Path('/proc/self/maps').read_text()\n"
        "mapped = lambda: [name for name in ('libcuda', 'libnvidia-ml', 'libnccl') if name in maps()]\n"
        "atexit.register(lambda: print(heavy(), mapped()))\n"
        "from counterpoint.cli import main; sys.argv = ['counterpoint', 'doctor', '-q']; main()"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "[] []\n", done.stderr


def test_the_first_line_is_the_verdict(healthy: Readings) -> None:
    """Who reads one line knows."""
    found = examine(healthy)
    assert printed(found).splitlines()[0] == verdict(found) == (
        "Nothing keeps this machine from overlapping (24 in order, 0 not seen)."
    )  # fmt: skip


def test_a_problem_is_counted_in_the_verdict() -> None:
    """In the singular, too."""
    assert verdict(checkup(MIG, ECC)) == "1 thing keeps this machine from overlapping (1 in order, 0 not seen)."


def test_a_machine_without_gpus_is_not_called_fine() -> None:
    """Blindness is not health."""
    assert verdict(Checkup(host="laptop", gpus=(), driver=None, checks=())).startswith("No GPU seen")


def test_problems_come_before_what_is_in_order() -> None:
    """Whatever the order of the checks."""
    text = printed(checkup(ECC, MIG))
    assert text.index("mig") < text.index("ecc")


def test_a_problem_is_printed_with_meaning_and_fix() -> None:
    """What was seen, what it means for overlap, what to do."""
    block = printed(checkup(MIG)).split("In the way of overlap\n")[1]
    assert block == "✗ mig\n   GPU 3: MIG is on\n   no peer access\n   → nvidia-smi -mig 0\n"


def test_what_is_blind_for_one_reason_is_one_entry() -> None:
    """Without a driver, that is said once."""
    blind = [Check(name=name, status="not_seen", seen="no driver") for name in ("mig", "ecc", "clocks")]
    assert printed(checkup(*blind)).split("Not seen\n")[1] == "? no driver\n   mig, ecc, clocks\n"


def test_all_but_the_head_fits_80_columns(healthy: Readings) -> None:
    """Paths and lists are wrapped."""
    long = msgspec.structs.replace(healthy, nvml=None, blind={"nvml": "no " + "word " * 60})
    assert max(map(len, printed(examine(long)).splitlines()[2:])) <= 80


def test_markup_and_control_characters_are_printed_as_text() -> None:
    """A record may come from another machine's file."""
    text = printed(checkup(Check(name="n", status="ok", seen="[red]\x1b[31mx")), width=200)
    assert "[red]\\x1b[31mx" in text


def test_a_terminal_without_these_letters_gets_question_marks() -> None:
    """An ASCII terminal is no problem of the machine: it gets its report."""
    done = doctor("--no-bandwidth", PYTHONIOENCODING="ascii")
    assert ("Traceback" in done.stderr, "? environment" in done.stdout) == (False, True)


def test_an_empty_name_is_refused() -> None:
    """`--json ""` is a variable that was not set, not a wish for JSON and a report in one stream."""
    done = doctor("--json", "")
    assert (done.returncode, done.stdout, "give a file, or -" in done.stderr) == (2, "", True)
