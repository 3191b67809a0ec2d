"""Find the commonest faults of FSDP and DDP: one unit, late gathers, buckets with no compute left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby, pairwise

import numpy as np

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.analysis.zero_sm import fsdp2_copies
from counterpoint.diagnosis.reading.modules import PHASES
from counterpoint.records.diagnosis import Finding, counted
from counterpoint.trace.timeline import F64, I64, ROUNDED_US, Kind

_LEAST_SHARE = 0.03  # of a step: a finding that costs less is left out
_SOON_US = 100.0  # a gather begins this soon after the compute before it
_EXPOSED_SHARE = 0.9  # of a gather: a late gather has this share of its time no compute beside it
_MOST_SHARE = 0.5  # of the gathers: this share of them is late, else single gathers are late for other causes
_LEAST_GRADIENTS = 64 << 10  # bytes: smaller all-reduces are metrics
_LARGER = 2.0  # times the median bucket
_LATE_SHARE = 0.5  # of the backward pass: the first bucket begins after it
_WRAP = (
    "apply fully_shard to each transformer block and then to the model (FSDP1: auto_wrap_policy="
    "transformer_auto_wrap_policy; Trainer and accelerate: TRANSFORMER_BASED_WRAP, and the name of the block's class): "
    "the gather of a block then runs beside the compute of the block before it"
)
_PREFETCH = (
    "begin each gather one unit earlier (FSDP1: forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE;"
    " FSDP2: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch, with the next block). If prefetching"
    " is on, the host may be held up (.item(), limit_all_gathers=True), or CUDA_DEVICE_MAX_CONNECTIONS be 1"
)


def find_one_unit(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if FSDP holds all parameters in one unit, so that no gather can run beside compute."""
    if not _is_one_unit(a):
        return
    rows = _of_data_parallelism(a, "all_gather", "reduce_scatter")
    exposed = float(_without_waiting(a, rows).sum()) / len(a.job.ranks) / a.job.num_steps
    cost, largest = min(exposed, _most_hidden(a)), max((a.collectives[j].bytes or 0 for j in rows.tolist()), default=0)
    if cost < _LEAST_SHARE * a.step_us:
        return
    size = f" of {largest / 2**20:,.0f} MiB" if largest else ""
    yield Finding.of(
        "fsdp_one_unit",
        cost,
        a.step_us,
        title="The whole model is one FSDP unit, so that compute waits for all parameters",
        evidence=f"{len(rows) / a.job.num_steps:.0f} gathers and scatters {a.job.each}{size}: gradients are reduced "
        f"before the next gather; {exposed / 1e3:.2f} ms {a.job.each_rank} of them run beside no compute, without "
        "waiting for late ranks",
        advice=_WRAP,
    )


