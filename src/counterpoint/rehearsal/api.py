"""Rehearse a script: run all its ranks on this machine's GPUs, and report differences between ranks. No torch.

Each rank counts as a host of its own for NCCL, which refuses two ranks of one host on one GPU (`rehearsed.py`).
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.driver import free_bytes, visible_gpus
from counterpoint.processes import run_folder, write_whole
from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.rehearsal import RankReport, Rehearsal, RehearsalReport
from counterpoint.rehearsal.rank import REPORT, TASK_VARIABLE, RehearsalTask
from counterpoint.rehearsed import visible_devices
from counterpoint.tuning.script_launch import (
    ALIVE,
    LOG,
    REHEARSED,
    TASK,
    RunCommand,
    modified,
    parse_command,
    run_ranks,
)

TIMEOUT_S = 600.0
BYTES_PER_RANK = 1 << 30  # memory of CUDA, cuBLAS and NCCL: 8 ranks of a tiny FSDP2 model took 10.3 GiB of an H200
_MOST_RANKS = 64
_Value = TypeVar("_Value", int, str)


def rehearse(
    command: str, *, device: str | None = None, hosts: int = 1, timeout_s: float = TIMEOUT_S, echo: bool = False
) -> Rehearsal:
    """Run an unmodified script with all its ranks on the GPUs of this machine, one of which is enough.

    Values, order, graphs, memory and errors are the same as on as many GPUs; times differ, since ranks share a GPU.

    Args:
        command: command that starts the script: "torchrun --nproc-per-node 8 train.py".
        device: cuda, or cpu, which hides GPUs from ranks; None: cuda, and Unsupported without a GPU.
        hosts: number of hosts to pretend: each has equally many consecutive ranks.
        timeout_s: longest time in which no rank prints anything or ends a step; five minutes more at the start.
        echo: print to standard output what the ranks print.

    Returns:
        What was replaced and moved, and what differed between ranks.

    Raises:
        Misconfigured: the command names no script or no number of ranks, or `hosts` does not divide that number.
        Unsupported: no GPU, or too little memory on it for so many ranks.
        PeerTimeout: ranks died, raised something or hung; names them and the log.
    """
    run = parse_command(command, "rehearse")
    world_size = _ranks_of(run)
    if hosts < 1 or world_size % hosts:
        raise Misconfigured(f"--hosts {hosts}: {world_size} ranks cannot be divided among so many; give a divisor")
    gpus = _gpus(device, world_size)
    with run_folder("counterpoint-rehearsal-") as folder, (folder / LOG).open("w+b") as log:
        task = RehearsalTask(
            folder=str(folder),
            world_size=world_size,
            ranks_per_host=world_size // hosts,
            gpus=visible_devices(len(gpus)),
        )
        write_whole(folder / TASK, task)
        try:
            run_ranks(
                run,
                REHEARSED,
                folder=folder,
                variables={  # torchrun would set 1, too, but with a warning
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    **run.variables,
                    TASK_VARIABLE: str(folder / TASK),
                },
                timeout_s=timeout_s,
                progress=lambda: (modified(folder / ALIVE), _echoed(log, echo=echo)),
                lacking="no rank printed anything or ended a step",
            )
        finally:
            _echoed(log, echo=echo)
        reports = [found for rank in range(world_size) if (found := _report(folder, rank)) is not None]
    return _rehearsal(command, world_size, hosts, gpus, reports)


def _echoed(log: BinaryIO, *, echo: bool) -> int:
    """Read what is new in a log, print this text if `echo`, and return the number of bytes read so far."""
    text = log.read()
    if echo:
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    return log.tell()


def _ranks_of(run: RunCommand) -> int:
    """Return the number of ranks that a command starts; raise `Misconfigured` if it names none, or several hosts."""
    hosts = run.options.get("--nnodes", "1")
    if hosts not in ("1", "1:1"):
        raise Misconfigured(
            f"rehearse: --nnodes {hosts}: leave it out; --nproc-per-node names all ranks, --hosts the hosts"
        )
    number = run.options.get("--nproc-per-node", "")
    if not number.isdecimal() or not 1 < int(number) <= _MOST_RANKS:
        raise Misconfigured(
            f"rehearse {str(run)!r}: --nproc-per-node {number or 'is missing'}; "
            f"write 'torchrun --nproc-per-node N train.py' with N from 2 to {_MOST_RANKS}"
        )
    return int(number)


def _gpus(device: str | None, world_size: int) -> tuple[str, ...]:
    """Return the names of the GPUs that ranks share, () on CPUs; raise `Unsupported` without a GPU or enough memory."""
    if device not in (None, "cuda", "cpu"):
        raise Misconfigured(f"--device {device}: choose cuda or cpu")
    if device == "cpu":
        return ()
    try:
        gpus = visible_gpus()
    except Unsupported:
        gpus = ()
    if not gpus:
        raise Unsupported("no GPU here; --device cpu rehearses a script that runs on CPUs, with gloo")
    gpus = gpus[:world_size]
    for index, name in enumerate(gpus):
        ranks = len(range(index, world_size, len(gpus)))
        free = free_bytes(index)
        if free < ranks * BYTES_PER_RANK:
            raise Unsupported(
                f"GPU {index} ({name}) has {free / 2**30:.1f} GiB free, and {ranks} ranks take "
                f"{BYTES_PER_RANK / 2**30:g} GiB each before their first tensor: rehearse fewer, or end other programs"
            )
    return gpus


def _report(folder: Path, rank: int) -> RankReport | None:
    try:
        return msgspec.json.decode((folder / REPORT.format(rank)).read_bytes(), type=RankReport)
    except FileNotFoundError:
        return None


def _rehearsal(
    command: str, world_size: int, hosts: int, gpus: tuple[str, ...], ranks: Sequence[RankReport]
) -> Rehearsal:
    shared = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}" if gpus else "the cores of this machine"
    missing = tuple(sorted({*range(world_size)} - {each.rank for each in ranks}))
    ended = f"{len(missing)} of {world_size} ranks left no report" if missing else "all ranks came to their end"
    texts = [(name, _by_value(of_rank)) for name, of_rank in _texts(ranks).items()]
    return Rehearsal(
        command=command,
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        world_size=world_size,
        hosts=hosts,
        steps=min((each.steps for each in ranks), default=0),
        peak_bytes=max((each.peak_bytes for each in ranks), default=0),
        reports=tuple(
            RehearsalReport(name=name, ranks=tuple(same), text=text)
            for name, each in texts
            for text, same in each.items()
        ),
        differences=(
            *_different_counts(ranks),
            *(f"{name}: {len(each)} different reports" for name, each in texts if len(each) > 1),
        ),
        missing_ranks=missing,
        verdict=f"{ended}: values and order hold, times do not: {world_size} ranks shared {shared}.",
    )


def _texts(ranks: Sequence[RankReport]) -> dict[str, dict[int, str]]:
    """Return the text of each report by name, then by rank; "" if a rank has no report of that name."""
    names = dict.fromkeys(name for each in ranks for name in each.reports)
    return {name: {each.rank: each.reports.get(name, "") for each in ranks} for name in names}


def _different_counts(ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield a sentence for each count, of optimizer steps or of a group's calls, that differs between ranks."""
    counts: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for each in ranks:
        counts["optimizer steps"][each.rank] = each.steps
        for name, calls in each.calls.items():
            counts[f"calls of torch's group {name}, {ranks_in_words(each.members[name])}"][each.rank] = calls
    for what, of_rank in counts.items():
        found = _by_value(of_rank)
        if len(found) > 1:
            yield f"{what}: " + " and ".join(
                f"{count} on {ranks_in_words(tuple(same))}" for count, same in found.items()
            )


def _by_value(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return, for each value in `values`, the list of ranks with that value."""
    ranks: defaultdict[_Value, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return ranks
