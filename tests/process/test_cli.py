"""The command line: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest

from tests.support.command import COUNTERPOINT, counterpoint, program

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "tail-effect"


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("baseline") / "old.json"
    assert counterpoint("diagnose", SAMPLE, "-q", "--json", path).returncode == 0
    return path


def test_json_to_standard_output_is_json_alone() -> None:
    done = program([*COUNTERPOINT, "diagnose", SAMPLE, "--json", "-"])
    assert (json.loads(done.stdout)["schema"], done.stderr) == ("counterpoint.diagnosis/1", "")


CONTRACT = {
    "": "schema source world_size ranks clock_offsets_us steps totals per_rank collectives stragglers kernels findings",
    "steps": "name start_us duration_us",
    "totals": "duration_us compute_us comm_us overlapped_us exposed_comm_us idle_us wait_us transfer_us hidden",
    "per_rank": "rank duration_us comm_to_compute",
    "collectives": "op group index bytes ranks last_rank wait_us transfer_us bus_gb_per_s exposed_us",
    "kernels": "name grid alone_count overlapped_count alone_us overlapped_us slowdown cause",
    "findings": "kind cost_us severity title evidence advice",
    "replay": "measured_us replayed_us error what_if",
}


@pytest.mark.parametrize(("of", "keys"), CONTRACT.items())
def test_json_holds_the_keys_of_the_contract(baseline: Path, of: str, keys: str) -> None:
    found = json.loads(baseline.read_text())
    part = found[of] if of else found
    assert set(keys.split()) <= set(part[0] if isinstance(part, list) else part)


def test_gate_that_holds(baseline: Path) -> None:
    assert counterpoint("diagnose", SAMPLE, "-q", "--gate", "step<=against+1%", "--against", baseline).returncode == 0


def test_an_earlier_run_is_compared_with(baseline: Path) -> None:
    done = counterpoint("diagnose", SAMPLE, "--against", baseline)
    assert (done.returncode, "about as long as before" in done.stdout.splitlines()[-1]) == (0, True), done.stderr


def test_two_runs_are_compared_as_json(baseline: Path) -> None:
    healthy = SAMPLE.with_name("fsdp-healthy")
    found = json.loads(counterpoint("diagnose", healthy, "--against", baseline, "--json", "-").stdout)
    assert found["schema"] == "counterpoint.comparison/1"
    assert found["step"]["change_us"] > 0


def test_gate_that_does_not_hold(baseline: Path) -> None:
    done = program([*COUNTERPOINT, "diagnose", SAMPLE, "-q", "--gate", "hidden>=99%"])
    assert (done.returncode, "FAIL (hidden is 34" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--against", "nothing.json"],
        ["--gate", "speed<3"],
        ["--gate", "step<3%"],
        ["--gate", "step<against"],
        ["--engine", "spark"],
        ["--scheduler", "tcp://h:1"],
        ["--out", "no/such/folder/report.html"],
    ],
)
def test_what_cannot_take_effect_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    done = counterpoint("diagnose", SAMPLE, "-q", *arguments)
    assert (done.returncode, done.stderr.count("\n"), "Traceback" in done.stderr) == (2, 1, False), done.stderr
