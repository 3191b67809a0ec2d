"""Find who made each call in a rank's trace, and the pair of a tuning it belongs to, by the rule of `Choices.find`.

A call of NCCL states its operation, size and ranks. A copy by counterpoint's engines states its bytes alone: runs of
copies of the size of one call are that pair's, all others are shared by the pairs of which none was found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import get_args

import numpy as np

from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.pair.arrivals import TensorOperation
from counterpoint.records.doctor import CommCalls, RankEffect
from counterpoint.records.tuning import TunedPair
from counterpoint.trace.classify import collective_op, is_nccl
from counterpoint.trace.timeline import I64, Bools, Kind
from counterpoint.tuned.choices import EXCHANGE, FARTHEST, Choices, stays_with_torch

SUM_KERNEL = "combine"  # collectives/cuda/sum_kernel.py
CallClass = tuple[str, int, int, str, str | None]
"""Operation, ranks, bytes per rank, dtype, and the compute of a matmul that depends on the call."""
SAME_SIZE = 0.02  # largest relative difference between the bytes of a copy run and those of a call
LEAST = 0.5  # of the bytes of one call: fewer copies prove nothing
_OPERATIONS = {  # operations of a tuning that NCCL makes by this collective
    "all_gather": ("all_gather", "all_gather_matmul"),
    "reduce_scatter": ("reduce_scatter", "matmul_reduce_scatter"),
    "all_to_all": ("all_to_all", EXCHANGE),
}


def communication_of(digest: RankDigest) -> RankEffect:
    """Return how much a rank communicated by copy engines, and by which other means."""
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
    """Return the collectives that are no copies by engines, summed by who ran them and operation, longest first."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCalls:
    """Holds the calls of one pair in one rank's trace, as row numbers of its `comm` table."""

    kernels: I64  # of NCCL
    nccl_copies: I64  # by copy engines, as NCCL told c10d
    copies: I64  # by copy engines of counterpoint: runs of the size of one call
    has_other_copies: bool  # copies of no pair's size, enough for one call of every pair without calls

    def during(self, digest: RankDigest) -> Intervals:
        """Return the intervals of these calls; where the pair's copies cannot be identified, those of all copies."""
        rows = np.concatenate((self.kernels, self.nccl_copies, self.copies))
        if not len(rows) and self.has_other_copies:
            rows = np.flatnonzero(_own_copies(digest))
        return Intervals.union(digest.comm.start[rows], digest.comm.end[rows])


def calls_of_pairs(digest: RankDigest, choices: Choices) -> dict[TunedPair, PairCalls]:
    """Return the calls of every pair that applies on this rank's machine."""
    comm, by_nccl = digest.comm, _by_nccl(digest)
    claimed, alike = defaultdict[TunedPair, list[int]](list), alike_pairs(choices.pairs)

    @cache
    def claim(operation: str, ranks: int, num_bytes: int, module: str | None) -> list[TunedPair]:
        """Return the pairs that a call may belong to: the one that decides, and similar ones with the same choice."""
        decides = _nearest(choices, operation, ranks, num_bytes / ranks, (module,) if module else ())
        alike_it = () if decides is None else alike[call_class(decides)]
        return [pair for pair in alike_it if decides and pair.mechanism == decides.mechanism and _is_of(pair, module)]

    for row in np.flatnonzero(by_nccl & (comm.size > 1) & (comm.bytes > 0)).tolist():
        for pair in claim(comm.op[row], int(comm.size[row]), int(comm.bytes[row]), comm.module[row]):
            claimed[pair].append(row)
    runs, moved = _runs(digest)
    own = {pair: runs[_same_size(moved, pair)] for pair in choices.pairs if not stays_with_torch(pair)}
    taken = np.isin(runs, np.concatenate(list(own.values()))) if own else np.zeros(len(runs), bool)
    silent = {call_class(pair): call_bytes(pair) for pair, rows in own.items() if not len(rows) and pair not in claimed}
    rest = int(moved[~taken].sum())
    enough = rest > 0 and rest >= LEAST * sum(silent.values())

    def calls(pair: TunedPair) -> PairCalls:
        rows = np.array(claimed[pair], np.int64)
        by_kernel = digest.comm.ctas[rows] != 0
        mine = own.get(pair)  # None: NCCL's, and a run of its size is ours only if no other pair wants that size
        return PairCalls(
            kernels=rows[by_kernel],
            nccl_copies=rows[~by_kernel],
            copies=runs[_same_size(moved, pair) & ~taken] if mine is None else mine,
            has_other_copies=mine is not None and enough,
        )

    return {pair: calls(pair) for pair in choices.pairs}


