"""Run a script unchanged on one rank of a rehearsal: `torchrun ... -m counterpoint.rehearsal.rank train.py arguments`.

The variable COUNTERPOINT_REHEARSAL_TASK names the `RehearsalTask`. A rank leaves a `RankReport` at its end; one that
fails says why in a `RankFailure`, and ends with exit code 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.processes import leaving_word, write_whole
from counterpoint.records import Record
from counterpoint.rehearsed import rank_variables
from counterpoint.tuning.script_launch import ALIVE, ERRORS
from counterpoint.tuning.script_rank import begin, run_script

TASK_VARIABLE = "COUNTERPOINT_REHEARSAL_TASK"  # names the file of the task
REPORT = "reports/rank{}.json"  # a `RankReport`, in the folder of the task


class RehearsalTask(Record, frozen=True, kw_only=True):
    """Tells a rank the folder, sizes and GPUs of its rehearsal (entries of CUDA_VISIBLE_DEVICES; none: CPUs)."""

    folder: str
    world_size: int
    ranks_per_host: int
    gpus: tuple[str, ...]


def main() -> None:
    """Run the script that the command line names as one rank of a rehearsal."""
    if TASK_VARIABLE not in os.environ:
        sys.exit(f"{TASK_VARIABLE} is not set: this is started by counterpoint rehearse 'torchrun ... train.py'")
    task = msgspec.json.decode(Path(os.environ[TASK_VARIABLE]).read_bytes(), type=RehearsalTask)
    folder, rank = Path(task.folder), int(os.environ["RANK"])
    os.environ.update(rank_variables(rank, ranks_per_host=task.ranks_per_host, gpus=task.gpus))
    begin(folder, rank)
    from counterpoint.monitoring.optimizer_steps import OptimizerSteps
    from counterpoint.rehearsal.witness import Witness

    witness = Witness(rank)

    def advance() -> None:
        witness.steps += 1
        (folder / ALIVE).touch()

    counted = OptimizerSteps(advance)
    with leaving_word(folder / ERRORS, rank, lambda: f"step {witness.steps + 1}"):
        if int(os.environ["WORLD_SIZE"]) != task.world_size:
            raise Misconfigured(f"{os.environ['WORLD_SIZE']} ranks were started, and {task.world_size} asked for")
        with witness.watching():
            run_script(sys.argv[1:])
        write_whole(folder / REPORT.format(rank), witness.report())
    counted.remove()


if __name__ == "__main__":
    main()
