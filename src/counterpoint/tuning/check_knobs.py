"""Prove from one rank's trace that a setting (knob) of a tuning, or the use of copy engines, took effect.

A trace shows kernels with their grids, and copies; only Nsight's exports show clusters and priorities of streams, and
none shows SMs. What a trace cannot show counts as not seen, which proves nothing.
Calls belong to the pair of a tuning that `Choices.find` names. A call of NCCL states its operation, size and ranks. A
copy by counterpoint's engines states its bytes alone: a series of copies with the size of one call belongs to
the pair with that size; all other copies are shared by the pairs for which no such series was found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import get_args

import numpy as np

from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.pair.arrivals import TensorOperation
from counterpoint.records.doctor import KnobState, RankEffect
from counterpoint.records.tuning import TunedPair
from counterpoint.trace.classify import is_gemm_kernel, is_nccl
from counterpoint.trace.timeline import I32, I64, Bools, Kind
from counterpoint.tuned.choices import EXCHANGE, FARTHEST, Choices, mechanism_base, stays_with_torch

CallClass = tuple[str, int, int, str, str | None]
"""Holds operation, ranks, bytes per rank, dtype, and the name of a dependent matmul, if any."""
SAME_SIZE = 0.02  # largest relative difference between the bytes of a copy run and those of a call
LEAST = 0.5  # of the bytes of one call: fewer copies prove nothing
_OPERATIONS = {  # operations of a tuning that NCCL makes by this collective
    "all_gather": ("all_gather", "all_gather_matmul"),
    "reduce_scatter": ("reduce_scatter", "matmul_reduce_scatter"),
    "all_to_all": ("all_to_all", EXCHANGE),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCalls:
    """Holds the calls of one tuned pair in one rank's trace, as row numbers of the trace's `comm` table."""

    kernels: I64  # of NCCL
    nccl_copies: I64  # by copy engines, as NCCL told c10d
    copies: I64  # by copy engines of counterpoint: runs of the size of one call
    has_other_copies: bool  # copies of no pair's size, enough for one call of every pair without calls

    def during(self, digest: RankDigest) -> Intervals:
        """Return the time intervals of these calls, or of all copies where the pair's copies cannot be identified."""
        rows = np.concatenate((self.kernels, self.nccl_copies, self.copies))
        if not len(rows) and self.has_other_copies:
            rows = np.flatnonzero(_own_copies(digest))
        return Intervals.union(digest.comm.start[rows], digest.comm.end[rows])


def calls_of_pairs(digest: RankDigest, choices: Choices) -> dict[TunedPair, PairCalls]:
    """Return, for every tuned pair that applies on this rank's machine, the pair's calls in the trace."""
    comm, by_nccl = digest.comm, _by_nccl(digest)
    claimed, alike = defaultdict[TunedPair, list[int]](list), alike_pairs(choices.pairs)

    @cache
    def claim(operation: str, ranks: int, num_bytes: int, module: str | None) -> list[TunedPair]:
        """Return the pairs that a call may belong to: the pair whose choice applies, and alike ones with it."""
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
    """Group the pairs by what a program sees of their calls (`call_class`)."""
    found = defaultdict[CallClass, list[TunedPair]](list)
    for pair in pairs:
        found[call_class(pair)].append(pair)
    return found


def call_class(pair: TunedPair) -> CallClass:
    """Return what a program sees of a pair's calls; pairs with equal results differ only in modules."""
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
    """Return the pair whose choice an NCCL call follows; if two operations match, the pair closer in size."""
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
    """Return whether only a call's module tells which of two pairs' choices the call follows."""
    same_calls = (one.operation, one.ranks) == (other.operation, other.ranks) and bool(one.where)
    sizes = sorted((one.bytes_per_rank, other.bytes_per_rank))
    return same_calls and one.mechanism != other.mechanism and sizes[1] <= FARTHEST * sizes[0]


