"""Rehearse a script: start its ranks on the GPUs that are there, wait, and say what differed. No torch.

Each rank counts as a host of its own for NCCL, which refuses two ranks of one host on one GPU (`rehearsed.py`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.driver import free_bytes, visible_gpus
from counterpoint.measurement.api import run_folder
from counterpoint.records.rehearsal import RankReport, Rehearsal, RehearsalReport
from counterpoint.rehearsal.task import TASK_VARIABLE, RehearsalTask, report_file
from counterpoint.rehearsed import is_rehearsal, visible_devices
from counterpoint.tuning.script.command import REHEARSED, RunCommand, parse_command
from counterpoint.tuning.script.launch import LOG, modified, run_ranks
from counterpoint.tuning.script.task import alive_file, write_whole

TIMEOUT_S = 600.0
BYTES_PER_RANK = 1 << 30  # CUDA's context, cuBLAS and NCCL's buffers of a rank on an H100, before any tensor of its own
_MOST_RANKS = 64
_HOLDS = "values and order hold"
_NOT_TIMES = "times do not: {} ranks shared {}"


def rehearse(
    command: str,
    *,
    device: str | None = None,
    hosts: int = 1,
    timeout_s: float = TIMEOUT_S,
    echo: bool = False,
) -> Rehearsal:
    """Run an unmodified script with all its ranks on the GPUs of this machine, one of which is enough.

    Values, order, graphs, memory and errors are those of as many GPUs; times are not, since ranks share a GPU.

    Args:
        command: what starts the script: "torchrun --nproc-per-node 8 train.py".
        device: cuda, or cpu, where ranks see no GPU; None: cuda if there is a GPU.
        hosts: among how many hosts the ranks are counted, in equal parts, in order.
        timeout_s: longest time in which no rank prints anything or ends a step; five minutes more at the start.
        echo: print to standard output what the ranks print.

    Returns:
        What was replaced and moved, and what differed between ranks.

    Raises:
        Misconfigured: the command names no script or no number of ranks, or `hosts` does not divide that.
        Unsupported: no GPU, or too little memory on it for so many ranks.
        PeerTimeout: ranks died, raised something or hung; names them and the log.
    """
    run = parse_command(command, "rehearse")
    world_size = _ranks_of(run)
    if hosts < 1 or world_size % hosts:
        raise Misconfigured(f"--hosts {hosts}: {world_size} ranks cannot be divided among so many; give a divisor")
    if is_rehearsal():
        raise Misconfigured("this is a rank of a rehearsal already: start the script itself")
    gpus = _gpus(device, world_size)
    with run_folder("counterpoint-rehearsal-") as folder:
        task = RehearsalTask(
            folder=str(folder),
            world_size=world_size,
            ranks_per_host=world_size // hosts,
            gpus=visible_devices(len(gpus)),
        )
        write_whole(folder / "task.json", task)
        printed = _Echo(folder / LOG, echo)
        try:
            run_ranks(
                run,
                REHEARSED,
                folder=folder,
                variables={TASK_VARIABLE: str(folder / "task.json")},
                timeout_s=timeout_s,
                progress=lambda: (modified(alive_file(folder)), printed.new()),
                hung="no rank printed anything or ended a step",
            )
        finally:
            printed.new()
        reports = [found for rank in range(world_size) if (found := _report(folder, rank)) is not None]
    return _rehearsal(command, world_size, hosts, gpus, reports)


class _Echo:
    """Follows a log: `new` returns its size, and prints what has come since the last call if that is wanted."""

    def __init__(self, log: Path, wanted: bool) -> None:
        self._log, self._wanted, self._size = log, wanted, 0

    def new(self) -> int:
        if not self._log.exists():
            return 0
        with self._log.open("rb") as file:
            file.seek(self._size)
            text = file.read()
        self._size += len(text)
        if self._wanted and text:
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
        return self._size


def _ranks_of(run: RunCommand) -> int:
    """Return the number of ranks that a command starts; raise `Misconfigured` if it names none, or several hosts."""
    given = dict(_options(run.launcher))
    if given.get("nnodes", "1") not in ("1", "1:1"):
        raise Misconfigured(
            f"rehearse: --nnodes {given['nnodes']}: leave it out; --nproc-per-node names all ranks, --hosts the hosts"
        )
    number = given.get("nproc-per-node", "")
    if not number.isdigit() or not 1 < int(number) <= _MOST_RANKS:
        raise Misconfigured(
            f"rehearse {str(run)!r}: --nproc-per-node {number or 'is missing'}; "
            f"write 'torchrun --nproc-per-node N train.py' with N from 2 to {_MOST_RANKS}"
        )
    return int(number)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the long options of a launcher with their values, underscores as hyphens."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, is_one, value = word.partition("=")
        if name.startswith("--"):
            yield name[2:].replace("_", "-"), value if is_one else following


def _gpus(device: str | None, world_size: int) -> tuple[str, ...]:
    """Return the names of the GPUs to share, none for CPUs; raise `Unsupported` without one, or without memory."""
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
        return msgspec.json.decode(report_file(folder, rank).read_bytes(), type=RankReport)
    except FileNotFoundError:
        return None


def _rehearsal(
    command: str, world_size: int, hosts: int, gpus: tuple[str, ...], reports: Sequence[RankReport]
) -> Rehearsal:
    shared = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}" if gpus else "the cores of this machine"
    differences = (*_different_steps(reports), *_different_calls(reports), *_different_reports(reports))
    missing = tuple(sorted({*range(world_size)} - {report.rank for report in reports}))
    ended = "all ranks came to their end" if not missing else f"{len(missing)} ranks left no report"
    return Rehearsal(
        command=command,
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        world_size=world_size,
        hosts=hosts,
        steps=min((report.steps for report in reports), default=0),
        peak_bytes=max((report.peak_bytes for report in reports), default=0),
        reports=tuple(_merged(reports)),
        differences=differences,
        missing_ranks=missing,
        verdict=f"{ended}: {_HOLDS}, {_NOT_TIMES.format(world_size, shared)}.",
    )


def _merged(reports: Sequence[RankReport]) -> Iterator[RehearsalReport]:
    """Yield each report once, with all ranks that left the same one."""
    ranks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for report in reports:
        for name, text in report.reports.items():
            ranks[name, text].append(report.rank)
    for (name, text), same in ranks.items():
        yield RehearsalReport(name=name, ranks=tuple(same), text=text)


def _different_steps(reports: Sequence[RankReport]) -> Iterator[str]:
    if said := _by_value({report.rank: report.steps for report in reports}):
        yield f"optimizer steps: {said}"


def _different_calls(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield a sentence for each group whose ranks made different numbers of collectives."""
    for name in dict.fromkeys(name for report in reports for name in report.calls):
        mine = {report.rank: report.calls[name] for report in reports if name in report.calls}
        if said := _by_value(mine):
            yield f"collectives of torch's group {name}: {said}"


def _different_reports(reports: Sequence[RankReport]) -> Iterator[str]:
    """Yield a sentence for each report whose text, which has calls and sizes, is not the same on all ranks."""
    names = dict.fromkeys(name for report in reports for name in report.reports)
    for name in names:
        texts = {report.rank: report.reports.get(name, "") for report in reports}
        if len({*texts.values()}) > 1:
            lines = [{*text.splitlines()} for text in texts.values()]
            common = set.intersection(*lines)
            others = {rank: len({*text.splitlines()} - common) for rank, text in texts.items()}
            yield f"{name}: " + "; ".join(
                f"{count} lines on rank {rank} that others lack" for rank, count in others.items() if count
            )


def _by_value(values: dict[int, Any]) -> str:
    """Return which ranks have which value; empty if all have one."""
    if len({*values.values()}) < 2:
        return ""
    ranks: defaultdict[Any, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}" for value, same in ranks.items()
    )
