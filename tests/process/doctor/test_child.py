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


def test_a_child_that_hangs_is_ended_in_time() -> None:
    began = time.monotonic()
    answer = python("import time; time.sleep(600)", limit_s=0.5)
    assert (answer.output, time.monotonic() - began < 60) == (None, True)


def test_a_child_that_hangs_is_named_as_such() -> None:
    assert (
        python("import time; time.sleep(600)", limit_s=0.5).reason == "no answer within 0.5 s; the process was killed"
    )


def test_grandchildren_are_ended_too(tmp_path: Path) -> None:
    mark = tmp_path / "still-here"
    late = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {late!r}])", limit_s=0.8)
    time.sleep(2.5)
    assert not mark.exists()


def test_a_crash_is_named_by_its_signal() -> None:
    reason = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").reason
    assert reason == "the process died of SIGSEGV (it said nothing)"


def test_a_reason_is_handed_on() -> None:
    """Exit code 3 is a probe's own way to say that it cannot look."""
    assert python("import sys; print('no driver', file=sys.stderr); sys.exit(3)").reason == "no driver"


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("import time; time.sleep(600)", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", True),
        ("raise SystemExit(4)", True),
        ("raise SystemExit(3)", False),
        ("raise KeyError", False),
    ],
)
def test_what_hangs_crashes_or_fails_has_failed(code: str, failed: bool) -> None:
    assert python(code, limit_s=3.0).failed is failed


def test_an_exception_is_its_last_line() -> None:
    assert python("raise KeyError('x')").reason == "the process ended with exit code 1 (KeyError: 'x')"


def test_control_characters_in_a_reason_are_escaped() -> None:
    assert "\x1b" not in str(python(r"import sys; print('\x1b[2J', file=sys.stderr); sys.exit(3)").reason)


def test_a_probe_does_not_import_from_the_folder_it_is_run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    assert "exit code 77" not in str(ask_probe("nccl", limit_s=30).reason)


def test_an_unknown_probe_is_an_error_with_its_name() -> None:
    assert ask_probe("coffee", limit_s=30).reason == "the process ended with exit code 1 (KeyError: 'coffee')"
