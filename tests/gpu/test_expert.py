"""Dispatchers of expert parallelism on all GPUs of this machine (2 to 8): what only GPUs can show."""

import re

import pytest

from tests.support.command import ROOT, program
from tests.support.gpu_ranks import Seen, torchrun

pytestmark = pytest.mark.gpu(2)

RUN = {"timeout_s": 280}


def test_every_mechanism_moves_what_all_to_all_single_does(seen: Seen) -> None:
    """Rows bit by bit; sums and derivatives within twice its error; any routing, other numbers of tokens by rank."""
    assert [rank["beside_torch"] for rank in seen] == [{}] * len(seen)


def test_nobody_waits(seen: Seen) -> None:
    """No kernel of NCCL runs, and the host waits for nothing but the tables that tell slabs of a second round."""
    wanted = {"gather": "0 of NCCL, 0 syncs", "slabs": "0 of NCCL, 1 syncs"}
    assert [rank["profiled"] for rank in seen] == [wanted] * len(seen)


@pytest.mark.own_gpus("a copy within a GPU is no copy to a peer")
def test_copy_engines_carry_tokens(seen: Seen) -> None:
    assert [rank["copied"] for rank in seen] == [{"gather": "True", "slabs": "True"}] * len(seen)


@pytest.mark.parametrize("what", ["call", "layer"])
def test_graphs_replay(seen: Seen, what: str) -> None:
    """With other tokens and other experts, three times: sums and derivatives, and a layer of two half-batches."""
    for rank in seen:
        for mechanism in ("gather", "slabs"):
            assert rank["captured"][f"{mechanism}, {what}"] == "[True, True, True]"


def test_training_in_graphs() -> None:
    arguments = ["--graph", "--shape", "tiny", "--tokens", "1024", "--steps", "20", "--lr", "3e-3"]
    done = program(torchrun(2, "examples/train_moe.py", *arguments), folder=ROOT, timeout_s=180)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 2, done.stderr[-3000:]
    assert losses[1] < losses[0] < 5.6
