"""A command of `--run`: where its script begins, and which commands are refused."""

from __future__ import annotations

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.tuning.script_launch import SCRIPT, parse_command


@pytest.mark.parametrize(
    ("command", "launcher", "script"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "torchrun --nproc-per-node 2", "train.py --lr 1"),
        ("torchrun --nproc-per-node=2 --standalone train.py", "torchrun --nproc-per-node=2 --standalone", "train.py"),
        ("torchrun -t3 -r 1 train.py 2", "torchrun -t3 -r 1", "train.py 2"),
        ("/opt/bin/torchrun --standalone -m pkg.train x", "/opt/bin/torchrun --standalone", "-m pkg.train x"),
        ("python -m torch.distributed.run --tee 3 a.py", "python -m torch.distributed.run --tee 3", "a.py"),
        ("python3.12 -u -X dev -Wignore train.py -m x", "python3.12 -u -X dev -Wignore", "train.py -m x"),
        ("python -m train --standalone", "python", "-m train --standalone"),
    ],
)  # fmt: skip
def test_the_script_is_found(command: str, launcher: str, script: str) -> None:
    """Behind all options of the launcher; `-m counterpoint...` comes between."""
    parsed = parse_command(command)
    assert (" ".join(parsed.launcher), " ".join(parsed.script)) == (launcher, script)
    assert " ".join(parsed.arguments(SCRIPT)) == f"{launcher} -m {SCRIPT} {script}"


def test_variables_before_a_command() -> None:
    """As a shell takes them; quotes keep spaces together."""
    parsed = parse_command("NCCL_DEBUG=INFO NAME='a b' torchrun train.py")
    assert parsed.variables == {"NCCL_DEBUG": "INFO", "NAME": "a b"}


@pytest.mark.parametrize(
    "command",
    [
        "", "srun python train.py", "accelerate launch train.py", "torchrun", "torchrun --nproc-per-node 2",
        "torchrun --no-python ./train", "python", "python -c 'print()'", "python -m", "python --version train.py",
        "torchrun 'train.py", f"torchrun -m {SCRIPT} train.py",
    ],
)  # fmt: skip
def test_what_cannot_be_taken_apart_is_refused(command: str) -> None:
    with pytest.raises(Misconfigured, match=r"--run .*(torchrun|leave out)"):
        parse_command(command)
