"""A rank without torch, for tests of the launcher: what it does stands in the names of the plan's scenarios.

`ok` appends an outcome; `rank1: kill 9`, `all: raise Misconfigured`, `rank0: exit 3`, `all: hang`, `rank1: stop` happen
on that rank or all, and the other ranks then wait, as they would in a collective.
"""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from counterpoint.processes import die_with_parent
from counterpoint.records.measurement import Environment, Outcome, Plan, RankFailure

ENVIRONMENT = Environment(
    device="cpu", gpu=None, world_size=2, driver=None, torch="none", nccl=None, counterpoint="0", commit=None,
    command=(), date="2026-01-01", variables={},
)  # fmt: skip


def main() -> None:
    die_with_parent()
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan)
    rank = int(os.environ["RANK"])
    print(f"rank {rank} is here", flush=True)
    Path(plan.errors, f"pid{rank}").write_text(str(os.getpid()))
    for scenario in plan.parts:
        act(plan, rank, scenario.name)


def act(plan: Plan, rank: int, name: str) -> None:
    if not name.startswith("ok"):
        who, what = name.split(": ")
        if who in ("all", f"rank{rank}"):
            end(plan, rank, name, what)
        time.sleep(600)  # in a collective that never ends
    elif rank == 0:
        line = msgspec.json.encode(Outcome(scenario=name, environment=ENVIRONMENT)) + b"\n"
        with Path(plan.results).open("ab") as file:
            file.write(line)


def end(plan: Plan, rank: int, name: str, what: str) -> None:
    verb, _, argument = what.partition(" ")
    if verb == "kill":
        os.kill(os.getpid(), int(argument))
    elif verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif verb == "exit":
        print("the last line of the log", flush=True)
        os._exit(int(argument))
    elif verb == "raise":
        failure = RankFailure(rank=rank, kind=argument, text="needs 12 GiB, there are 8", scenario=name)
        Path(plan.errors, f"rank{rank}.json").write_bytes(msgspec.json.encode(failure))
        os._exit(1)


if __name__ == "__main__":
    main()
