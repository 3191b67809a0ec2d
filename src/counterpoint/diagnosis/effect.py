"""Prove from a trace that copy engines moved the communication of every rank, as `counterpoint doctor --check` asks.

A trace shows copies between GPUs, not who asked for them. Those that c10d describes as a collective are NCCL's own (its
zero-CTA policy), and count as its calls; those of a process that computes on several GPUs may be the program's, so that
nothing is said of such a trace.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from counterpoint.diagnosis.api import read_ranks
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.traced_job import gpus_of, missing_ranks, numbered, world_size_of
from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.effect import CommCalls, Effect, RankEffect
from counterpoint.trace.classify import collective_op, is_nccl
from counterpoint.trace.timeline import Bools, Kind

SUM_KERNEL = "combine"  # collectives/cuda/sum_kernel.py
_MAKERS = {"nccl": "NCCL", "other": "other kernels"}
_NOT_THE_SAME = 0.01  # of the time of communication
_NO_COMMUNICATION = "record whole training steps, of every rank of a job that has two or more"
_NO_COPIES = (
    'name backend="counterpoint", or call counterpoint.overlap(model), on every rank and before what is recorded; '
    "print(counterpoint.report(group)) after a step says why torch made a call"
)


def check_effect(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Effect:
    """Return on which ranks of a job copy engines moved bytes between GPUs, from its traces.

    Args:
        source: as of `diagnose`.
        progress: called as (files done, files, what is going on).

    Raises:
        BadTrace: nothing to read, a damaged file, ranks of different jobs, or a trace that cannot show such copies.
    """
    notes: list[str] = []
    digests, files = read_ranks(source, notes, progress=progress)
    return find_effect(digests, files, notes)


def find_effect(digests: list[RankDigest], files: Sequence[str] = (), notes: Sequence[str] = ()) -> Effect:
    """Return on which of these ranks copy engines moved bytes between GPUs.

    Args:
        digests: one per rank, in any order.
        files: the names of their traces.
        notes: notes on the input files, to be put before those on the ranks.

    Raises:
        BadTrace: ranks of different jobs, or a trace that cannot show such copies.
    """
    said = list(notes)
    digests = numbered(digests, said)
    for digest in digests:
        check_shows_copies(digest)
    per_rank = tuple(_effect_on(digest) for digest in digests)
    world = world_size_of(digests)
    missing = missing_ranks(digests, world)
    if missing:
        said.append(f"no trace of {ranks_in_words(missing)} (of {world} ranks): nothing is said of them")
    copied = [rank for rank in per_rank if rank.copies]
    without = tuple(rank.rank for rank in per_rank if rank.calls and not rank.copies)
    silent = tuple(rank.rank for rank in per_rank if not rank.calls and not rank.copies)
    if copied and silent:
        said.append(f"{ranks_in_words(silent)}: neither copies nor calls; who only receives, makes none")
    return Effect(
        files=tuple(files),
        world_size=world,
        ranks=tuple(rank.rank for rank in per_rank),
        missing_ranks=missing,
        took_effect=bool(copied) and not without,
        without_effect=without,
        verdict=_verdict(per_rank, copied, without),
        fix="" if copied and not without else _NO_COPIES if without else _NO_COMMUNICATION,
        per_rank=per_rank,
        notes=tuple(said),
    )


def check_shows_copies(digest: RankDigest) -> None:
    """Raise BadTrace if a rank's trace cannot show which copies between GPUs a program made."""
    if digest.device.name == "cpu":
        raise BadTrace(
            "a trace without a GPU, and copies by copy engines can only be seen on GPUs; give traces of ranks with "
            "GPUs, or ask counterpoint.report(group).require() in the program",
            path=digest.path,
        )
    if digest.device.from_host or not len(digest.gpu):
        raise BadTrace(
            "holds nothing of what its GPU did; record with ProfilerActivity.CUDA, or nsys profile --trace=cuda",
            path=digest.path,
        )
    gpus = gpus_of(digest)
    if len(gpus) > 1:
        raise BadTrace(
            f"one process that computes on GPUs {', '.join(map(str, gpus))}, so that copies between them may be the "
            "program's own; give traces of a job with one process for each GPU",
            path=digest.path,
        )


