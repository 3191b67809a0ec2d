"""The benchmarks' own machinery that starts processes: peak memory, failures, a run in small."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import expert_clock
import expert_hidden
import expert_layer
import measure_row_curves
import pytest
import tensor_block
import tensor_clock
import tensor_step
import torch
from backend_hosts import OPERATIONS
from process_cost import run
from step_rig import Step
from torch_tests import Runner

from tests.support.command import ROOT, program


def result(folder: Path, script: str, *arguments: str, ranks: int = 0) -> Any:
    """Run a benchmark, on ranks of a CPU if there are any, and return what it wrote."""
    out = folder / "result.json"
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks else []
    option = "--json" if script in ("collectives_random.py", "expert_permute.py") else "--out"
    on_cpu = [] if script in ("tune_noise.py", "tune_correlation.py") else ["--device", "cpu"]
    done = program([sys.executable, *launched, f"benchmarks/{script}", *on_cpu, *arguments, option, out], folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_the_memory_of_children_counts() -> None:
    child = "import time; held = bytearray(b'x') * 150_000_000; time.sleep(0.3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert run([sys.executable, "-c", parent]).peak_mb > 155


def test_a_command_that_fails_is_not_a_result() -> None:
    with pytest.raises(RuntimeError, match="exit 3\nno such luck"):
        run([sys.executable, "-c", "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"])


def test_trace_load_runs(tmp_path: Path) -> None:
    ours = f"{sys.executable} -c 'from counterpoint.cli import main; main()' diagnose"
    command = [sys.executable, "benchmarks/trace_load.py", "--quick", "--cache", tmp_path, "--ours", ours]
    done = program(command, folder=ROOT)
    assert (done.returncode, "ranks" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipeline_step_runs(tmp_path: Path, ranks: int) -> None:
    """Both variants have the same loss; ranks in the middle, which have neither batch nor loss, wait for neighbours."""
    asked = ("--activations", "0.02", "--hidden", "32", "--rounds", "1", "--steps", "1")
    rows = {row["variant"]: row for row in result(tmp_path, "pipeline_step.py", *asked, ranks=ranks)["rows"]}
    assert rows["stock"]["loss"] == rows["counterpoint"]["loss"] > 0


def test_hsdp_runs(tmp_path: Path) -> None:
    """Two replicas of two shards: all variants have the loss of stock, and the backend adds up between replicas."""
    asked = ("--model", "tiny", "--layers", "1", "--tokens", "16", "--rounds", "1", "--steps", "1", "--replicas", "2")
    found = result(tmp_path, "fsdp_step.py", *asked, ranks=4)
    rows = {row["variant"]: row for row in found["rows"]}
    ours = [name for name in rows if name.startswith("overlap")]
    assert ours == ["overlap", "overlap, prefetch 2", "overlap, backend"]
    assert all(rows[name]["loss"] == rows["stock"]["loss"] for name in ours)
    assert all(rows[name]["norm"] == pytest.approx(rows["stock"]["norm"], rel=1e-3) for name in ours)
    assert any(line.startswith("(root)") and "2 x 2" in line for line in found["report"])
    assert any(line.startswith("all_reduce") and "below the crossover" in line for line in found["report"])


def test_random_collectives_run(tmp_path: Path) -> None:
    found = result(tmp_path, "collectives_random.py", "--count", "150", "--max-bytes", "65536", ranks=2)
    counts = [int(row[1]) for row in found["rows"]]
    assert (found["mismatches"], sum(counts), min(counts) > 0) == ([], 150, True)


def test_backend_hosts_runs(tmp_path: Path) -> None:
    found = result(tmp_path, "backend_hosts.py", "--mib", "0.1", "--rounds", "1", "--steps", "1", ranks=4)
    assert [(row["operation"], row["path"]) for row in found["rows"]] == [(name, "hosts") for name in OPERATIONS]


def test_a_killed_rank_of_ddp_is_named(tmp_path: Path) -> None:
    """By what `check` raises, for torch repeats its text only; the benchmark counts who was told."""
    [row] = result(tmp_path, "killed_rank.py", "--ranks", "3", "--programs", "DDP")["rows"]
    assert (row["others"], row["told"], row["named"], row["free"]) == (2, 2, 2, 2)
    assert f"rank {row['killed']} is dead" in row["error"]


def test_tensor_block_runs(tmp_path: Path) -> None:
    asked = ["--model", "tiny", "--tokens", "32", "--rounds", "1", "--steps", "1", "--mechanism", "cuts"]
    found = result(tmp_path, "tensor_block.py", *asked, "--variants", "direct", "direct, torch's way", ranks=2)
    rows = {row["variant"]: row for row in found["rows"]}
    assert {name: row["fused"] for name, row in rows.items()} == {"eager": 0, "direct": 8, "direct, torch's way": 0}
    assert 0 < rows["direct"]["difference"] < 1e-5


def test_expert_permute_runs(tmp_path: Path) -> None:
    asked = ("--shapes", "tiny", "--routings", "uniform", "zipf", "--rounds", "2")
    rows = result(tmp_path, "expert_permute.py", *asked)["rows"]
    assert len({(row["operation"], row["routing"]) for row in rows}) == len(rows) == 16
    assert all(row["equal"] and row["us"] > 0 and row["torch_us"] > 0 for row in rows)


def test_tensor_host_runs(tmp_path: Path) -> None:
    asked = ("--rows", "64", "--size", "32", "--rounds", "1", "--calls", "2")
    rows = result(tmp_path, "tensor_host.py", *asked, ranks=2)["rows"]
    assert len({(row["call"], row["mechanism"]) for row in rows}) == len(rows) == 21
    assert [row["launches"] for row in rows if row["call"] == "mm"] == [1.0] * 3
    assert min(row["launches"] for row in rows) == 1.0


def test_expert_host_runs(tmp_path: Path) -> None:
    asked = ("--tokens", "16", "--hidden", "32", "--rounds", "1", "--calls", "2", "--mechanisms", "gather")
    rows = result(tmp_path, "expert_host.py", *asked, ranks=2)["rows"]
    names = ("all_to_all_single", "experts", "gather", "gather, 2 parts")
    assert [row["variant"] for row in rows] == [*names, *names]
    assert [row["times"] for row in rows if row["variant"] == names[0]] == [1.0] * 2


def test_expert_hidden_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark in small, on CPUs: both legs by both mechanisms, beside experts alone."""
    out = tmp_path / "hidden.json"
    arguments = ["--device", "cpu", "--rounds", "5", "--mechanisms", "torch", "gather", "--out", str(out)]
    exchange = "tiny 32 uniform"
    monkeypatch.setattr(sys, "argv", ["expert_hidden.py", *arguments, "--exchanges", f"exchange {exchange}"])
    expert_hidden.main()
    rows = {(row["collective"], row["mechanism"]): row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() == {(f"{leg} {exchange}", by) for leg in ("dispatch", "combine") for by in ("torch", "gather")}
    assert {row["workload"] for row in rows.values()} == {f"experts {exchange}"}


def test_expert_layer_runs(tmp_path: Path) -> None:
    """All variants have the error of plain torch and go the way asked for."""
    asked = ["--shapes", "tiny", "--tokens", "32", "--rounds", "1", "--steps", "1", "--layers", "2"]
    found = result(tmp_path, "expert_layer.py", *asked, "--mechanisms", "torch", "gather", ranks=2)
    rows = {(row["what"], row["variant"]): row for row in found["rows"]}
    ways = {name: row.get("ran_as") for (what, name), row in rows.items() if what == "step"}
    assert ways == {
        "all_to_all_single": None, "torch": "torch", "torch, 2 parts": "torch", "gather": "gather",
        "gather, 2 parts": "gather",
    }  # fmt: skip
    assert {name for what, name in rows if what == "layer"} == {*ways, "NCCL", "experts alone"}
    assert all(row["error"] <= expert_layer.MOST_ERROR for row in rows.values() if "error" in row)


def test_an_expert_layer_that_is_wrong_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant whose output has three times the error of plain torch ends the benchmark; a missing gradient, too."""
    bench = object.__new__(expert_layer.Bench)
    bench.args, bench.device, bench.dtype = argparse.Namespace(rounds=1, steps=1), torch.device("cpu"), torch.float32
    bench.model, bench.dispatchers, bench.rank = torch.nn.Linear(2, 2), {}, 0  # type: ignore[assignment]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: None)
    outputs = {"all_to_all_single": 1.0 + 1e-6, "gather": 1.0 + 3e-6}
    monkeypatch.setattr(bench, "routes", lambda what: ((name, name, None) for name in outputs))

    def made(route: str, model: torch.nn.Linear) -> Step:
        exact = model.weight.dtype == torch.float64
        return lambda: {"output": torch.full((2,), 1.0 if exact else outputs[route], dtype=torch.float64)}

    monkeypatch.setattr(bench, "layer_step", made)
    with pytest.raises(RuntimeError, match=r"layer by gather has 3.00 times the error of all_to_all_single; 2 are"):
        bench.timed("layer")
    with pytest.raises(RuntimeError, match=r"gradients of \['output'\] are missing or too many"):
        expert_layer.errors({}, {"output": torch.ones(1)})


def test_expert_clock_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of decoding go to torch; 4096 of top-8 beside experts are gathered, and mostly hide."""
    out = tmp_path / "clock.json"
    arguments = ["--layers", "qwen3-30b-a3b", "--ranks", "8", "--tokens", "128", "4096", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["expert_clock.py", *arguments])
    expert_clock.main()
    rows = [dict(zip(expert_clock.COLUMNS, row, strict=True)) for row in json.loads(out.read_text())["rows"]]
    assert [(row["tokens"], row["beside"]) for row in rows] == [("128", "torch"), ("4096", "gather")]
    assert float(rows[1]["hidden"]) > 0.85


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


@pytest.mark.parametrize(
    ("model", "shards"),
    [("llama", 1), ("llama", 2), pytest.param("transformers", 1, marks=pytest.mark.needs("transformers"))],
)
def test_tensor_step_runs(tmp_path: Path, model: str, shards: int) -> None:
    asked = ["--model", model, "--shape", "tiny", "--layers", "1", "--vocabulary", "512", "--tokens", "32"]
    asked += ["--rounds", "1", "--steps", "1", "--mechanism", "cuts", *(["--shards", "2"] if shards > 1 else [])]
    found = result(tmp_path, "tensor_step.py", *asked, ranks=2 * shards)
    rows = {row["variant"]: row for row in found["rows"]}
    assert list(rows) == ["stock", "overlap"]
    assert 0 < rows["overlap"]["difference"] < 1e-5
    assert rows["overlap"]["norm"] == pytest.approx(rows["stock"]["norm"], rel=1e-5)
    assert any("matmul" in line and "asked for cuts" in line for line in found["report"])
    assert shards == 1 or "layers.0  2" in "\n".join(found["report"])


@pytest.mark.parametrize(("loss", "factor", "said"), [(1.0, 0.9, "weight"), (1.01, 1.0, "the loss"), (1.0, 1.0, "")])
def test_a_tensor_step_that_is_wrong_is_no_result(
    monkeypatch: pytest.MonkeyPatch, loss: float, factor: float, said: str
) -> None:
    bench = object.__new__(tensor_step.Bench)
    bench.models = {name: torch.nn.Linear(3, 3) for name in ("stock", "overlap")}
    bench.dtype, bench.device, bench.size, bench.outside_before = torch.float32, torch.device("cpu"), 1, None
    looks = {
        bench.models["stock"]: (1.0, {"weight": torch.ones(3)}, None),
        bench.models["overlap"]: (loss, {"weight": torch.ones(3) * factor}, None),
    }
    monkeypatch.setattr(bench, "looked_at", lambda model, tokens: looks[model])
    monkeypatch.setattr(bench, "outside", lambda: 0.0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: None)
    if said:
        with pytest.raises(RuntimeError, match=f"overlap differs from stock by 1.0e.* of {said}; at most 1e-04"):
            bench.look(32)
    else:
        assert bench.look(32)["overlap"]["difference"] == 0.0


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


def test_tune_pairs_runs(tmp_path: Path) -> None:
    rows = result(tmp_path, "tune_pairs.py", "--pairs", "2", "--rounds", "5")["rows"]
    assert [(row[0], row[1]) for row in rows] == [("all_gather", "1"), ("reduce_scatter", "1"), ("all", "2")]


def test_tune_noise_runs(tmp_path: Path) -> None:
    rows = result(tmp_path, "tune_noise.py", "results/forum-4xh200.json", "--draws", "2")["rows"]
    assert [(row[0], row[3]) for row in rows] == [("forum-4xh200", "9")] * 6 + [("all", "9")] * 6


def test_tune_correlation_runs(tmp_path: Path) -> None:
    rows = result(tmp_path, "tune_correlation.py", "--draws", "2")["rows"]
    assert [row[:2] for row in rows] == [[rho, f"{noise}%"] for rho in ("0", "0.4", "0.8") for noise in (1, 2, 3)]


def test_tune_step_runs(tmp_path: Path) -> None:
    """FSDP2 by stock, the best single mechanism, what was tuned and the oracle."""
    asked = ("--models", "fsdp", "--rounds", "5", "--budget", "5", "--combinations", "4")
    rows = result(tmp_path, "tune_step.py", *asked)["rows"]
    assert [row["variant"].partition(" ")[0] for row in rows] == ["stock", "all", "tuned", "oracle"]
    assert all(row["rounds"] >= 5 and row["ms"] > 0 for row in rows)
    assert (tmp_path / "result-fsdp.toml").exists()
