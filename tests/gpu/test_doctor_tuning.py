"""`doctor --check counterpoint.toml` on traces of a training: choices that were followed, and some that were not."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict, replace

from counterpoint.records.tuning import LEAVE, StepPair, Tuned, TunedPair
from counterpoint.tuned.file import tuned_toml
from counterpoint.tuning.exporters import export
from counterpoint.tuning.from_trace import pairs_of_traces
from tests.support.command import ROOT, program
from tests.support.example_tuned import example_tuned, tuned_pair

pytestmark = [pytest.mark.gpu(2), pytest.mark.own_gpus("its traces show copies between GPUs")]

LIMIT_S = 300


def trained(folder: Path, *options: str, **variables: str) -> Path:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/train_fsdp.py"]
    given = [*command, "--steps", "8", "--trace", folder, *options]
    done = program(given, folder=ROOT, variables=os.environ | variables, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def proved(tuned: Tuned, traces: Path, folder: Path) -> dict[str, set[str]]:
    """The states that doctor gives to each choice; its exit code agrees."""
    file = folder / "counterpoint.toml"
    file.write_text(tuned_toml(tuned))
    command = [sys.executable, "-m", "counterpoint", "doctor", "--json", "-", "--check", file, "--check", traces]
    done = program(command, timeout_s=LIMIT_S)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["took_effect"] else 1), done.stderr
    states: dict[str, set[str]] = {}
    for knob in found["knobs"]:
        states.setdefault(f"{knob['operation']} {knob['knob']}", set()).add(knob["state"])
    return states


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("stock"))


def chosen(stock: Path, **mechanisms: str) -> Tuned:
    """A tuning of this machine: a mechanism for each operation, for every pair of the recorded steps."""
    pairs, _ = pairs_of_traces(stock)
    made = replace(
        example_tuned().made,
        gpu=torch.cuda.get_device_name(),
        torch=str(torch.__version__),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )
    taken = tuple(_tuned(pair, mechanisms[pair.operation]) for pair in pairs if pair.operation in mechanisms)
    assert {pair.operation for pair in taken} == mechanisms.keys()
    return replace(example_tuned(), made=made, step=None, notes=(), pair=taken)


def _tuned(pair: StepPair, mechanism: str) -> TunedPair:
    return tuned_pair(mechanism, **asdict(pair))


def test_choices_that_overlap_follows_take_effect(stock: Path, tmp_path: Path) -> None:
    tuned = chosen(stock, all_gather="zero_sm", reduce_scatter=LEAVE)
    (tmp_path / "followed.toml").write_text(tuned_toml(tuned))
    traces = trained(tmp_path / "traces", "--overlap", COUNTERPOINT_TUNED=str(tmp_path / "followed.toml"))
    assert proved(tuned, traces, tmp_path) == {
        "all_gather zero_sm": {"took_effect"},
        f"reduce_scatter {LEAVE}": {"took_effect"},
    }


def test_choices_that_nothing_follows_have_no_effect(stock: Path, tmp_path: Path) -> None:
    tuned = chosen(stock, all_gather="zero_sm", reduce_scatter="nccl+max_ctas=4")
    assert proved(tuned, stock, tmp_path) == {
        "all_gather zero_sm": {"no_effect"},
        "reduce_scatter nccl": {"took_effect"},
        "reduce_scatter max_ctas=4": {"no_effect"},
    }


def test_exported_variables_take_effect(stock: Path, tmp_path: Path) -> None:
    tuned = chosen(stock, all_gather="nccl+max_ctas=8", reduce_scatter="nccl+max_ctas=8")
    lines = [line for line in export(tuned, "env").splitlines() if line.startswith("export NCCL_")]
    variables = dict(line.removeprefix("export ").split("=") for line in lines)
    assert variables == {"NCCL_MAX_CTAS": "8"}
    traces = trained(tmp_path / "traces", **variables)
    assert proved(tuned, traces, tmp_path)["all_gather max_ctas=8"] == {"took_effect"}
