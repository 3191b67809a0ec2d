"""What ranks run to test examples/train_*.py: the examples themselves, in ranks that have started already."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch

from counterpoint.measurement.session import Session

sys.path.append(str(Path(__file__).parents[2] / "examples"))
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
