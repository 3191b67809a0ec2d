"""What ranks run to test examples/train_fsdp.py: the example itself, in ranks that have started already."""

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


def printed(session: Session, *options: str) -> str:
    """Return what the example prints on this rank, started with these options."""
    command = ["train_fsdp.py", "--device", "cpu", *options]
    with patch.object(sys, "argv", command), patch.dict(os.environ, RANK=str(session.rank)):
        args = train_fsdp.arguments()
    with redirect_stdout(io.StringIO()) as output:
        train_fsdp.train(args, torch.device("cpu"))
    return output.getvalue()
