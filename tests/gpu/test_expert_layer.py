"""benchmarks/expert_layer.py on two GPUs: what a trace shows of how tokens travel to their experts."""

import json
import sys
from typing import Any

import pytest

from tests.support.command import ROOT, program

pytestmark = pytest.mark.own_gpus("its traces show copies between GPUs")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """A layer of Qwen3-30B-A3B's shape and a step of two, by torch and by `gather`, by what and variant."""
    out = tmp_path_factory.mktemp("layer") / "layer.json"
    arguments = ["--shapes", "qwen3", "--tokens", "4096", "--layers", "2", "--mechanisms", "gather"]
    arguments += ["--rounds", "2", "--steps", "3", "--out", str(out)]
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmarks/expert_layer.py"]
    done = program([sys.executable, *launched, *arguments], folder=ROOT, timeout_s=400)
    assert out.exists(), done.stderr
    return {(row["what"], row["variant"]): row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("what", ["layer", "step"])
@pytest.mark.parametrize("variant", ["gather", "gather, 2 parts"])
def test_gather_neither_waits_nor_takes_sms(
    rows: dict[tuple[str, str], dict[str, Any]], what: str, variant: str
) -> None:
    """The host runs ahead, and copies are by copy engines, forward and backward."""
    row = rows[what, variant]
    assert (row["ran_as"], row["syncs"], row["sm_kernels"]) == ("gather", 0, 0)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("what", ["layer", "step"])
def test_plain_torch_is_seen_to_wait_and_to_take_sms(rows: dict[tuple[str, str], dict[str, Any]], what: str) -> None:
    row = rows[what, "all_to_all_single"]
    assert row["syncs"] >= 1
    assert row["sm_kernels"] >= 3