def _effect_on(digest: RankDigest) -> RankEffect:
    gpu = digest.gpu
    between = np.array([collective_op(name) == "peer_copy" for name in digest.names], bool)[gpu.name]
    copies = between & (gpu.kind == Kind.COMM) & (gpu.collective < 0)
    sums = np.array([name == SUM_KERNEL for name in digest.names], bool)[gpu.name]
    within = np.array(["DtoD" in name for name in digest.names], bool)[gpu.name] & (gpu.kind == Kind.MEMCPY)
    within &= np.isin(gpu.stream, gpu.stream[copies])
    return RankEffect(
        rank=digest.rank,
        copies=int(copies.sum()),
        copied_bytes=_bytes(digest, copies),
        copies_us=_busy_us(digest, copies),
        own_copies=int(within.sum()),
        own_copied_bytes=_bytes(digest, within),
        own_copies_us=_busy_us(digest, within),
        sums=int(sums.sum()),
        sums_us=_busy_us(digest, sums),
        calls=_calls(digest, copies),
        communication_us=_busy_us(digest, gpu.kind == Kind.COMM),
    )


def _calls(digest: RankDigest, copies: Bools) -> tuple[CommCalls, ...]:
    """Return the collectives that are not such copies, by who made them and operation, longest first."""
    comm, found = digest.comm, defaultdict[tuple[bool, str], list[float]](list)
    for row in np.flatnonzero(~copies[comm.first]).tolist():
        name = digest.names[digest.gpu.name[comm.first[row]]]
        by_nccl = is_nccl(name) or collective_op(name) == "peer_copy"
        found[by_nccl, comm.op[row]].append(float(comm.end[row] - comm.start[row]))
    rows = [
        CommCalls(by="nccl" if by_nccl else "other", operation=op, calls=len(us), us=sum(us))
        for (by_nccl, op), us in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.us, row.operation)))


def _bytes(digest: RankDigest, rows: Bools) -> int | None:
    sizes = digest.gpu.bytes[rows]
    return None if (sizes < 0).any() else int(sizes.sum())


def _busy_us(digest: RankDigest, rows: Bools) -> float:
    running = Intervals.union(digest.gpu.start[rows], digest.gpu.end[rows])
    return float((running.end - running.start).sum())


def _verdict(per_rank: tuple[RankEffect, ...], copied: list[RankEffect], without: tuple[int, ...]) -> str:
    if not copied and not without:
        return "had no effect: these traces hold no communication"
    if not copied:
        return f"had no effect: no copy between GPUs on {_on(per_rank)}, {_left(per_rank)}"
    copies, share = sum(rank.copies for rank in copied), _share(copied)
    seen = f"{copies:,} copies between GPUs, {_moved(copied)} of communication by copy engines"
    if without:
        left = _left([rank for rank in per_rank if rank.rank in without])
        return f"had no effect on {ranks_in_words(without)}: no copy between GPUs, {left}; on {_on(copied)} {seen}"
    worst = min(copied, key=lambda rank: _share([rank]))
    least = f"; least on rank {worst.rank}: {_moved([worst])}" if share - _share([worst]) > _NOT_THE_SAME else ""
    return f"took effect on {_on(copied)}: {seen}{least}"


def _on(ranks: Sequence[RankEffect]) -> str:
    return ranks_in_words(tuple(rank.rank for rank in ranks))


def _moved(ranks: Sequence[RankEffect]) -> str:
    copies, every = sum(rank.copies_us for rank in ranks), sum(rank.communication_us for rank in ranks)
    return f"{copies / 1e3:,.2f} of {every / 1e3:,.2f} ms"


def _share(ranks: Sequence[RankEffect]) -> float:
    """Return the part of communication's time in which copy engines move bytes."""
    every = sum(rank.communication_us for rank in ranks)
    return sum(rank.copies_us for rank in ranks) / every if every else 0.0


def _left(ranks: Sequence[RankEffect]) -> str:
    """Say how many calls copy engines did not make, and who made them."""
    calls = [call for rank in ranks for call in rank.calls]
    makers = " and ".join(word for by, word in _MAKERS.items() if any(call.by == by for call in calls))
    count, us = sum(call.calls for call in calls), sum(call.us for call in calls)
    return f"{count:,} call{'s' * (count != 1)} by {makers} in {us / 1e3:,.2f} ms"
