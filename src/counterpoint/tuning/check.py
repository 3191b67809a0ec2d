"""Prove from traces of a job that copy engines moved its communication, or that each choice of a tuning took effect.

A trace shows copies between GPUs, not who asked for them. Copies that c10d describes as a collective are NCCL's own
(its zero-CTA policy), and count as NCCL's calls; in a process that computes on several GPUs, copies may be the
program's, so such a trace is refused.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from counterpoint.diagnosis.api import read_ranks
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.traced_job import gpus_of, missing_ranks, numbered, world_size_of
from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import ranks_in_words
from counterpoint.records.doctor import CommCalls, Effect, KnobEffect, KnobState, RankEffect
from counterpoint.records.measurement import Environment
from counterpoint.records.tuning import Tuned, TunedPair
from counterpoint.trace.classify import collective_op, is_nccl
from counterpoint.trace.timeline import Bools, Kind
from counterpoint.tuned.choices import Choices, mechanism_base, mechanism_knobs
from counterpoint.tuning.check_knobs import PairCalls, Sight, alike_pairs, calls_of_pairs, copies_seen, sight_of

SUM_KERNEL = "combine"  # collectives/cuda/sum_kernel.py
_STATES: tuple[KnobState, ...] = ("no_effect", "took_effect", "not_seen")  # the first of these on any rank counts
_NAME = "name the modules of each pair in `where`, if their calls should differ"


def check(
    traces: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tuned: Tuned | None = None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Effect:
    """Return whether copy engines moved a job's communication, or, with `tuned`, whether each choice took effect.

    `traces` are of some steps, as for `diagnose`; `progress` is called as (files done, all files, what runs now).

    Raises:
        BadTrace: nothing to read, a damaged file, ranks of different jobs, or a trace that cannot show copies.
        Misconfigured: a pair has an unknown mechanism.
    """
    notes: list[str] = []
    digests, files = read_ranks(traces, notes, progress=progress)
    return find_effect(digests, tuned, files, notes)


def find_effect(
    digests: list[RankDigest], tuned: Tuned | None = None, files: Sequence[str] = (), notes: Sequence[str] = ()
) -> Effect:
    """Return whether copy engines were used, or each choice of `tuned` took effect, as `check` does, from digests.

    `files` are the names of the ranks' traces; `notes`, on the input, come before notes on the ranks.
    """
    said = list(notes)
    digests = numbered(digests, said)
    for digest in digests:
        _check_shows_copies(digest)
    world = world_size_of(digests)
    missing = missing_ranks(digests, world)
    if missing:
        said.append(f"no trace of {ranks_in_words(missing)} (of {world} ranks): nothing is said of them")
    per_rank = tuple(map(communication_of, digests))
    knobs = (_copies(per_rank, said),) if tuned is None else _choices(tuned, digests, said)
    return Effect(
        files=tuple(files),
        world_size=world,
        ranks=tuple(digest.rank for digest in digests),
        missing_ranks=missing,
        took_effect=bool(_of(knobs, "took_effect")) and not _of(knobs, "no_effect"),
        verdict=_verdict_on_copies(knobs[0]) if tuned is None else _verdict(knobs),
        knobs=knobs,
        per_rank=per_rank,
        notes=tuple(said),
    )


def _check_shows_copies(digest: RankDigest) -> None:
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


def communication_of(digest: RankDigest) -> RankEffect:
    """Return how much of a rank's communication ran by copy engines, and how much by NCCL and other kernels."""
    gpu = digest.gpu
    between = np.array([collective_op(name) == "peer_copy" for name in digest.names], bool)[gpu.name]
    copies = between & (gpu.kind == Kind.COMM) & (gpu.collective < 0)
    sums = np.array([name == SUM_KERNEL for name in digest.names], bool)[gpu.name]
    within = np.array(["DtoD" in name for name in digest.names], bool)[gpu.name] & (gpu.kind == Kind.MEMCPY)
    within &= np.isin(gpu.stream, gpu.stream[copies])
    return RankEffect(
        rank=digest.rank, copies=int(copies.sum()), copied_bytes=_bytes(digest, copies),
        copies_us=_busy_us(digest, copies), own_copies=int(within.sum()), own_copied_bytes=_bytes(digest, within),
        own_copies_us=_busy_us(digest, within), sums=int(sums.sum()), sums_us=_busy_us(digest, sums),
        calls=_calls(digest, copies), communication_us=_busy_us(digest, gpu.kind == Kind.COMM),
    )  # fmt: skip


def _calls(digest: RankDigest, copies: Bools) -> tuple[CommCalls, ...]:
    """Return counts and times of collectives run by NCCL or other kernels, by operation, longest first."""
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


