"""Find compute that could take less time on the same GPU, and how long each GPU operation would then take.

No operation has two causes, so that costs add up: each of `_CAUSES` leaves out what the causes before it took.
Fused kernels take as long as the longest of their parts, since they read and write their tensors once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from counterpoint.diagnosis.analysis.kernel_names import KernelKind, kind_of, label_of, precision_of, tile_of
from counterpoint.diagnosis.analysis.kernels import sm_limits
from counterpoint.diagnosis.analysis.operators import column_of, peak_of
from counterpoint.diagnosis.analysis.zero_sm import fsdp2_copies
from counterpoint.diagnosis.reading.digest import RankDigest
from counterpoint.diagnosis.reading.intervals import unique_rows
from counterpoint.diagnosis.reading.operator_work import (
    WorkOf,
    inputs_in_words,
    matrix_product,
    tensor_sizes,
)
from counterpoint.diagnosis.reading.traced_job import TracedJob
from counterpoint.machine.occupancy import tiles_of
from counterpoint.records.operators import CardRates
from counterpoint.trace.timeline import F64, I64, Bools, Kind

FAR = 0.4  # of the card's rate: an operator below it is slow
LEAST_SHARE = 0.01  # of a step
_TINY_US, _TINY_IN_A_ROW = 5.0, 4
_MOST_BETWEEN = 8  # kernels between the two GEMMs of attention
_MEMORY_SHARE = 0.5  # of a GEMM's time that its bytes take: from here on more SMs would not help
_BATCHED = ("aten::bmm", "aten::baddbmm", "aten::matmul", "aten::einsum")
_WITH_SHAPES = ("fp32_products", "partial_waves")
_TF32_ON = ("GB", "B", "GH", "H", "A", "L")  # names of NVIDIA's GPUs since Ampere begin with these
_LONGEST_SHAPES = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeLoss:
    """Holds one cause of lost compute; times are per step and rank, where nothing else is said."""

    cause: str  # in COMPUTE_CAUSES
    without_us: tuple[F64, ...]  # per rank and GPU operation, its µs without the cause; NaN: as measured
    lost_us: float  # kernel time
    whole_us: float  # kernel time of all operations concerned, ...
    count: float  # ... and their number
    worst: tuple[tuple[str, float, float], ...]  # operator or kernel, its µs and its lost µs; most lost first


@dataclass(frozen=True, slots=True)
class _Rank:
    """Holds what the causes need of one rank's GPU operations; arrays have one element for each."""

    digest: RankDigest
    inside: Bools  # compute in the steps
    step: I64
    operator: I64  # name of the host operation, and ...
    inputs: I64  # ... its inputs, as indices into the digest's tables; -1: unknown
    us: F64
    kind: I64  # KernelKind
    taken: Bools  # has a cause already
    flops_us: F64  # FLOPs of its call at the card's rate; 0: none, NaN: unknown
    bytes_us: F64  # bytes of its call at the card's bandwidth; 0: unknown
    card: CardRates | None

    @property
    def open(self) -> Bools:
        """Return which compute operations have no cause yet."""
        return self.inside & ~self.taken

    @property
    def streams(self) -> list[I64]:
        """Return, for each stream, the rows of its compute kernels in order."""
        rows = np.flatnonzero(self.inside)
        stream = self.digest.gpu.stream[rows]
        return [rows[stream == number] for number in np.unique(stream).tolist()]


def compute_losses(job: TracedJob, card: CardRates | None, step_us: float, work_of: WorkOf) -> tuple[ComputeLoss, ...]:
    """Return the causes that lose at least 1 % of a step in kernel time; none where only hosts were recorded."""
    if job.digests[0].device.from_host or step_us <= 0:
        return ()
    ranks = [_rank_of(job, column, card, work_of) for column in range(len(job.digests))]
    found = []
    for cause, without in _CAUSES:
        loss = _loss(job, ranks, cause, tuple(without(rank) for rank in ranks))
        if loss.lost_us >= LEAST_SHARE * step_us:
            found.append(loss)
            for rank, us in zip(ranks, loss.without_us, strict=True):
                rank.taken[np.isfinite(us)] = True
    return tuple(found)


