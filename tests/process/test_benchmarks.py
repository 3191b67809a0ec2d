"""The benchmarks' own machinery that starts processes: peak memory, failures, a run in small."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import measure_row_curves
import pytest
import tensor_block
import tensor_clock
import torch
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


def test_tensor_block_runs(tmp_path: Path) -> None:
    """The benchmark in small, on CPUs: variants agree in loss and gradients, and only ours takes its calls."""
    arguments = ["--device", "cpu", "--model", "tiny", "--tokens", "32", "--rounds", "1", "--steps", "1"]
    arguments += ["--mechanism", "cuts", "--variants", "direct", "direct, torch's way"]
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmarks/tensor_block.py"]
    out = tmp_path / "block.json"
    command = [sys.executable, *launched, *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert {name: row["fused"] for name, row in rows.items()} == {"eager": 0, "direct": 8, "direct, torch's way": 0}
    assert 0 < rows["direct"]["difference"] < 1e-5


@pytest.mark.parametrize(("factor", "said"), [(1.0, "is rounding"), (0.0, "every matmul of its step waits")])
def test_a_tensor_block_that_is_wrong_is_no_result(monkeypatch: pytest.MonkeyPatch, factor: float, said: str) -> None:
    """Neither gradients that differ nor a mechanism that did nothing."""
    grads = {"x": torch.ones(3)}
    looks = {"eager": (1.0, grads, 0), "direct": (1.0, {"x": torch.ones(3) + factor}, 0)}
    bench = object.__new__(tensor_block.Bench)
    bench.models, bench.dtype, bench.device = (
        dict.fromkeys(looks, torch.nn.Identity()),
        torch.float32,
        torch.device("cpu"),
    )
    bench.args = argparse.Namespace(mechanism="cuts")
    monkeypatch.setattr(bench, "looked_at", lambda name, tokens: looks[name])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: None)
    with pytest.raises(RuntimeError, match=f"direct.*{said}"):
        bench.look(32)


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


def test_row_curves_are_measured_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU in small: what the one script writes, the clock of tensor parallelism reads; the rest is named."""
    curves, out = tmp_path / "curves.json", tmp_path / "clock.json"
    arguments = ["--device", "cpu", "--shapes", "80x32", "32x40", "--rows", "300", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["measure_row_curves.py", *arguments, "--out", str(curves)])
    measure_row_curves.main()
    origin, found = tensor_clock.read_curves(curves)
    assert (origin["torch"], set(found)) == (torch.__version__, {(80, 32), (32, 40)})
    assert all(
        [rows for rows, _ in curve.points] == [128, 256, 300] and not curve.estimated for curve in found.values()
    )
    monkeypatch.setattr(tensor_clock, "GATHERED_MATMULS", ((256, 80, 32),))
    monkeypatch.setattr(tensor_clock, "LLAMAS", {"small": (64, 128)})
    monkeypatch.setattr(
        sys, "argv", ["tensor_clock.py", str(curves), "--rows", "256", "--ranks", "2", "--out", str(out)]
    )
    tensor_clock.main()
    record = json.loads(out.read_text())
    assert [row[:6] for row in record["rows"]] == [["plain", "all_gather", "256", "80", "32", "2"]]
    assert record["curves_from"] == origin
    assert (
        "not measured, left out: 256 x 1056 x 64, 256 x 128 x 64, 256 x 32 x 80, 256 x 64 x 32"
        in capsys.readouterr().out
    )
