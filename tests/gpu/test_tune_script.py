"""`counterpoint tune --run` on two GPUs: what is recorded, switched between steps, and confirmed."""

import sys
from pathlib import Path

import pytest

from counterpoint.tuned.file import read_tuned
from counterpoint.tuning.from_trace import pairs_of_traces
from counterpoint.tuning.script import difference
from counterpoint.tuning.script_launch import ScriptResult, ScriptTask, ScriptVariant, launch_script, parse_command
from tests.support.command import program

pytestmark = [pytest.mark.gpu(2), pytest.mark.own_gpus("it measures times")]

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = "torchrun --standalone --nproc-per-node 2 {} --overlap --steps 100000 --tokens 1024"


def example(name: str) -> str:
    return TRAIN.format(EXAMPLES / f"train_{name}.py")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ScriptResult]:
    folder = tmp_path_factory.mktemp("recorded")
    return folder, launch_script(parse_command(example("fsdp")), ScriptTask(folder=str(folder)), variables={})


def test_pairs_of_recorded_steps(recorded: tuple[Path, ScriptResult]) -> None:
    """Layers gather bfloat16 and scatter, in modules that are known; the root may scatter 2 MB of its own."""
    folder, found = recorded
    pairs, _ = pairs_of_traces(folder)
    assert (found.overlap, found.device, found.world_size) == ("switched", "cuda", 2)
    assert {"all_gather", "reduce_scatter"} <= {pair.operation for pair in pairs}
    assert {pair.where for pair in pairs if pair.bytes_per_rank > 1 << 24} == {("layers.*",)}
    assert {pair.where for pair in pairs if pair.bytes_per_rank < 1 << 24} <= {()}
    assert {pair.bytes_per_rank for pair in pairs if pair.operation == "all_gather"} == {218_112_000}


@pytest.mark.parametrize(("name", "calls"), [("fsdp", "switched"), ("tp", "switched"), ("ddp", "fixed")])
def test_a_script_is_tuned(tmp_path: Path, name: str, calls: str) -> None:
    """The whole way: choices with whole steps, unless nothing was chosen; what was chosen had effect."""
    out = tmp_path / "counterpoint.toml"
    command = [sys.executable, "-m", "counterpoint", "tune", "--run", example(name), "--budget", "40"]
    done = program([*command, "--out", out], timeout_s=550)
    assert done.returncode == 0, done.stderr
    tuned = read_tuned(out)
    assert tuned.pair
    assert tuned.step is None or not any("changes nothing" in note for note in tuned.notes)
    apart = any("processes apart" in note for note in tuned.notes)
    assert apart or calls == "switched" or tuned.step is None


def test_stock_against_stock_is_no_difference(tmp_path: Path) -> None:
    """Two variants that are both torch's collectives differ by less than 2 sigma, or by less than 1 %."""
    variants = tuple(ScriptVariant(name=name, file=None) for name in ("stock", "stock again"))
    task = ScriptTask(folder=str(tmp_path), variants=variants, budget_s=20.0)
    found = launch_script(parse_command(example("fsdp")), task, variables={})
    us, sigma_us = difference(*found.blocks_us)
    assert abs(us) <= max(2 * sigma_us, 0.01 * min(found.blocks_us[0]))