def _rank_of(job: TracedJob, column: int, card: CardRates | None, work_of: WorkOf) -> _Rank:
    d = job.digests[column]
    inside = job.in_steps(column, np.arange(len(job.step_names))) & (d.gpu.kind == Kind.COMPUTE)
    kinds = np.array([*map(kind_of, d.names), KernelKind.OTHER], np.int64)
    copies = fsdp2_copies(d)  # have a finding of their own
    operators, inputs = column_of(d, "operator"), column_of(d, "inputs")
    facts = np.column_stack((operators, inputs, d.gpu.name)).astype(np.int64)
    unique, which = unique_rows(facts)
    flops_us, bytes_us = np.full(len(unique), np.nan), np.zeros(len(unique))
    for at, (operator, given, name) in enumerate(unique.tolist()):
        if card is not None and operator >= 0 and given > 0:
            work = work_of(d.names[operator], d.inputs[given])
            peak = peak_of(work, [d.names[name]], card.tflops)
            flops_us[at] = 0.0 if work.flops is None else work.flops / peak / 1e6 if peak else np.nan
            bytes_us[at] = (work.bytes or 0.0) / card.gb_per_s / 1e3 if card.gb_per_s else 0.0
    step = np.searchsorted(job.step_start[:, column], job.op_start[column], side="right")
    return _Rank(d, inside & ~copies, step, operators, inputs, d.gpu.end - d.gpu.start, kinds[d.gpu.name],
                 copies.copy(), flops_us[which], bytes_us[which], card)  # fmt: skip


def _loss(job: TracedJob, ranks: Sequence[_Rank], cause: str, times: tuple[F64, ...]) -> ComputeLoss:
    share, by_name, count = 1.0 / (len(ranks) * job.num_steps), dict[str, list[float]](), 0
    for rank, without in zip(ranks, times, strict=True):
        d, rows = rank.digest, np.flatnonzero(np.isfinite(without) & rank.inside)
        operator, given = rank.operator[rows], rank.inputs[rows]
        name = np.where(operator >= 0, operator, d.gpu.name[rows])
        unique, which = unique_rows(np.column_stack((name, given if cause in _WITH_SHAPES else np.zeros_like(name))))
        sums = [np.bincount(which, us[rows], len(unique)) * share for us in (rank.us, rank.us - without)]
        for (called, stated), us, lost in zip(unique.tolist(), *sums, strict=True):
            shapes = inputs_in_words(d.inputs[stated], _LONGEST_SHAPES)[0] if stated > 0 else None
            label = label_of(d.names[called])
            total = by_name.setdefault(f"{label} {shapes}" if shapes else label, [0.0, 0.0])
            total[0], total[1] = total[0] + float(us), total[1] + float(lost)
        count += len(rows)
    worst = sorted(by_name.items(), key=lambda item: -item[1][1])
    return ComputeLoss(
        cause=cause, without_us=times, lost_us=sum(lost for _, (_, lost) in worst), count=count * share,
        whole_us=sum(us for _, (us, _) in worst), worst=tuple((name, us, lost) for name, (us, lost) in worst),
    )  # fmt: skip


def _attention(rank: _Rank) -> F64:
    """Leave out what runs between two batched GEMMs with a softmax between them: a fused kernel keeps it on chip."""
    without = np.full(len(rank.us), np.nan)
    for rows in rank.streams:
        kind, at = rank.kind[rows], np.arange(len(rows))
        between = np.isin(kind, (KernelKind.SOFTMAX, KernelKind.ELEMENTWISE, KernelKind.COPY))
        softmax = np.flatnonzero(kind == KernelKind.SOFTMAX)
        before = np.maximum.accumulate(np.where(between, -1, at))[softmax]
        after = np.minimum.accumulate(np.where(between, len(rows), at)[::-1])[::-1][softmax]
        good = (before >= 0) & (after < len(rows)) & (after - before <= _MOST_BETWEEN + 1)
        for low, high in zip(before[good].tolist(), after[good].tolist(), strict=True):
            if _is_batched(rank, rows[low]) and _is_batched(rank, rows[high]):
                without[rows[low + 1 : high]] = 0.0
    return without


def _is_batched(rank: _Rank, row: int) -> bool:
    operator = int(rank.operator[row])
    return rank.kind[row] == KernelKind.GEMM and (operator < 0 or rank.digest.names[operator] in _BATCHED)


def _chains(rank: _Rank) -> F64:
    """Fuse element-wise kernels over tensors of one size; without shapes, kernels of as many threads."""
    d, given = rank.digest, rank.inputs
    by_inputs = np.zeros(len(d.inputs) + 1, np.int64)  # the last, index -1: unknown
    for at in np.unique(given[given > 0]).tolist():
        by_inputs[at] = max(tensor_sizes(d.inputs[at]), default=0)
    threads = d.gpu.grid.astype(np.int64).prod(axis=1) * d.gpu.block.astype(np.int64).prod(axis=1)
    size = np.where(by_inputs[given] > 0, by_inputs[given], -threads)
    return _fused(rank, np.isin(rank.kind, (KernelKind.ELEMENTWISE, KernelKind.COPY)), 2, size)


