"""The work of one rank: every scenario and block of a plan, one after the other.

Rank 0 appends one line per finished one to the plan's results; what is there already is skipped.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import torch

import counterpoint
from counterpoint.errors import Misconfigured
from counterpoint.measure.blocks import measure_block
from counterpoint.measure.device_state import driver_version
from counterpoint.measure.launch import VARIABLES
from counterpoint.measure.pairs import Calibration, measure_scenario
from counterpoint.measure.partial import finished
from counterpoint.measure.session import Session
from counterpoint.records.measurement import Block, Environment, Plan

__all__ = ["work"]


def work(plan: Plan, at: list[str | None]) -> None:
    """Joins the other ranks, checks that they match, measures, leaves. `at[0]` is the scenario under way."""
    session = Session(plan.device, timeout_s=plan.timeout_s)
    session.agree("the plan", msgspec.json.encode(plan).decode())
    if plan.world_size != session.world_size:
        raise Misconfigured(f"the plan is for {plan.world_size} ranks and {session.world_size} were started")
    session.agree("torch", str(torch.__version__))
    session.agree("the GPU", _gpu_name(session))
    run(session, plan, at)
    session.close()


def run(session: Session, plan: Plan, at: list[str | None]) -> None:
    """Measures what the plan asks for and its results do not hold yet."""
    results = Path(plan.results)
    here = [outcome.scenario for outcome in finished(results)] if session.rank == 0 and results.exists() else []
    done = set(session.gather(here)[0])
    calibration = Calibration()
    environment: Environment | None = _environment(session) if session.rank == 0 else None
    for part in plan.parts:
        if part.name in done:
            continue
        at[0] = part.name
        outcome = (
            measure_block(session, part, plan)
            if isinstance(part, Block)
            else measure_scenario(session, part, plan, calibration)
        )
        if session.rank == 0:
            with results.open("ab") as file:
                file.write(msgspec.json.encode(msgspec.structs.replace(outcome, environment=environment)) + b"\n")
            environment = None


def _gpu_name(session: Session) -> str | None:
    return torch.cuda.get_device_name(session.device) if session.is_cuda else None


def _environment(session: Session) -> Environment:
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if session.is_cuda else None
    return Environment(
        device=session.device.type,
        gpu=_gpu_name(session),
        world_size=session.world_size,
        driver=driver_version() if session.is_cuda else None,
        torch=str(torch.__version__),
        nccl=nccl,
        counterpoint=counterpoint.__version__,
        commit=_commit(),
        command=tuple(sys.argv),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    )


def _commit() -> str | None:
    """COUNTERPOINT_COMMIT if set, else of the checkout that this file is in, with `-dirty` if it was changed."""
    told = os.environ.get("COUNTERPOINT_COMMIT")
    if told:
        return told
    describe = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() or None