def alike_pairs(pairs: Iterable[TunedPair]) -> dict[CallClass, list[TunedPair]]:
    """Return the pairs by class of calls (`call_class`)."""
    found = defaultdict[CallClass, list[TunedPair]](list)
    for pair in pairs:
        found[call_class(pair)].append(pair)
    return found


def call_class(pair: TunedPair) -> CallClass:
    """Return the features of a pair's calls that a program sees; pairs with equal ones differ only in modules."""
    compute = pair.compute if pair.operation in get_args(TensorOperation) else None
    return pair.operation, pair.ranks, pair.bytes_per_rank, pair.dtype, compute


def _is_of(pair: TunedPair, module: str | None) -> bool:
    return not module or not pair.where or any(fnmatchcase(module, pattern) for pattern in pair.where)


def call_bytes(pair: TunedPair) -> int:
    """Return the bytes that one rank sends to its peers in one call."""
    return pair.bytes_per_rank * (pair.ranks - 1) * (2 if pair.operation == "all_reduce" else 1)


def _nearest(
    choices: Choices, operation: str, ranks: int, bytes_per_rank: float, where: Sequence[str]
) -> TunedPair | None:
    """Return the pair that decides for a call of NCCL; if two operations match, the pair closer in size."""
    names = _OPERATIONS.get(operation, (operation,))
    found = [choices.find(name, ranks=ranks, bytes_per_rank=bytes_per_rank, where=where) for name in names]
    pairs = [pair for pair in found if pair is not None and pair.bytes_per_rank > 0]
    nearest = min(
        pairs,
        key=lambda pair: (abs(math.log(pair.bytes_per_rank / bytes_per_rank)), not stays_with_torch(pair)),
        default=None,
    )
    if nearest is None or where:
        return nearest
    told_apart = any(_told_apart(pair, nearest) for pair in choices.pairs)
    return None if told_apart else nearest


def _told_apart(one: TunedPair, other: TunedPair) -> bool:
    """Return whether programs tell the calls of two pairs apart by module, which needs calls with a module."""
    same_calls = (one.operation, one.ranks) == (other.operation, other.ranks) and bool(one.where)
    sizes = sorted((one.bytes_per_rank, other.bytes_per_rank))
    return same_calls and one.mechanism != other.mechanism and sizes[1] <= FARTHEST * sizes[0]


def _same_size(moved: I64, pair: TunedPair) -> Bools:
    wanted = call_bytes(pair)
    return np.asarray(np.abs(moved - wanted) <= SAME_SIZE * wanted, bool)


def _runs(digest: RankDigest) -> tuple[I64, I64]:
    """Return the copy runs not described by NCCL: their rows of `comm`, and the bytes that each sent."""
    comm = digest.comm
    rows = np.flatnonzero(_own_copies(digest) & (comm.bytes > 0) & (comm.size > 1))
    size = comm.size[rows].astype(np.int64)
    return rows, comm.bytes[rows] * (size - 1) // size


def _own_copies(digest: RankDigest) -> Bools:
    return np.asarray((digest.comm.ctas == 0) & (digest.gpu.collective[digest.comm.first] < 0), bool)


def _by_nccl(digest: RankDigest) -> Bools:
    comm = digest.comm
    kernels = np.array([is_nccl(digest.names[name]) for name in digest.gpu.name[comm.first].tolist()], bool)
    return np.asarray(kernels | ((comm.ctas == 0) & (digest.gpu.collective[comm.first] >= 0)), bool)