def _tiny(rank: _Rank) -> F64:
    return _fused(rank, rank.us < _TINY_US, _TINY_IN_A_ROW, np.zeros(len(rank.us), np.int64))


def _fused(rank: _Rank, wanted: Bools, least: int, size: I64) -> F64:
    """Return the µs of rows of `wanted` kernels of one size that follow one another: the longest keeps its time."""
    without = np.full(len(rank.us), np.nan)
    for rows in rank.streams:
        chosen = wanted[rows] & ~rank.taken[rows]
        alike = (size[rows[1:]] == size[rows[:-1]]) & (rank.step[rows[1:]] == rank.step[rows[:-1]])
        goes_on = np.concatenate(([False], chosen[:-1] & alike))
        run = (np.cumsum(chosen & ~goes_on) - 1)[chosen]
        own = rows[chosen]
        long = np.bincount(run)[run] >= least if len(run) else chosen[:0]
        own, run = own[long], run[long]
        own = own[np.lexsort((-rank.us[own], run))]  # the longest of each row first; `run` ascends already
        without[own] = 0.0
        first = own[np.flatnonzero(np.diff(run, prepend=-1))]
        without[first] = rank.us[first]
    return without


def _fp32(rank: _Rank) -> F64:
    """Shorten products without tensor cores by the ratio of the card's rates, but not below what their bytes take."""
    without, card = np.full(len(rank.us), np.nan), rank.card
    if card is None or not {"tf32", "fp32"} <= card.tflops.keys() or not card.gpu.startswith(_TF32_ON):
        return without
    single = np.array([precision_of(name) == "fp32" for name in rank.digest.names] or [False], bool)
    rows = rank.open & single[rank.digest.gpu.name] & (rank.kind == KernelKind.GEMM)
    shorter = np.maximum(rank.us * card.tflops["fp32"] / card.tflops["tf32"], rank.bytes_us)
    return np.where(rows, np.minimum(shorter, rank.us), np.nan)


def _copies(rank: _Rank) -> F64:
    """Leave out casts, changes of layout and contiguous copies that no chain holds."""
    return np.where(rank.open & np.isin(rank.kind, (KernelKind.COPY, KernelKind.TRANSPOSE)), 0.0, np.nan)


def _waves(rank: _Rank) -> F64:
    """Shorten GEMMs by the share of SMs that idle because the tiles of the product do not fill the last wave."""
    d, gpu, limits = rank.digest, rank.digest.gpu, sm_limits(rank.digest.device)
    rows = np.flatnonzero((rank.kind == KernelKind.GEMM) & rank.open & (gpu.shape >= 0))
    without = np.full(len(rank.us), np.nan)
    if limits is None or not len(rows):
        return without
    unique, which = unique_rows(np.column_stack((gpu.name[rows], gpu.shape[rows])).astype(np.int64))
    idle = np.zeros(len(unique))
    for at, (name, shape) in enumerate(unique.tolist()):
        tile, product = tile_of(d.names[name]), matrix_product(d.shapes[shape])
        if tile is not None and product is not None:
            m, n, _, batch = product
            tiles = batch * min(tiles_of(m, n, tile), tiles_of(n, m, tile))
            # of several tiles on one SM each takes longer, so that the SM with most tiles ends last
            idle[at] = 1.0 - tiles / (-(-tiles // limits.num_sms) * limits.num_sms)
    us, streamed = rank.us[rows], rank.bytes_us[rows]
    helps = (idle[which] > 0) & (streamed < _MEMORY_SHARE * us)
    without[rows[helps]] = np.maximum(us * (1.0 - idle[which]), streamed)[helps]
    return without


def _far_below(rank: _Rank) -> F64:
    """Shorten the calls of operators that reach less than `FAR` of the card's rate to the time at this share."""
    call = column_of(rank.digest, "call")
    rows = np.flatnonzero(rank.open & (call >= 0))
    without = np.full(len(rank.us), np.nan)
    calls, which = np.unique(call[rows], return_inverse=True)
    us, best = np.bincount(which, rank.us[rows], len(calls)), np.full(len(calls), np.nan)
    np.fmin.at(best, which, np.maximum(rank.flops_us, rank.bytes_us)[rows])
    slow = (best > 0) & (best < FAR * us)
    without[rows] = np.where(slow, best / (FAR * np.maximum(us, 1e-9)), np.nan)[which] * rank.us[rows]
    return without


_CAUSES: tuple[tuple[str, Callable[[_Rank], F64]], ...] = (
    ("unfused_attention", _attention),
    ("elementwise_chains", _chains),
    ("fp32_products", _fp32),
    ("layout_copies", _copies),
    ("tiny_kernels", _tiny),
    ("far_below_rate", _far_below),
    ("partial_waves", _waves),
)
