"""`counterpoint doctor`: what is printed, the JSON contract, exit codes."""

import io

import msgspec
from msgspec.structs import replace
from rich.console import Console

from counterpoint.doctor.checkup import examine
from counterpoint.doctor.readings import Readings
from counterpoint.machine.profile import default_profile
from counterpoint.records.doctor import Check, Checkup
from counterpoint.rendering.doctor_terminal import render_checkup, verdict


def printed(checkup: Checkup, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    render_checkup(checkup, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def checkup(*checks: Check) -> Checkup:
    return Checkup(host="node-1", gpus=("NVIDIA H200",) * 8, driver="580.159.04", checks=checks)


MIG = Check(name="mig", status="problem", seen="GPU 3: MIG is on", means="no peer access", fix="nvidia-smi -mig 0")
ECC = Check(name="ecc", status="ok", seen="none")


def test_the_first_line_is_the_verdict(healthy: Readings) -> None:
    found = examine(healthy)
    assert printed(found).splitlines()[0] == verdict(found) == (
        "Nothing keeps this machine from overlapping (25 in order, 0 not seen)."
    )  # fmt: skip


def test_a_problem_is_counted_in_the_verdict() -> None:
    assert verdict(checkup(MIG, ECC)) == "1 thing keeps this machine from overlapping (1 in order, 0 not seen)."


def test_a_machine_without_gpus_is_not_called_fine() -> None:
    assert verdict(Checkup(host="laptop", gpus=(), driver=None, checks=())).startswith("No GPU seen")


def test_problems_come_before_what_is_in_order() -> None:
    text = printed(checkup(ECC, MIG))
    assert text.index("mig") < text.index("ecc")


def test_a_problem_is_printed_with_meaning_and_fix() -> None:
    block = printed(checkup(MIG)).split("In the way of overlap\n")[1]
    assert block == "✗ mig\n   GPU 3: MIG is on\n   no peer access\n   → nvidia-smi -mig 0\n"


def test_what_is_not_seen_for_one_reason_is_one_entry() -> None:
    unseen = [Check(name=name, status="not_seen", seen="no driver") for name in ("mig", "ecc", "clocks")]
    assert printed(checkup(*unseen)).split("Not seen\n")[1] == "? no driver\n   mig, ecc, clocks\n"


def test_all_but_the_head_fits_80_columns(healthy: Readings) -> None:
    long = msgspec.structs.replace(healthy, nvml=None, unavailable={"nvml": "no " + "word " * 60})
    assert max(map(len, printed(examine(long)).splitlines()[2:])) <= 80


def test_markup_and_control_characters_are_printed_as_text() -> None:
    """A record may come from another machine's file."""
    text = printed(checkup(Check(name="n", status="ok", seen="[red]\x1b[31mx")), width=200)
    assert "[red]\\x1b[31mx" in text


def test_a_profile_of_ones_own_is_told_without_a_gpu() -> None:
    mine = replace(default_profile(), gpu="CPU", measured_on={"rates": "CPU", "sums": "H200"})
    check = next(each for each in examine(Readings(host="laptop"), profile=mine).checks if each.name == "profile")
    assert (check.status, check.seen) == (
        "ok",
        "measured on CPU, 2026-11-21; not measured on CPU, assumed: sums of H200 (docs/reference/profile.md)",
    )
