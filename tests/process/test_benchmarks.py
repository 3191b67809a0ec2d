"""The benchmarks' own machinery that starts processes: peak memory, failures, a run in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from process_cost import run
from torch_tests import Runner

ROOT = Path(__file__).parents[2]


def test_the_memory_of_children_counts() -> None:
    """The peak covers the whole tree: a child that holds 150 MB while its parent holds little."""
    child = "import time; held = bytearray(b'x') * 150_000_000; time.sleep(0.3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert run([sys.executable, "-c", parent]).peak_mb > 155


def test_a_command_that_fails_is_not_a_result() -> None:
    """A non-zero exit raises with what the command said."""
    with pytest.raises(RuntimeError, match="exit 3\nno such luck"):
        run([sys.executable, "-c", "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"])


def test_trace_load_runs(tmp_path: Path) -> None:
    """The benchmark in small: traces, both measurements of ours, the table."""
    ours = f"{sys.executable} -c 'from counterpoint.cli import main; main()' diagnose"
    command = [sys.executable, "benchmarks/trace_load.py", "--quick", "--cache", str(tmp_path), "--ours", ours]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, "ranks" in done.stdout) == (0, True), done.stderr


def test_pipeline_step_runs(tmp_path: Path) -> None:
    """The benchmark in small, on CPUs: both variants have the same loss."""
    arguments = ["--device", "cpu", "--activations", "0.02", "--hidden", "32", "--rounds", "1", "--steps", "1"]
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmarks/pipeline_step.py"]
    out = tmp_path / "pipeline.json"
    command = [sys.executable, *launched, *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["stock"]["loss"] == rows["counterpoint"]["loss"] > 0


def test_a_torch_test_that_crashes_is_alone(tmp_path: Path) -> None:
    """Tests after one that ends its process still run; what failed and was skipped is told from what passed."""
    folder = tmp_path / "test" / "distributed"
    folder.mkdir(parents=True)
    bodies = {
        "one": "pass",
        "two": "os._exit(3)",
        "three": "assert 0, 'wrong'",
        "four": "pytest.skip()",
        "five": "pass",
    }
    tests = "".join(f"def test_{name}():\n    {body}\n" for name, body in bodies.items())
    (folder / "test_made_up.py").write_text(f"import os\nimport pytest\n{tests}")
    runner = Runner(tmp_path, "cpu", ranks=2, seconds=60, folder=tmp_path / "logs")
    names = runner.names("test_made_up.py")
    results = runner.run("test_made_up.py", list(names), ours=False, calls=tmp_path / "calls")
    outcomes = [result["outcome"] for result in results.values()]
    assert outcomes == ["passed", "crashed", "failed", "skipped", "passed"]
    assert "wrong" in results["test_three"]["text"]