def _same_size(moved: I64, pair: TunedPair) -> Bools:
    wanted = call_bytes(pair)
    return np.asarray(np.abs(moved - wanted) <= SAME_SIZE * wanted, bool)


def _runs(digest: RankDigest) -> tuple[I64, I64]:
    """Return the rows in `comm` of series of copies that NCCL did not make, and the bytes that each series sent."""
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


_BESIDE = 0.5  # fraction of a GEMM's time that must overlap a call for the GEMM to count as beside it
_ROUNDED = ("all_to_all", "send_recv")  # NCCL rounds the CTAs of these up to a power of two
_SYMMETRIC = "ncclSym"  # prefix of the names of NCCL's kernels for windows
_RECORD = "record two steps in which such a call runs, of every rank, with the activity of its GPU"
_FOLLOW = (
    "name the file on every rank and before what is recorded, by counterpoint.overlap(model, tuned=...) or "
    "COUNTERPOINT_TUNED; print(counterpoint.report(group)) after a step says why torch made a call"
)
_GROUPS = "make the process groups with it, or set its variables before they are made: counterpoint tune --to env"
_OVERLAP = (
    'name backend="counterpoint", or call counterpoint.overlap(model), on every rank and before what is recorded; '
    "print(counterpoint.report(group)) after a step says why torch made a call"
)
_COMMUNICATE = "record whole training steps, of every rank of a job that has two or more"
_MATMULS = (
    "the limit reaches GEMMs of torch in the thread that launches them, and only persistent ones; choices that name "
    "several limits are not applied"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """Holds what one rank's trace shows about one setting (knob)."""

    state: KnobState
    seen: str
    fix: str = ""  # what to do, or what to record; empty if it took effect


def _proved(took: bool, seen: str, fix: str) -> Sight:
    return Sight(state="took_effect", seen=seen) if took else Sight(state="no_effect", seen=seen, fix=fix)


def copies_seen(ranks: Sequence[RankEffect]) -> Sight:
    """Return `took_effect` if any rank copied between GPUs, `no_effect` if kernels communicated, else `not_seen`."""
    calls = [call for rank in ranks for call in rank.calls]
    if any(rank.copies for rank in ranks):
        count = sum(rank.copies for rank in ranks)
        copies_us, every_us = sum(rank.copies_us for rank in ranks), sum(rank.communication_us for rank in ranks)
        moved = f"{copies_us / 1e3:,.2f} of {every_us / 1e3:,.2f} ms of communication by copy engines"
        return _proved(True, f"{count:,} copies between GPUs, {moved}", "")
    if not calls:
        return Sight(state="not_seen", seen="these traces hold no communication", fix=_COMMUNICATE)
    words = {"nccl": "NCCL", "other": "other kernels"}
    makers = " and ".join(word for by, word in words.items() if any(call.by == by for call in calls))
    made, us = sum(call.calls for call in calls), sum(call.us for call in calls)
    seen = f"no copy between GPUs, {made:,} call{'s' * (made != 1)} by {makers} in {us / 1e3:,.2f} ms"
    return _proved(False, seen, _OVERLAP)


def sight_of(digest: RankDigest, pair: TunedPair, calls: PairCalls | None, knob: str) -> Sight:
    """Return whether a rank's trace proves that `knob`, the pair's base mechanism or a setting of it, took effect.

    `calls` are the pair's calls on this rank; None: the choice does not apply on this machine.
    """
    if calls is None:
        return Sight(
            state="not_seen", seen="not followed on this machine", fix="tune on this machine, with these versions"
        )
    if knob == mechanism_base(pair):
        return _stays(digest, pair, calls) if stays_with_torch(pair) else _moved(digest, pair, calls)
    key, _, value = knob.partition("=")
    if key not in _PROOFS:
        return Sight(state="not_seen", seen="a trace does not hold it", fix=_measured(pair))
    return _PROOFS[key](digest, pair, calls, value)


def _measured(pair: TunedPair) -> str:
    return f"counterpoint measure quick --mechanism {pair.mechanism} proves it on a machine"


def _stays(digest: RankDigest, pair: TunedPair, calls: PairCalls) -> Sight:
    """Check that NCCL ran a pair's calls, by kernels or, with its zero-CTA policy, by copy engines."""
    if mechanism_base(pair) == "nccl_zero_cta":
        return _zero_cta(digest, pair, calls, "zero")
    made = len(calls.kernels) + len(calls.nccl_copies)
    if made:
        return Sight(state="took_effect", seen=f"{_calls_text(made)} by NCCL{_ctas_text(digest, calls.kernels)}")
    if len(calls.copies):
        seen = f"no call by NCCL, and {len(calls.copies)} of its size by copy engines"
        return Sight(state="no_effect", seen=seen, fix=_FOLLOW)
    return _no_call()


def _moved(digest: RankDigest, pair: TunedPair, calls: PairCalls) -> Sight:
    """Check that copy engines, not NCCL, moved a pair's bytes."""
    if made := len(calls.kernels) + len(calls.nccl_copies):
        seen = f"{_calls_text(made)} by NCCL{_ctas_text(digest, calls.kernels)}"
        return Sight(state="no_effect", seen=seen, fix=_FOLLOW)
    if not len(calls.copies) and not calls.has_other_copies:
        return _no_call()
    seen = f"{_calls_text(len(calls.copies))} by copy engines" if len(calls.copies) else "copies of other sizes"
    return Sight(state="took_effect", seen=f"{seen}, none by NCCL")


def _no_call() -> Sight:
    return Sight(state="not_seen", seen="no such call", fix=_RECORD)


def _zero_cta(digest: RankDigest, pair: TunedPair, calls: PairCalls, value: str) -> Sight:
    """Check NCCL's CTA policy: `zero` copies without kernels, the default runs kernels, `efficiency` has no proof."""
    if value == "efficiency":
        return Sight(
            state="not_seen", seen="fewer CTAs than without it cannot be told from one trace", fix=_measured(pair)
        )
    if not len(calls.kernels) and not len(calls.nccl_copies):
        return _no_call()
    took = bool(len(calls.nccl_copies)) and not len(calls.kernels) if value == "zero" else bool(len(calls.kernels))
    seen = f"{_calls_text(len(calls.nccl_copies))} by NCCL's copies, {len(calls.kernels)} by its kernels"
    windows = "register both buffers as windows, and use another stream than the default one"
    return _proved(took, seen, f"{_GROUPS}; {windows}")


def _most_ctas(digest: RankDigest, pair: TunedPair, calls: PairCalls, value: str) -> Sight:
    limit = int(value)
    if pair.operation in _ROUNDED:
        limit = 1 << (limit - 1).bit_length()
    return _within(digest, calls, lambda ctas: ctas <= limit)


def _within(digest: RankDigest, calls: PairCalls, allowed: Callable[[int], bool]) -> Sight:
    """Check that NCCL's kernels have an allowed number of CTAs; a trace does not show the number without the limit."""
    found = _ctas(digest, calls.kernels)
    if not found:
        return _no_call()
    took = all(map(allowed, found))
    seen = f"kernels{_ctas_text(digest, calls.kernels)}"
    return _proved(took, seen, _GROUPS)


def _windows(digest: RankDigest, pair: TunedPair, calls: PairCalls, value: str) -> Sight:
    names = [digest.names[name] for name in digest.gpu.name[digest.comm.first[calls.kernels]].tolist()]
    if not names and not len(calls.nccl_copies):
        return _no_call()
    plain = sum(not name.startswith(_SYMMETRIC) for name in names)
    copied = _calls_text(len(calls.nccl_copies))
    seen = f"{copied} by NCCL's copies, {len(names) - plain} by kernels for windows, {plain} by others"
    return _proved(not plain, seen, _GROUPS)


def _cluster(digest: RankDigest, pair: TunedPair, calls: PairCalls, value: str) -> Sight:
    """Check the cluster size of NCCL's kernels; 0 means no clusters, which a trace shows as clusters of one block."""
    if not len(calls.kernels):
        return _no_call()
    if digest.gpu.cluster is None:
        return _not_held("clusters", pair)
    found = np.unique(np.maximum(digest.gpu.cluster[digest.comm.first[calls.kernels]], 1))
    took = bool((found == max(int(value), 1)).all())
    seen = f"kernels in clusters of {_listed(found)} blocks"
    return _proved(took, seen, _GROUPS)


def _priority(digest: RankDigest, pair: TunedPair, calls: PairCalls, value: str) -> Sight:
    """Check the priorities of NCCL's streams against the compute streams'; a lower value is a higher priority."""
    if not len(calls.kernels):
        return _no_call()
    computing = np.unique(digest.gpu.stream[digest.gpu.kind == Kind.COMPUTE]).tolist()
    comm = [digest.priorities.get(stream) for stream in np.unique(digest.comm.stream[calls.kernels]).tolist()]
    known = [each for each in comm if each is not None]
    compute = [digest.priorities[stream] for stream in computing if stream in digest.priorities]
    if len(known) < len(comm) or (value == "low" and not compute):
        return _not_held("priorities of streams", pair)
    if value == "high":
        took = max(known) < min([0, *compute])
    elif value == "low":
        took = max(compute) < min(known)
    else:
        took = set(known) == {0 if value == "default" else int(value)}
    seen = f"streams of priority {_listed(sorted(set(known)))}, compute on {_listed(sorted(set(compute))) or 'others'}"
    return _proved(took, seen, _GROUPS)


def _not_held(what: str, pair: TunedPair) -> Sight:
    return Sight(
        state="not_seen",
        seen=f"this trace does not hold {what}",
        fix=f"record it by nsys profile; or {_measured(pair)}",
    )


def _gemm_sms(digest: RankDigest, pair: TunedPair, calls: PairCalls, value: str) -> Sight:
    """Check that persistent GEMMs beside the calls (those with at most one block per SM) keep to the limit."""
    if value == "fit":
        return Sight(state="not_seen", seen="the limit was chosen call by call", fix=_measured(pair))
    gpu, limit, most = digest.gpu, int(value), digest.device.num_sms or 1 << 31
    gemm = np.array([is_gemm_kernel(name) for name in digest.names], bool)[gpu.name] & (gpu.kind == Kind.COMPUTE)
    beside = calls.during(digest).within(gpu.start, gpu.end) >= _BESIDE * (gpu.end - gpu.start)
    grids = np.unique(gpu.grid[gemm & beside].astype(np.int64).prod(axis=1))
    grids = grids[grids > 0]
    if not len(grids):
        return Sight(state="not_seen", seen="no GEMM beside such a call", fix=_RECORD)
    took = bool((grids <= limit).any()) and not ((grids > limit) & (grids <= most)).any()
    seen = f"GEMMs of {_listed(grids)} blocks"
    return _proved(took, seen, _MATMULS)


def _calls_text(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


def _ctas(digest: RankDigest, kernels: I64) -> list[int]:
    return [ctas for ctas in np.unique(digest.comm.ctas[kernels]).tolist() if ctas > 0]


def _ctas_text(digest: RankDigest, kernels: I64) -> str:
    found = _ctas(digest, kernels)
    return f" of {_listed(found)} CTAs" if found else ""


def _listed(numbers: list[int] | I32 | I64) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


_PROOFS: dict[str, Callable[[RankDigest, TunedPair, PairCalls, str], Sight]] = {
    "max_ctas": _most_ctas,
    "min_ctas": lambda digest, pair, calls, value: _within(digest, calls, lambda ctas: ctas >= int(value)),
    "cta_policy": _zero_cta,
    "windows": _windows,
    "gemm_sms": _gemm_sms,
    "cga_cluster": _cluster,
    "priority": _priority,
}
"""Maps a setting's key to the check of its effect; settings with other keys leave nothing in a trace."""
