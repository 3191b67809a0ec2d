"""examples/train_*.py, as docs/tutorial.md runs one: two ranks on a CPU, with torch's collectives and with ours."""

import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import counterpoint
from counterpoint.measurement.session import Session
from counterpoint.tuning.from_trace import pairs_of_traces
from tests.support.command import ROOT, program
from tests.support.ranks import Ranks

sys.path.append(str(ROOT / "examples"))
import train_fsdp
import train_moe
import train_tp

TRAINING = {
    "train_fsdp.py": (train_fsdp.arguments, train_fsdp.train),
    "train_moe.py": (train_moe.arguments_of_moe, train_moe.training),
    "train_tp.py": (train_tp.arguments_of_tp, train_tp.training),
}


def printed(session: Session, script: str, *options: str) -> str:
    """Return what an example prints on this rank, started with these options."""
    arguments, training = TRAINING[script]
    with (
        patch.object(sys, "argv", [script, "--device", "cpu", *options]),
        patch.dict(os.environ, RANK=str(session.rank)),
    ):
        args = arguments()
    with redirect_stdout(io.StringIO()) as output:
        training(args, torch.device("cpu"))
    return output.getvalue()


SCRIPT = str(ROOT / "examples" / "train_fsdp.py")
LOSSES = re.compile(r"loss (\d+\.\d+)")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def stock(traces: Path) -> str:
    """Return what a run by torchrun prints: torch's collectives, a trace, and late input on the last rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    done = program(
        [*command, "--device", "cpu", "--steps", "6", "--trace", traces, "--slow-input-ms", "600"],
        variables=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_speed_is_printed(stock: str) -> None:
    assert re.search(r"step +6  loss \d\.\d+  [\d,]+ tokens/s", stock)


def test_overlap_does_not_change_the_loss(stock: str, two_ranks: Ranks) -> None:
    overlapped = two_ranks.run(printed, "train_fsdp.py", "--steps", "6", "--overlap")
    assert LOSSES.findall(overlapped[0]) == LOSSES.findall(stock) != []


def test_tensor_parallel_training_prints_the_same_losses(two_ranks: Ranks, tmp_path: Path) -> None:
    """examples/train_tp.py: loss and speed, each rank's trace, and with `--overlap` what runs each layer."""
    traced = two_ranks.run(printed, "train_tp.py", "--steps", "6", "--trace", str(tmp_path))
    overlapped = two_ranks.run(printed, "train_tp.py", "--steps", "6", "--overlap")
    assert re.search(r"step +6  loss \d\.\d+  [\d,]+ tokens/s", traced[0])
    assert LOSSES.findall(overlapped[0]) == LOSSES.findall(traced[0]) != []
    assert "layers.3.ffn.down" in overlapped[0]
    assert len(list(tmp_path.glob("rank*.json.gz"))) == 2


def test_expert_parallel_training_prints_the_same_losses(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    """examples/train_moe.py: by torch's all_to_all_single and by ours; experts on all ranks and on pairs."""
    traced = two_ranks.run(printed, "train_moe.py", "--steps", "6", "--trace", str(tmp_path))
    overlapped = two_ranks.run(printed, "train_moe.py", "--steps", "6", "--overlap")
    assert re.search(r"step +6  loss \d\.\d+  [\d,]+ tokens/s", traced[0])
    assert LOSSES.findall(overlapped[0]) == LOSSES.findall(traced[0]) != []
    assert len(list(tmp_path.glob("rank*.json.gz"))) == 2
    exchanges = [pair for pair in pairs_of_traces(tmp_path)[0] if pair.operation == "exchange"]
    assert [(pair.compute.split()[:2], pair.calls) for pair in exchanges] == [(["128x128x8x2", "256"], 8)]
    pairs = four_ranks.run(printed, "train_moe.py", "--steps", "2", "--overlap", "--ep", "2")
    assert re.search(r"layers.3.ffn.experts +2 ", pairs[0])
    assert len(LOSSES.findall(pairs[0])) == 1


@pytest.mark.usefixtures("stock")
def test_diagnose_finds_the_rank_with_late_input(traces: Path) -> None:
    """Of the three recorded steps, rank 1 is named first of the ranks that make others wait."""
    diagnosis = counterpoint.diagnose(str(traces)).diagnosis
    late = sorted(diagnosis.stragglers, key=lambda straggler: straggler.delay_us)
    assert (len(diagnosis.steps), [straggler.rank for straggler in late[-1:]]) == (3, [1])
