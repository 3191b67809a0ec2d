"""Run a training script unchanged, on one rank: `torchrun ... -m counterpoint.tuning.script.rank train.py arguments`.

The variable COUNTERPOINT_TUNING_TASK names what to do meanwhile (`steps.py`). A rank that fails says why in a
`RankFailure` of the task's folder, and ends with exit code 1.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.measurement.worker import die_with_parent
from counterpoint.records.measurement import RankFailure
from counterpoint.tuning.script.task import TASK_VARIABLE, ScriptTask, failure_file, write_whole

if TYPE_CHECKING:
    from counterpoint.tuning.script.steps import ScriptSteps


def main() -> None:
    """Run the script of the command line until the task is done."""
    if TASK_VARIABLE not in os.environ:
        sys.exit(f"{TASK_VARIABLE} is not set: this is started by counterpoint tune --run 'torchrun ... train.py'")
    die_with_parent()  # torchrun gives each rank a session of its own
    from counterpoint.monitoring.optimizer_steps import OptimizerSteps
    from counterpoint.tuning.script.steps import ScriptFinished, ScriptSteps

    task = msgspec.json.decode(Path(os.environ[TASK_VARIABLE]).read_bytes(), type=ScriptTask)
    steps = ScriptSteps(task, int(os.environ.get("RANK", "0")))
    counted = OptimizerSteps(steps.advance)
    try:
        with steps.intercepted():
            run_script(sys.argv[1:])
        check_enough(steps)
    except ScriptFinished:
        pass
    except Exception as error:
        traceback.print_exc()
        fail(steps, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a communicator that lost a peer would hold up a normal exit
    finally:
        counted.remove()


def run_script(arguments: list[str]) -> None:
    """Run a script, or a module after `-m`, as Python itself would: its folder on the path, its arguments in argv.

    Raises:
        RuntimeError: it has called `sys.exit` with anything but success.
    """
    try:
        _run(arguments)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise RuntimeError(f"the script called sys.exit({ended.code!r})") from ended


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def check_enough(steps: ScriptSteps) -> None:
    """Raise Misconfigured if the script has ended before the task was done."""
    if not steps.is_done:
        raise Misconfigured(
            f"the script ended after {steps.count} optimizer steps, and {steps.task.needed_steps} are needed: "
            "have it make more, as by an option of its own"
        )


def fail(steps: ScriptSteps, error: BaseException) -> None:
    """Say in the task's folder why this rank ends."""
    text = " ".join(str(error).split())[:1000]
    failure = RankFailure(rank=steps.rank, kind=type(error).__name__, text=text, scenario=f"step {steps.count + 1}")
    write_whole(failure_file(steps.folder, steps.rank), failure)


if __name__ == "__main__":
    main()