def find_late_gathers(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if most of FSDP's gathers begin only when the compute before them has ended."""
    if not a.stack.fsdp or a.job.digests[0].device.from_host or _is_one_unit(a):
        return
    every = _of_data_parallelism(a, "all_gather")
    late = [_late_gathers(a, c, every) for c in range(len(a.job.ranks))]
    rows, hides = (np.concatenate([one[part] for one in late]) for part in (0, 1))
    count = sum(one[2] for one in late)
    cost = min(float(hides.sum()) / len(a.job.ranks) / a.job.num_steps, _most_hidden(a))
    if len(rows) <= _MOST_SHARE * count or cost < _LEAST_SHARE * a.step_us:
        return
    worst = a.collectives[int(rows[hides.argmax()])]
    yield Finding.of(
        "late_gather",
        cost,
        a.step_us,
        title="FSDP's gathers begin only when the compute before them has ended",
        evidence=f"{len(rows)} of {count} gathers (without the first of each phase) begin within {_SOON_US:.0f} µs of "
        f"the end of compute, and have none beside them. Begun one unit earlier, compute would hide {cost / 1e3:.2f} "
        f"ms {a.job.each}",
        advice=_PREFETCH,
        start_us=worst.start_us,
        end_us=worst.end_us,
    )


def _late_gathers(a: Analysis, column: int, every: I64) -> tuple[I64, F64, int]:
    """Return a rank's late gathers, the µs of each that compute since the gather before could hide, and all gathers.

    The first gather of a phase, and gathers that a kernel held up, do not count.
    """
    job, d, every = a.job, a.job.digests[column], _in_time(a, column, every)
    before, rows = every[:-1], every[1:]
    places = [(a.collectives[j].step, a.collectives[j].group, a.collectives[j].phase) for j in every.tolist()]
    judged = np.array([one == then for one, then in pairwise(places)], bool)
    judged &= ~np.isin(job.joined.row[rows, column], [b.row for b in a.blocked if b.column == column])
    start, exposed = job.joined.start[rows, column], _without_waiting(a, rows)[:, column]
    computes = job.runs(column, (d.gpu.kind == Kind.COMPUTE) & ~fsdp2_copies(d))
    ended = np.concatenate(([-np.inf], computes.end))[np.searchsorted(computes.end, start + ROUNDED_US)]
    late = judged & (exposed >= _EXPOSED_SHARE * (job.joined.end[rows, column] - start)) & (start - ended <= _SOON_US)
    hides = np.minimum(exposed, computes.within(job.joined.end[before, column], start))
    return rows[late], hides[late], int(judged.sum())


def find_buckets(a: Analysis) -> Iterator[Finding]:
    """Yield a finding if DDP still reduces gradients when the backward pass has ended, by its buckets' sizes.

    Either one bucket holds all, or the first one begins late, or the last one is much larger than the others.
    """
    job = a.job
    every = _of_data_parallelism(a, "all_reduce")
    every = every[[(a.collectives[j].bytes or 0) >= _LEAST_GRADIENTS for j in every.tolist()]]
    if not a.stack.ddp or not len(every):
        return
    of_ranks = [(c, _in_time(a, c, every)) for c in range(len(job.ranks))]
    faults = [_bucket_fault(a, c, rows[a.waits.step[rows] == s]) for c, rows in of_ranks
              for s in np.unique(a.waits.step[rows]).tolist()]  # fmt: skip
    lost = {kind: sum(us for found, us, _ in faults if found == kind) for kind in _BUCKETS}
    kind = max(lost, key=lambda k: lost[k])
    cost = min(lost[kind] / len(job.ranks) / job.num_steps, _most_hidden(a))
    if cost < _LEAST_SHARE * a.step_us or not lost[kind]:
        return
    said = next(text for found, _, text in faults if found == kind)
    title, advice = _BUCKETS[kind]
    yield Finding.of(
        "ddp_buckets",
        cost,
        a.step_us,
        title=title,
        evidence=f"{said}; {cost / 1e3:.2f} ms {job.each_rank} of it could run beside the backward pass",
        advice=advice,
    )


_BUCKETS = {
    "one": (
        "DDP reduces all gradients in one bucket, which begins when the backward pass has ended",
        "take smaller buckets: DistributedDataParallel(bucket_cap_mb=25), or a hook of each layer that reduces its "
        "gradients",
    ),
    "first": (
        "DDP's first bucket of gradients begins late, and its last ones find no compute",
        "take smaller buckets (bucket_cap_mb=25 is the default), so that the first one is full early",
    ),
    "last": (
        "DDP's last bucket is much larger than the others, and no compute is left to run beside it",
        "make the gradients that come last smaller: they are of the first layers, often an embedding: freeze it, "
        "shard it (tensor parallelism, FSDP2), or send it in bf16 (bf16_compress_hook)",
    ),
}


def _bucket_fault(a: Analysis, column: int, rows: I64) -> tuple[str, float, str]:
    """Return what is wrong with the buckets of a rank in a step ("": nothing), the µs that it costs, and evidence."""
    job = a.job
    gpu, places = job.digests[column].gpu, job.digests[column].op_places
    start, end = job.joined.start[rows, column], job.joined.end[rows, column]
    computes = np.flatnonzero(gpu.kind == Kind.COMPUTE)
    at, until = job.op_start[column][computes], job.op_end[column][computes]
    inside = (at < end[-1]) & (at >= job.step_start[a.waits.step[rows[0]], column])
    backward = inside & (places.phase[computes] == PHASES.index("backward"))
    known = backward if backward.any() else inside
    if not known.any():
        return "", 0.0, ""
    begins, ends = float(at[known].min()), float(until[known].max())
    tail = _without_waiting(a, rows)[:, column][end > ends]
    before_first = float(a.busy[column].compute.within(np.array([begins]), np.minimum(start[:1], ends))[0])
    work = float(a.busy[column].compute.within(np.array([begins]), np.array([ends]))[0])
    sizes = np.array([a.collectives[j].bytes or 0 for j in rows.tolist()], np.float64)
    others = float(np.median(sizes[:-1])) if len(rows) > 1 else 0.0
    size, first = (f"{sizes[i] / 2**20:.0f} MiB" for i in (-1, 0))
    if len(rows) == 1 and before_first > _EXPOSED_SHARE * work:
        return "one", min(float(tail.sum()), work), f"one all_reduce {job.each}, of {size}, after all compute"
    if len(rows) > 1 and sizes[-1] >= _LARGER * others and end[-1] > ends:
        kept = 1.0 - others / sizes[-1]
        text = f"the last of {len(rows)} buckets has {size}, the median of the others {others / 2**20:.0f} MiB"
        return "last", float(tail[-1] * kept), text
    if backward.any() and before_first > _LATE_SHARE * work and len(tail):
        share = f"it begins after {before_first / work:.0%} of the backward pass"
        text = f"{counted(len(rows), 'bucket')}, the first of {first}: {share}"
        return "first", min(float(tail.sum()), before_first), text
    return "", 0.0, ""


def _of_data_parallelism(a: Analysis, *ops: str) -> I64:
    """Return the collectives of data-parallel groups with these operations in the analysed steps.

    Groups count as data-parallel where the trace names none, as with Gloo.
    """
    found = [j for j, one in enumerate(a.collectives) if one.step is not None and one.op in ops
             and ("dp" in one.parallel.split("+") if one.parallel else one.group == "?")]  # fmt: skip
    return np.array(found, np.int64)


def _is_one_unit(a: Analysis) -> bool:
    """Return whether FSDP gathers and reduces all parameters at once.

    Several units are gathered one after another, and the gradients of the last two are reduced one after another. One
    unit is gathered at most twice (forward, backward) before its gradients are reduced.
    """
    every = _of_data_parallelism(a, "all_gather", "reduce_scatter")
    if not a.stack.fsdp or {a.collectives[j].op for j in every.tolist()} != {"all_gather", "reduce_scatter"}:
        return False
    most: dict[str, int] = defaultdict(int)
    for c in range(len(a.job.ranks)):
        own = (a.collectives[j] for j in _in_time(a, c, every).tolist())
        calls = ((one.step, one.group, one.op) for one in own)
        for (_, _, op), together in groupby(calls):
            most[op] = max(most[op], len(list(together)))
    return most["all_gather"] <= 2 and most["reduce_scatter"] <= 1


def _in_time(a: Analysis, column: int, rows: I64) -> I64:
    """Return the collectives among `rows` in which a rank takes part, by the time at which it begins them."""
    own: I64 = rows[a.job.joined.row[rows, column] >= 0]
    return own[np.argsort(a.job.joined.start[own, column], kind="stable")]


def _without_waiting(a: Analysis, rows: I64) -> F64:
    """Return each rank's exposed µs in these collectives without its waiting for late ranks, `[rows, ranks]`."""
    waits = np.where(a.waits.told[rows, None], np.nan_to_num(a.waits.exposed_wait[rows]), 0.0)
    found: F64 = np.maximum(np.nan_to_num(a.waits.exposed_once[rows]) - waits, 0.0)
    return found


def _most_hidden(a: Analysis) -> float:
    """Return the µs of communication per step that compute could hide: by the replay, and by the compute there is."""
    account = a.totals
    free = (account.compute_us - account.overlapped_us) / a.job.num_steps
    return min(a.saved_us.get("communication free", account.exposed_comm_us / a.job.num_steps), free)
