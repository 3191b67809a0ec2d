"""Run an unchanged training script on one rank: `torchrun ... -m counterpoint.tuning.script_rank train.py arguments`.

The variable COUNTERPOINT_TUNING_TASK names what to do meanwhile (`steps.py`). A rank that fails says why in a
`RankFailure` of the task's folder, and ends with exit code 1.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
from pathlib import Path

import msgspec

from counterpoint.errors import Misconfigured
from counterpoint.processes import die_with_parent, leaving_word
from counterpoint.tuning.script_launch import ERRORS, PROCESSES, STACKS, TASK_VARIABLE, ScriptTask


def main() -> None:
    """Run the script on the command line until its task is done."""
    if TASK_VARIABLE not in os.environ:
        sys.exit(f"{TASK_VARIABLE} is not set: this is started by counterpoint tune --run 'torchrun ... train.py'")
    task = msgspec.json.decode(Path(os.environ[TASK_VARIABLE]).read_bytes(), type=ScriptTask)
    folder, rank = Path(task.folder), int(os.environ.get("RANK", "0"))
    begin(folder, rank)
    from counterpoint.monitoring.optimizer_steps import OptimizerSteps
    from counterpoint.tuning.script_steps import ScriptFinished, ScriptSteps

    steps = ScriptSteps(task, rank)
    counted = OptimizerSteps(steps.advance)
    try:
        with leaving_word(folder / ERRORS, rank, lambda: f"step {steps.count + 1}"), steps.intercepted():
            run_script(sys.argv[1:])
            if not steps.is_done:
                raise Misconfigured(
                    f"the script ended after {steps.count} optimizer steps, and {task.needed_steps} are needed: "
                    "have it make more, as by an option of its own"
                )
    except ScriptFinished:
        pass
    finally:
        counted.remove()


def begin(folder: Path, rank: int) -> None:
    """Make this rank die with its launcher and write its stacks if it hangs; called before torch is imported."""
    die_with_parent()  # torchrun gives each rank a session of its own
    (folder / PROCESSES).mkdir(exist_ok=True)
    (folder / PROCESSES / str(rank)).write_text(str(os.getpid()))
    faulthandler.enable((folder / STACKS.format(rank)).open("wb"))


def run_script(arguments: list[str]) -> None:
    """Run a script, or a module after `-m`, as Python does; raise RuntimeError for `sys.exit` with a failure."""
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


if __name__ == "__main__":
    main()