def _copies(per_rank: Sequence[RankEffect], notes: list[str]) -> KnobEffect:
    """Return whether copy engines were used: the worst state of any rank, and totals of the ranks in that state."""
    by_state = defaultdict[KnobState, list[RankEffect]](list)
    for rank in per_rank:
        by_state[copies_seen([rank]).state].append(rank)
    if "took_effect" in by_state and "not_seen" in by_state:
        silent = ranks_in_words(tuple(rank.rank for rank in by_state["not_seen"]))
        notes.append(f"{silent}: neither copies nor calls; who only receives, makes none")
    worst = next(by_state[state] for state in _STATES if state in by_state)
    sight = copies_seen(worst)
    ranks = tuple(rank.rank for rank in worst)
    return KnobEffect(knob="copies", state=sight.state, seen=sight.seen, fix=sight.fix, on_ranks=ranks)


def _choices(tuned: Tuned, digests: Sequence[RankDigest], notes: list[str]) -> tuple[KnobEffect, ...]:
    """Return the effect of each setting (knob) of each choice, in the order of the tuning's file."""
    stated = {"gpu": digests[0].device.name, "nccl": digests[0].job.get("nccl_version")}  # the file fills in the rest
    machine = replace(tuned.made, **{name: value for name, value in stated.items() if value})
    choices, overruled = Choices(tuned, machine), _overruled(tuned, machine)
    notes += [f"the file was {difference}" for difference in choices.differences]
    calls = [calls_of_pairs(digest, choices) for digest in digests]
    return tuple(
        _effect(number, pair, knob, digests, calls, overruled.get(pair))
        for number, pair in enumerate(tuned.pair, 1)
        for knob in (mechanism_base(pair), *mechanism_knobs(pair))
    )


def _overruled(tuned: Tuned, machine: Environment) -> dict[TunedPair, str]:
    """Return pairs that differ from others only in modules or compute, and whose choice programs do not follow.

    Each is mapped to the mechanism that calls without a named module follow.
    """
    found: dict[TunedPair, str] = {}
    for (operation, ranks, size, dtype, compute), pairs in alike_pairs(tuned.pair).items():
        few = Choices(replace(tuned, pair=tuple(pairs)), machine)
        decides = few.find(operation, ranks=ranks, bytes_per_rank=size, dtype=dtype, compute=compute)
        if decides is not None:
            found |= {pair: decides.mechanism for pair in pairs if pair.mechanism != decides.mechanism}
    return found


def _effect(
    number: int,
    pair: TunedPair,
    knob: str,
    digests: Sequence[RankDigest],
    calls: Sequence[dict[TunedPair, PairCalls]],
    instead: str | None,
) -> KnobEffect:
    """Return the effect of one setting (knob): the worst state on any rank, and the ranks in that state."""
    by_state = defaultdict[KnobState, list[tuple[int, Sight]]](list)
    for digest, of_pairs in zip(digests, calls, strict=True):
        sight = sight_of(digest, pair, of_pairs.get(pair), knob)
        if instead is not None and sight.state == "not_seen":
            sight = Sight(state="not_seen", seen=f"calls like these follow {instead}, by another pair", fix=_NAME)
        by_state[sight.state].append((digest.rank, sight))
    state = next(state for state in _STATES if state in by_state)
    _, shown = by_state[state][0]
    return KnobEffect(
        pair=number, operation=pair.operation, compute=pair.compute, bytes_per_rank=pair.bytes_per_rank,
        ranks=pair.ranks, mechanism=pair.mechanism, knob=knob, state=state, seen=shown.seen, fix=shown.fix,
        on_ranks=tuple(rank for rank, _ in by_state[state]),
    )  # fmt: skip


def _of(knobs: Sequence[KnobEffect], state: KnobState) -> list[KnobEffect]:
    return [knob for knob in knobs if knob.state == state]


def _verdict_on_copies(copies: KnobEffect) -> str:
    if copies.state == "not_seen":
        return f"nothing is proved: {copies.seen}"
    word = "took effect" if copies.state == "took_effect" else "had no effect"
    return f"{word} on {ranks_in_words(copies.on_ranks)}: {copies.seen}"


def _verdict(knobs: Sequence[KnobEffect]) -> str:
    took, none, unseen = (len(_of(knobs, state)) for state in ("took_effect", "no_effect", "not_seen"))
    if not knobs:
        return "nothing to prove: the file has no pair"
    rest = f", {unseen} not seen" if unseen else ""
    if none:
        return f"{none} of {len(knobs)} choices had no effect{rest}"
    if not took:
        return "nothing is proved: these traces show none of the choices"
    return f"{took} of {len(knobs)} choices took effect{rest}"
