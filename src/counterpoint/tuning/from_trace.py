"""Find the pairs of a training step in its traces: each kind of collective, and the matmuls that run beside it.

Collectives of one operation, size, group size, dtype and phase are one class, since layers repeat. The pair of a class
is its collective and the compute that runs from when the collective is ready (perhaps held up by a kernel on every SM:
`find_blocked`) until it ends. If no matmul runs in that time, the pair has the compute until the next collective of the
class is ready: both would overlap if the collective were launched earlier. The class's longest matmul, repeated to fill
the time of all its matmuls, represents them. A gather and the matmuls right after it that multiply the gathered rows
are one pair, `all_gather_matmul`; so are a matmul and the scatter of its product, `matmul_reduce_scatter`.
All_to_alls of tokens are `exchange` (traced_exchange.py).
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from counterpoint.diagnosis.analysis.kernels import find_blocked
from counterpoint.diagnosis.api import read_ranks
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.operator_work import matrix_product
from counterpoint.diagnosis.reading.traced_job import TracedJob, assemble
from counterpoint.errors import Misconfigured
from counterpoint.records.measurement import LEGS, Order
from counterpoint.records.tuning import StepPair, as_sentence
from counterpoint.trace.classify import dtype_bytes, is_gemm_kernel, is_host_matmul
from counterpoint.trace.timeline import F64, I64, Bools, Kind
from counterpoint.tuning.pairs import check_pair
from counterpoint.tuning.traced_exchange import LARGEST, Product, TracedExchange, exchanges_of

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
DEPENDENT = {"all_gather": "all_gather_matmul", "reduce_scatter": "matmul_reduce_scatter"}
_MOST = 200  # classes of pairs, and notes
_SHAPES = 32  # matmul shapes that are distinguished on a rank: those with the most time
_SHARE = 4  # most matmuls that share one gather: query, key and value, or gate and up
_SHORTEST_US = 1.0
_REPEATS = 99  # largest repeat count in a workload's name
_AGREE = 0.75  # share of a class's calls in which the same side came first
_MODULES = 64
_SMALLEST_BYTES = 4096  # bytes of a rank: a smaller collective takes a few µs by any mechanism


def pairs_of_traces(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[tuple[StepPair, ...], tuple[str, ...]]:
    """Return one pair for each class of collectives in a step, longest communication first, and notes on the rest.

    `source` are traces of one or all ranks, as for `diagnose`; recorded with `record_shapes=True`.

    Raises:
        BadTrace: nothing to read, a damaged file, or ranks of different jobs.
    """
    notes: list[str] = []
    digests, _ = read_ranks(source, notes)
    return pairs_of_job(assemble(digests), notes)


def pairs_of_job(job: TracedJob, notes: Sequence[str] = ()) -> tuple[tuple[StepPair, ...], tuple[str, ...]]:
    """Return the pairs of a job with digested traces, and `notes` with new ones appended."""
    found: defaultdict[PairKind, PairClass] = defaultdict(PairClass)
    left_out: Counter[str] = Counter()
    blocked = find_blocked(job)
    for column in range(len(job.ranks)):
        lost = np.zeros(len(job.digests[column].comm))
        for one in blocked:
            if one.column == column:
                lost[one.row] = one.lost_us
        _Rank(job, column, lost).add_to(found, left_out)
    per_step = 1.0 / (job.num_steps * len(job.ranks))
    pairs: defaultdict[StepPair, float] = defaultdict(float)
    said = []
    for kind, members in sorted(found.items(), key=lambda item: -item[1].comm_us):
        pair = members.pair(kind)
        try:
            check_pair(pair)
            pairs[pair] += members.pairs(kind)
        except Misconfigured as error:
            said.append(as_sentence(f"a pair of the trace is left out: {error}"))
    if not found and not left_out:
        said.append("no step of the traces has a collective")
    said += [_NOTES[why].format(calls=_calls(count * per_step)) for why, count in left_out.items()]
    if len(pairs) > _MOST:
        said.append(f"{len(pairs) - _MOST} of {len(pairs)} classes of pairs are left out: those that communicate least")
    made = [replace(pair, calls=_calls(count * per_step)) for pair, count in [*pairs.items()][:_MOST]]
    return tuple(made), tuple(map(as_sentence, (*notes, *said[-_MOST:])))


_NOTES = {  # why a collective is no pair, and what would help
    "shapes": "{calls} collectives of a step run beside matmuls whose shapes the trace does not say, and are left out: "
    "record it with record_shapes=True",
    "bytes": "{calls} collectives of a step are left out, as the trace does not say their size or ranks: record it "
    "with record_shapes=True",
    "copies": "{calls} copies between GPUs of a step are left out, as the trace does not say which collective they are:"
    " record the step without counterpoint.overlap",
    "small": "{calls} collectives of a step are of less than 4 KiB a rank, and are left out",
    "alone": "{calls} collectives of a step have no matmul beside them, nor before the next one, and are left out",
    "tokens": "{calls} all_to_alls of a step have parts of unequal sizes, as of tokens that go to experts, but no "
    "topk and matmul of a router in the trace fit them, so that they are taken for any all_to_alls: if they are such, "
    'write operation = "exchange" and compute = "HIDDENxFFNxEXPERTSxTOP_K TOKENS zipf" to pairs.toml',
    "other": "{calls} broadcasts, sends or other calls of a step are left out: only all_gather, reduce_scatter, "
    "all_reduce and all_to_all are tuned",
}


def _calls(count: float) -> int:
    return max(round(count), 1)


@dataclass(frozen=True, slots=True)
class PairKind:
    """Identifies one class of collectives by operation, size, ranks, dtype, phase and dependent computation."""

    operation: str
    bytes_per_rank: int
    ranks: int
    dtype: str
    phase: str | None
    depends: Product | TracedExchange | None  # the matmul or exchange of which the collective is a part


@dataclass(slots=True)
class PairClass:
    """Sums up the calls of one class of collectives, and the matmuls beside them."""

    calls: int = 0
    comm_us: float = 0.0
    beside_us: defaultdict[Product, float] = field(default_factory=lambda: defaultdict(float))
    alone_us: dict[Product, float] = field(default_factory=dict)  # mean time of such a matmul
    dtypes: dict[Product, str] = field(default_factory=dict)  # where the trace says that of such a matmul
    first: Counter[Order | None] = field(default_factory=Counter)
    uneven: float = 0.0  # sum over calls of |received - sent| / sent of the rank
    modules: set[str | None] = field(default_factory=set)

    def pair(self, kind: PairKind) -> StepPair:
        """Return one `StepPair` that represents all calls of the class."""
        order, votes = self.first.most_common(1)[0]
        dtype = None
        if isinstance(kind.depends, TracedExchange):
            compute = kind.depends.compute(self.uneven / self.calls)
        elif kind.depends:
            compute = _gemm(kind.depends)
        else:
            compute, dtype = self._longest()
        return StepPair(
            operation=kind.operation, compute=compute, bytes_per_rank=kind.bytes_per_rank, ranks=kind.ranks,
            dtype=kind.dtype, compute_dtype=None if dtype == kind.dtype else dtype,
            first=order if votes >= _AGREE * self.calls and not kind.depends else None, where=_patterns(self.modules),
        )  # fmt: skip

    def pairs(self, kind: PairKind) -> float:
        """Return how many pairs the calls make; for token exchanges, two calls, dispatch and combine, make one pair."""
        return self.calls / (len(LEGS) if isinstance(kind.depends, TracedExchange) else 1)

    def _longest(self) -> tuple[str, str | None]:
        """Return the longest matmul, repeated to fill the time of all matmuls of a call, and its dtype or None."""
        longest = max(self.beside_us, key=lambda product: self.beside_us[product])
        us = sum(self.beside_us.values()) / self.calls
        times = min(max(round(us / self.alone_us[longest]), 1), _REPEATS)
        return _gemm(longest, times), self.dtypes.get(longest)


def _gemm(product: Product, times: int = 1) -> str:
    return f"gemm {'x'.join(map(str, product))}" + (f"*{times}" if times > 1 else "")


def _patterns(modules: set[str | None]) -> tuple[str, ...]:
    """Return module names as fnmatch patterns such as `layers.*`; () if a name is unknown or there are too many."""
    names = sorted({re.sub(r"\d+", "*", name) for name in modules if name})
    return () if None in modules or len(names) > _MODULES else tuple(names)


class _Rank:
    """Finds the collectives of one rank and the matmuls beside them; times are on the job's common clock."""

    def __init__(self, job: TracedJob, column: int, lost_us: F64) -> None:
        self.digest: RankDigest = job.digests[column]
        gpu, comm = self.digest.gpu, self.digest.comm
        self.start, self.end = job.op_start[column], job.op_end[column]
        self.ready = self.start[comm.first] - lost_us
        self.done = job.on_job_clock(column, comm.end)
        steps = job.steps_of(column)
        self.rows = np.flatnonzero(steps.covers(self.start[comm.first]))
        self.busy = job.busy(column, Kind.COMPUTE)
        self.is_beside = self.busy.within(self.ready, self.done) > 0.5 * (self.done - self.ready)
        is_matmul_name = np.array([is_gemm_kernel(n) or is_host_matmul(n) for n in self.digest.names], bool)
        of_compute = np.flatnonzero(gpu.kind == Kind.COMPUTE)
        self.matmuls = of_compute[is_matmul_name[gpu.name[of_compute]]] if len(of_compute) else of_compute
        self.dtypes: dict[Product, str] = {}  # where the trace says it
        self.products, self.which, every = self._products()
        self.next_ready = self._next_ready()
        self.dependent, self.waiting = self._dependents()
        self.exchanges = exchanges_of(self.digest, self.rows, every)

    def add_to(self, found: defaultdict[PairKind, PairClass], left_out: Counter[str]) -> None:
        """Add this rank's calls to their classes in `found`; count calls that make no pair in `left_out`, by reason."""
        comm, rows = self.digest.comm, self.rows
        beside, unknown = self._beside(self.ready[rows], self.done[rows])
        until = np.where(np.isfinite(self.next_ready[rows]), self.next_ready[rows], self.done[rows])
        later, later_unknown = self._beside(self.done[rows], until)
        ahead = self.busy.within(self.ready[rows] - _SHORTEST_US, self.ready[rows]) > 0.5 * _SHORTEST_US
        mean_us = self._mean_us()
        for at, row in enumerate(rows.tolist()):
            if (why := self._no_pair(row)) is not None:
                left_out[why] += 1
                continue
            if row in self.exchanges:
                self._add_exchange(found, row, self.exchanges[row])
                continue
            if comm.op[row] == "all_to_all" and comm.sent[row] != comm.received[row]:
                left_out["tokens"] += 1
            matmul = self.dependent.get(row)
            waits = (comm.op[row], int(comm.bytes[row])) in self.waiting
            us = beside[:, at] if beside[:, at].any() or unknown[at] > 0 or waits else later[:, at]
            if matmul is None and not us.any():
                left_out["shapes" if unknown[at] > 0 or later_unknown[at] > 0 else "alone"] += 1
                continue
            kind = PairKind(
                operation=DEPENDENT[comm.op[row]] if matmul else comm.op[row],
                bytes_per_rank=int(comm.bytes[row]) // int(comm.size[row]),
                ranks=int(comm.size[row]),
                dtype=comm.dtype[row] or "",
                phase=comm.phase[row],
                depends=matmul,
            )
            members = found[kind]
            members.calls += 1
            members.comm_us += float(self.done[row] - self.ready[row])
            members.modules.add(comm.module[row])
            members.first[self._order(bool(ahead[at]))] += 1
            for number in np.flatnonzero(us).tolist():
                members.beside_us[self.products[number]] += float(us[number])
                members.alone_us.setdefault(self.products[number], mean_us[number])
                if (dtype := self.dtypes.get(self.products[number])) is not None:
                    members.dtypes.setdefault(self.products[number], dtype)

    def _add_exchange(self, found: defaultdict[PairKind, PairClass], row: int, exchange: TracedExchange) -> None:
        """Add one call of an MoE token exchange (dispatch, combine or a backward) to its class."""
        comm = self.digest.comm
        sent, received = int(comm.sent[row]), int(comm.received[row])
        dtype = comm.dtype[row] or ""
        size = exchange.tokens * exchange.top_k * exchange.hidden * (dtype_bytes(dtype) or 0)
        kind = PairKind("exchange", size, int(comm.size[row]), dtype, None, exchange)
        members = found[kind]
        members.calls += 1
        members.comm_us += float(self.done[row] - self.ready[row])
        members.uneven += abs(received - sent) / size
        members.first[None] += 1
        members.modules.add(comm.module[row])

    def _no_pair(self, row: int) -> str | None:
        """Return why a collective cannot be paired with a computation; None if it can."""
        comm = self.digest.comm
        if comm.op[row] == "peer_copy":
            return "copies"
        if comm.op[row] not in COLLECTIVES:
            return "other"
        if comm.bytes[row] <= 0 or comm.size[row] < 2 or comm.dtype[row] is None:
            return "bytes"
        return "small" if comm.bytes[row] < _SMALLEST_BYTES * comm.size[row] else None

    def _order(self, compute_ran: bool) -> Order | None:
        """Return whether computation or collective reached the GPU first; None in traces without GPUs."""
        if self.digest.device.from_host:
            return None
        return "compute_first" if compute_ran else "comm_first"

    def _products(self) -> tuple[list[Product], I64, list[Product]]:
        """Return the longest matmul shapes, an index of them for each row of `matmuls` (-1: none), and all shapes."""
        gpu, rows = self.digest.gpu, self.matmuls
        number: dict[Product, int] = {}
        by_shape = np.full(len(self.digest.shapes) + 1, -1, np.int64)  # the last, index -1, stands for no shape
        for shape in np.unique(gpu.shape[rows]).tolist():
            product = _product(self.digest.shapes[shape]) if shape >= 0 else None
            if product is not None:
                by_shape[shape] = number.setdefault(product, len(number))
                if (dtype := self.digest.matmul_dtypes.get(shape)) is not None:
                    self.dtypes.setdefault(product, dtype)
        which = by_shape[gpu.shape[rows]]
        us = np.bincount(which[which >= 0], (self.end - self.start)[rows][which >= 0], len(number))
        kept = np.argsort(-us, kind="stable")[:_SHAPES]
        renumber = np.full(len(number) + 1, -1, np.int64)
        renumber[kept] = np.arange(len(kept))
        every = list(number)
        return [every[i] for i in kept.tolist()], renumber[which], every

    def _mean_us(self) -> list[float]:
        us = (self.end - self.start)[self.matmuls]
        return [float(us[self.which == i].mean()) for i in range(len(self.products))]

    def _beside(self, start: F64, end: F64) -> tuple[F64, F64]:
        """Return the µs in each time window of each known matmul [products, windows], and of all others [windows]."""
        known = [self._within(self.which == i, start, end) for i in range(len(self.products))]
        return np.array(known).reshape(len(known), len(start)), self._within(self.which < 0, start, end)

    def _within(self, chosen: Bools, start: F64, end: F64) -> F64:
        rows = self.matmuls[chosen]
        return Intervals.union(self.start[rows], self.end[rows]).within(start, end)

    def _next_ready(self) -> F64:
        """Return for each collective when the next of its operation and group is ready; infinity if none follows."""
        comm = self.digest.comm
        found = np.full(len(comm), np.inf)
        last: dict[tuple[str, str], float] = {}
        for row in self.rows[::-1].tolist():
            key = comm.op[row], comm.group[row]
            found[row] = max(last.get(key, np.inf), float(self.done[row]))
            last[key] = float(self.ready[row])
        return found

    def _dependents(self) -> tuple[dict[int, Product], set[tuple[str, int]]]:
        """Return by row of a collective the matmul that reads or feeds it, and the (operation, bytes) of such rows.

        A matmul for the gradient of a weight has a left factor of as many bytes, but sums over the gathered rows: its M
        is not that of most, and it can only wait.
        """
        comm = self.digest.comm
        found = {row: product for row in self.rows.tolist() if (product := self._next_to(row)) is not None}
        commonest = Counter(product[0] for product in found.values()).most_common(1)
        waiting = {(comm.op[row], int(comm.bytes[row])) for row in found}
        return {row: product for row, product in found.items() if product[0] == commonest[0][0]}, waiting

    def _next_to(self, row: int) -> Product | None:
        """Return the matmul that reads the rows that this collective gathers, or writes the rows it scatters, or None.

        This matmul starts next after a gather, or ended last before a scatter, with a left factor or a product of
        exactly as many bytes, while little ran beside the collective. Matmuls of the same rows that follow a gather
        at once, as of query, key and value, are one with as many columns.
        """
        comm = self.digest.comm
        item, op = dtype_bytes(comm.dtype[row]), comm.op[row]
        if self._no_pair(row) is not None or item is None or op not in DEPENDENT:
            return None
        gathers = op == "all_gather"
        at = int(np.searchsorted(self.start[self.matmuls], self.done[row] if gathers else self.ready[row])) - (
            not gathers
        )
        if not 0 <= at < len(self.matmuls) or self.which[at] < 0:
            return None
        m, n, k = self.products[self.which[at]]
        if m * (k if gathers else n) * item != comm.bytes[row] or self.is_beside[row]:
            return None
        for other in range(at + 1, min(at + _SHARE, len(self.matmuls)) if gathers else 0):
            which, start = self.which[other], self.start[self.matmuls[other]]
            if which < 0 or self.products[which][::2] != (m, k) or start >= self.next_ready[row]:
                break
            n += self.products[which][1]
        return m, n, k


def _product(shapes: str) -> Product | None:
    """Return M, N and K of a matmul with these input shapes; None if it is batched or too large."""
    found = matrix_product(shapes)
    if found is None or found[3] != 1 or max(found) > LARGEST:
        return None
    return found[:3]
