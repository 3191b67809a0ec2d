"""Children that hang, crash, or say why: always an answer, always in time."""

import sys
import time
from pathlib import Path

import pytest

from counterpoint.doctor.probe import Answer, ask_probe, run_child


def python(code: str, limit_s: float = 20.0) -> Answer:
    return run_child([sys.executable, "-c", code], limit_s=limit_s)


def test_output_is_what_the_child_printed() -> None:
    assert python("print('{}')") == Answer(output=b"{}\n")


def test_a_child_that_hangs_is_ended_in_time_and_named() -> None:
    began = time.monotonic()
    answer = python("import time; time.sleep(600)", limit_s=0.5)
    assert (answer.output, time.monotonic() - began < 60) == (None, True)
    assert answer.reason == "no answer within 0.5 s; the process was killed"


def test_grandchildren_are_ended_too(tmp_path: Path) -> None:
    mark = tmp_path / "still-here"
    late = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {late!r}])", limit_s=0.8)
    time.sleep(2.5)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("code", "failed", "reason"),
    [
        ("import time; time.sleep(600)", True, "no answer within 3 s; the process was killed"),
        ("import os; os.kill(os.getpid(), 11)", True, "the process died of SIGSEGV (it said nothing)"),
        ("raise SystemExit(4)", True, None),
        ("raise SystemExit(3)", False, None),  # a probe's own way to say that it cannot look
        ("import sys; print('no driver', file=sys.stderr); sys.exit(3)", False, "no driver"),
        ("raise KeyError('x')", False, "the process ended with exit code 1 (KeyError: 'x')"),
    ],
)
def test_what_hangs_or_crashes_has_failed_and_says_so(code: str, failed: bool, reason: str | None) -> None:
    found = python(code, limit_s=3.0)
    assert found.failed is failed
    assert reason in (None, found.reason)


def test_control_characters_in_a_reason_are_escaped() -> None:
    assert "\x1b" not in str(python(r"import sys; print('\x1b[2J', file=sys.stderr); sys.exit(3)").reason)


def test_a_probe_does_not_import_from_the_folder_it_is_run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    assert "exit code 77" not in str(ask_probe("nccl", limit_s=30).reason)


def test_an_unknown_probe_is_an_error_with_its_name() -> None:
    assert ask_probe("coffee", limit_s=30).reason == "the process ended with exit code 1 (KeyError: 'coffee')"
