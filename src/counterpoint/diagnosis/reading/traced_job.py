"""Join the digests of all ranks into one job on one clock, the input of every analysis.

Ranks that cannot belong to one run are refused, in checks before and after their clocks are aligned. `TracedStack` says
whose GPUs, collectives and framework the job shows, so that advice names only settings that they have.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from counterpoint.diagnosis.reading.digest import RankDigest, RankSummary
from counterpoint.diagnosis.reading.intervals import Intervals
from counterpoint.diagnosis.reading.join import LOOSE_ENDS, Joined, join
from counterpoint.diagnosis.reading.steps import FOUND_BY
from counterpoint.errors import BadTrace
from counterpoint.records.diagnosis import WHOLE_TRACE, counted, ranks_in_words
from counterpoint.trace.classify import is_nccl
from counterpoint.trace.clocks import Clocks, align_clocks
from counterpoint.trace.timeline import F64, I64, Bools, Kind, RankFacts, device_of

D = TypeVar("D", RankDigest, RankSummary)

_RANKS_QUOTED = 3  # most ranks whose notes on their own traces are shown
_APART_S = 600.0  # clocks of hosts in one job never differ by more
_DRIFT_PPM = 1000.0  # no clock runs faster or slower than another by more
_SLACK_US = 200.0  # error of the clocks that is allowed after alignment
_LATE_THREAD_US = 50_000.0  # so late may a thread that waits for a core end a collective, which looks like a drift
_CONTEXT_SHARE = 0.02  # of the compute of a process's busiest GPU: a GPU with less has only a context
_TORCH = re.compile(r"\b(at|c10|c10d|aten|torch|autograd)::|^triton_|^nvjet|\.py\(|^nn\.Module|ProfilerStep|torch")
_FEW = 4  # with fewer collectives, the checks accept everything
_AMD = re.compile(r"AMD|Radeon|Instinct|\bMI\d{2,3}|gfx\d", re.IGNORECASE)
_NVIDIA = re.compile(r"NVIDIA|Tesla|GeForce|Quadro|\b(?:GB?|[ABHVPTL])\d{2,3}\b", re.IGNORECASE)
_AMD_NAMES = re.compile(r"^hip[A-Z]|^Cijk_")
_NVIDIA_NAMES = re.compile(r"^cuda[A-Z]|^cu[A-Z]|cublas|cudnn|nvjet|cutlass|sm\d{2,3}_")
_FSDP = re.compile(r"fsdp|fully_shard", re.IGNORECASE)
_FSDP2 = re.compile(r"^FSDP::|^fsdp::|chunk_cat_cuda_kernel")  # ranges, operators and a kernel that FSDP1 lacks


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedJob:
    """Holds the ranks of a job, ascending; times are µs on the lowest rank's clock, 0 at the first step's start."""

    digests: tuple[RankDigest, ...]
    world_size: int
    missing: tuple[int, ...]
    clocks: Clocks
    joined: Joined  # its start and end are on the job's clock
    op_start: tuple[F64, ...]  # per rank: GpuOps.start and .end on the job's clock
    op_end: tuple[F64, ...]
    launch: tuple[F64, ...]  # per rank: GpuOps.launch_start
    step_names: tuple[str, ...]
    step_start: F64  # [S, R]
    step_end: F64
    notes: tuple[str, ...]
    zero_us: float  # start of the first step, since the lowest rank's origin

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the rank of each column (of arrays [S, R])."""
        return tuple(d.rank for d in self.digests)

    @property
    def num_steps(self) -> int:
        """Return the number of steps by which times are divided, at least 1."""
        return max(len(self.step_names), 1)

    @property
    def has_steps(self) -> bool:
        """Return whether steps were found; if not, the whole recording counts as one step."""
        return self.step_names != (WHOLE_TRACE,)

    @property
    def gpu_recorded(self) -> bool:
        """Return whether the trace has GPU operations of at least one rank, or is of a job without GPUs."""
        return any(d.device.recorded for d in self.digests)

    @property
    def each(self) -> str:
        """Return the words that follow a time per step: "a step", or "in the recording" if no steps were found."""
        return "a step" if self.has_steps else "in the recording"

    @property
    def each_rank(self) -> str:
        """Return the words that follow a mean over ranks: "a step and rank" or "in the recording per rank"."""
        return "a step and rank" if self.has_steps else "in the recording per rank"

    @property
    def whole(self) -> str:
        """Return the noun of which shares are taken: "step", or "recording" if no steps were found."""
        return "step" if self.has_steps else "recording"

    @property
    def alone(self) -> bool:
        """Return whether the whole job is one process with several GPUs, so that no rank waits for another."""
        return self.world_size == 1 and len(gpus_of(self.digests[0])) > 1

    @property
    def uses_torch(self) -> bool:
        """Return whether the program uses PyTorch; False only for an Nsight Systems export without names of PyTorch."""
        return any(d.format != "nsys" or any(map(_TORCH.search, d.names)) for d in self.digests)

    @property
    def islands(self) -> I64:
        """Return, per rank, its island's number; an island is a set of ranks that collectives connect."""
        there = self.joined.row >= 0
        there = there[there.sum(axis=1) >= 2]
        there = there[np.unique(np.packbits(there, axis=1), axis=0, return_index=True)[1]]  # one for each set of ranks
        ranks = len(self.digests)
        island, before = np.arange(ranks), np.full(ranks, -1)
        while len(there) and (island != before).any():
            before = island
            least = np.where(there, island, ranks).min(axis=1)
            island = np.minimum(island, np.where(there, least[:, None], ranks).min(axis=0))
        return np.unique(island, return_inverse=True)[1].astype(np.int64)

    def on_job_clock(self, column: int, at: F64) -> F64:
        """Convert times on a rank's own clock (µs since its origin) to µs on the job's clock."""
        base = (self.digests[column].origin_ns - self.digests[0].origin_ns) / 1000.0
        return self.clocks.corrected(column, at + base) - self.zero_us

    def busy(self, column: int, *kinds: Kind) -> Intervals:
        """Return the intervals in which at least one operation of these kinds runs on a rank."""
        return self.runs(column, np.isin(self.digests[column].gpu.kind, kinds))

    def steps_of(self, column: int) -> Intervals:
        """Return the intervals of the steps of a rank."""
        return Intervals.union(self.step_start[:, column], self.step_end[:, column])

    def in_steps(self, column: int, steps: I64) -> Bools:
        """Return a mask of a rank's GPU operations that start inside these steps (ascending)."""
        start, end = self.step_start[steps, column], self.step_end[steps, column]
        at = np.searchsorted(start, self.op_start[column], side="right") - 1
        return np.asarray((at >= 0) & (self.op_start[column] < end[np.maximum(at, 0)]))

    def runs(self, column: int, rows: Bools) -> Intervals:
        """Return the intervals in which at least one of the operations `rows` runs on a rank."""
        return Intervals.union(self.op_start[column][rows], self.op_end[column][rows])


def gpus_of(digest: RankDigest) -> tuple[int, ...]:
    """Return the numbers of the GPUs on which a rank's process computes; a GPU that hardly computes is left out."""
    gpu = digest.gpu
    rows = np.flatnonzero(gpu.kind == Kind.COMPUTE)
    numbers, which = np.unique(device_of(gpu.stream[rows]), return_inverse=True)
    us = np.bincount(which.ravel(), (gpu.end - gpu.start)[rows], len(numbers))
    return tuple(numbers[(us >= _CONTEXT_SHARE * us.max(initial=0.0)) & (numbers >= 0)].tolist())


def assemble(digests: list[RankDigest], others: Collection[int] = ()) -> TracedJob:
    """Join the ranks of one job; raise `BadTrace` for two files of one rank, or ranks of different jobs.

    Args:
        digests: one per rank, in any order.
        others: further ranks that were recorded, so that they are not missing.

    Returns:
        The job of the ranks in `digests`.
    """
    notes: list[str] = []
    digests = numbered(digests, notes)
    world = world_size_of(digests)
    missing = tuple(r for r in missing_ranks(digests, world) if r not in others)
    base = [(d.origin_ns - digests[0].origin_ns) / 1000.0 for d in digests]
    joined = join(tuple(d.rank for d in digests), [d.comm for d in digests], base)
    if missing:
        late = "it is late" if len(missing) == 1 else "one of them is late"
        late = f": where {late}, waiting for it cannot be told from moving bytes" if len(joined) else ""
        notes.append(f"no trace of {ranks_in_words(missing)} (of {world} ranks){late}")
    _check_collectives(digests, joined)
    clocks = _clocks(joined, digests, notes)
    zero, names, start, end = _steps(digests, clocks, base, notes)

    def clocked(column: int, at: F64) -> F64:
        return clocks.corrected(column, at + base[column]) - zero

    for column in range(len(digests)):
        for table in (joined.start, joined.end):
            table[:, column] = clocks.corrected(column, table[:, column]) - zero
    _check_clocks(digests, joined, clocks)
    order = np.argsort(np.nanmin(joined.start, axis=1), kind="stable") if len(joined) else np.empty(0, int)
    _note_joins(joined, digests, missing, notes)
    notes += _own_notes(digests)
    notes += _notes_on_devices(digests)
    return TracedJob(
        digests=tuple(digests),
        world_size=world,
        missing=missing,
        clocks=clocks,
        joined=_reordered(joined, order),
        op_start=tuple(clocked(c, d.gpu.start) for c, d in enumerate(digests)),
        op_end=tuple(clocked(c, d.gpu.end) for c, d in enumerate(digests)),
        launch=tuple(clocked(c, d.gpu.launch_start) for c, d in enumerate(digests)),
        step_names=names,
        step_start=start,
        step_end=end,
        notes=tuple(notes),
        zero_us=zero,
    )


def numbered(digests: Sequence[D], notes: list[str]) -> list[D]:
    """Return digests, or summaries, with distinct ranks: as the traces state them, else in the order of the files."""
    stated: dict[int, D] = {}
    for d in (d for d in digests if d.rank_known):
        if d.rank in stated:
            raise BadTrace(
                f"rank {d.rank} again, as in {stated[d.rank].path}; give one trace per rank "
                "(of several recordings, pass one at a time)",
                path=d.path,
            )
        stated[d.rank] = d
    free = (r for r in range(len(digests) + len(stated)) if r not in stated)
    guessed: list[D] = [replace(d, rank=next(free)) for d in digests if not d.rank_known]
    if guessed and len(digests) > 1:
        notes.append(
            f"{counted(len(guessed), 'trace')} without a rank, numbered in the order of their names"
            if len({d.path for d in guessed}) > 1
            else f"the file does not say which ranks its {len(guessed)} GPUs are; numbered in their order"
        )
    return sorted(list(stated.values()) + guessed, key=lambda d: d.rank)


def missing_ranks(digests: Sequence[RankFacts], world_size: int) -> tuple[int, ...]:
    """Return the ranks of a job that have no digest; only the first million ranks are checked."""
    there = {d.rank for d in digests}
    return tuple(r for r in range(min(world_size, 1 << 20)) if r not in there)


def world_size_of(digests: Sequence[RankDigest | RankSummary]) -> int:
    """Return the number of ranks of the job, as its traces state it; raise `BadTrace` for ranks of different jobs."""
    for key in ("world_size", "backend", "nccl_version"):
        values = {d.job[key]: d for d in digests if key in d.job}
        if len(values) > 1:
            (a, first), (b, second) = list(values.items())[:2]
            raise BadTrace(
                f"ranks of different runs: {key} is {b} here and {a} in {first.path}; give the traces of one run",
                path=second.path,
            )
    stated = [d.world_size for d in digests if d.world_size]
    highest = max(d.rank for d in digests) + 1
    if stated and highest > max(stated):
        worst = digests[-1]
        raise BadTrace(f"rank {worst.rank} in a job of {max(stated)} ranks: ranks of different runs", path=worst.path)
    sizes = [d.largest_group for d in digests]
    return max([*stated, *sizes, highest if highest <= 1 << 20 else len(digests)])


def _clocks(joined: Joined, digests: list[RankDigest], notes: list[str]) -> Clocks:
    ranks = tuple(d.rank for d in digests)
    tight = np.array([op not in LOOSE_ENDS for op in joined.op], bool)
    use = tight if tight.sum() >= 3 else np.ones(len(tight), bool)
    use &= (joined.row >= 0).sum(axis=1) >= 2 if len(joined) else use
    clocks = align_clocks(joined.end[use] if len(joined) else np.empty((0, len(ranks))))
    if tight.sum() < 3:  # ends that differ by waiting do not show a drift
        clocks = replace(clocks, drift=np.zeros(len(ranks)))
    elif digests[0].device.from_host:
        moved_us = np.abs(clocks.drift) * np.ptp(joined.end[np.isfinite(joined.end)])
        late = (np.abs(clocks.drift) * 1e6 > _DRIFT_PPM) & (moved_us < _LATE_THREAD_US)
        clocks = replace(clocks, drift=np.where(late, 0.0, clocks.drift))
    unknown = [r for r, offset in zip(ranks, clocks.offset, strict=True) if not np.isfinite(offset)]
    if unknown and len(ranks) > 1:
        notes.append(f"no collective joins ranks {unknown} to rank {ranks[0]}: their clocks cannot be compared")
    off = [c for c in range(len(ranks)) if abs(clocks.offset[c]) > 0 and np.isfinite(clocks.offset[c])]
    for c in sorted(off, key=lambda c: -abs(clocks.offset[c]))[:_RANKS_QUOTED]:
        tail = f", drifting by {clocks.drift[c] * 1e6:.1f} ppm" if clocks.drift[c] else ""
        notes.append(f"clock of rank {ranks[c]} is {clocks.offset[c] / 1000:+.3f} ms off{tail}: corrected")
    if len(off) > _RANKS_QUOTED:
        notes.append(f"{counted(len(off) - _RANKS_QUOTED, 'further clock')} corrected by less")
    return clocks


def _steps(
    digests: list[RankDigest], clocks: Clocks, base: list[float], notes: list[str]
) -> tuple[float, tuple[str, ...], F64, F64]:
    """Return time zero, and names, starts and ends [S, R] of the steps common to all ranks, else of one rank's."""
    column = min(range(len(digests)), key=lambda c: FOUND_BY.index(digests[c].steps.found_by))
    steps = digests[column].steps
    if steps.found_by != "profiler":
        how = {
            "annotation": f"are the ranges {steps.names[0][:80]!r} and so on",
            "optimizer": "reach from the end of one optimizer step to the next",
            "repetition": "found from repetition",
            "whole": "not found: the whole trace counts as one",
        }
        notes.append(f"no ProfilerStep ranges; steps {how[steps.found_by]}")
    if steps.found_by != "whole" and (common := _common_steps(digests, steps.found_by)):
        rows = [[d.steps.names.index(n) for n in common] for d in digests]
        start = np.stack([clocks.corrected(c, d.steps.start[rows[c]] + base[c]) for c, d in enumerate(digests)], 1)
        end = np.stack([clocks.corrected(c, d.steps.end[rows[c]] + base[c]) for c, d in enumerate(digests)], 1)
        if more := sum(len(d.steps.names) > len(common) for d in digests):
            notes.append(f"{counted(more, 'rank')} with further steps, which other ranks lack: only common steps count")
        zero = float(start[0].min())
        return zero, common, start - zero, end - zero
    if steps.found_by != "whole":
        notes.append(f"the ranks share no steps: those of rank {digests[column].rank} are used for all")
    start = clocks.corrected(column, steps.start + base[column])
    end = clocks.corrected(column, steps.end + base[column])
    if steps.found_by == "whole":
        start = np.array([min(float(clocks.corrected(c, d.steps.start + base[c])[0]) for c, d in enumerate(digests))])
        end = np.array([max(float(clocks.corrected(c, d.steps.end + base[c])[-1]) for c, d in enumerate(digests))])
    wide = np.ones((1, len(digests)))
    zero = float(start[0])
    return zero, steps.names, (start - zero)[:, None] * wide, (end - zero)[:, None] * wide


def _common_steps(digests: list[RankDigest], found_by: str) -> tuple[str, ...]:
    """Return the names of steps that every rank has; () if ranks name steps other than `ProfilerStep`s differently."""
    if any(d.steps.found_by != found_by for d in digests):
        return ()
    if found_by != "profiler" and len({frozenset(d.steps.names + d.steps.left_out) for d in digests}) > 1:
        return ()
    shared = set.intersection(*(set(d.steps.names) for d in digests))
    return tuple(n for n in digests[0].steps.names if n in shared)


def _note_joins(joined: Joined, digests: list[RankDigest], missing: tuple[int, ...], notes: list[str]) -> None:
    if len(digests) < 2:
        if len(joined) and not missing and len(gpus_of(digests[0])) < 2:
            notes.append("one rank only: waiting for others cannot be told from moving bytes")
        return
    if "?" in joined.group:
        notes.append("the traces do not name the groups of their collectives: all ranks are taken as one group")
    present = (joined.row >= 0).sum(axis=1)
    partial = present < joined.expected
    for column, d in enumerate(digests):
        lost = int(((joined.row[:, column] < 0) & partial & (present >= 2)).sum())
        alone = int(((joined.row[:, column] >= 0) & (present == 1) & partial).sum())
        if lost and lost < 0.5 * len(joined):
            notes.append(
                f"rank {d.rank}: {counted(lost, 'collective')} of the other ranks not in its trace; the rest is matched"
            )
        if alone:
            notes.append(f"rank {d.rank}: {counted(alone, 'collective')} matched with no other rank")


def _own_notes(digests: list[RankDigest]) -> list[str]:
    """Return the notes on single ranks' traces: in full for a few ranks, then the number of other ranks with notes."""
    said = [d for d in digests if d.notes]
    notes = [f"rank {d.rank}: {note}" for d in said[:_RANKS_QUOTED] for note in d.notes]
    if len(said) > _RANKS_QUOTED:
        more = len(said) - _RANKS_QUOTED
        notes.append(f"{counted(more, 'more rank')} with notes of this kind")
    return notes


def _notes_on_devices(digests: list[RankDigest]) -> list[str]:
    """Return a note if ranks have different GPUs, or some of them none."""
    by_name: dict[str, list[int]] = {}
    for d in digests:
        by_name.setdefault(str(d.device.name or "unknown GPU")[:60], []).append(d.rank)
    said = [f"{name}: {ranks_in_words(ranks)}" for name, ranks in by_name.items()]
    return [f"the ranks differ in their devices: {'; '.join(said[:_RANKS_QUOTED])}"] if len(said) > 1 else []


def _reordered(joined: Joined, order: I64) -> Joined:
    columns: dict[str, Any] = {}
    for name in ("op", "group", "by"):
        columns[name] = tuple(getattr(joined, name)[i] for i in order.tolist())
    for name in ("index", "expected", "row", "start", "end"):
        columns[name] = getattr(joined, name)[order]
    return replace(joined, **columns)


def _check_collectives(digests: list[RankDigest], joined: Joined) -> None:
    """Raise `BadTrace` if ranks were recorded at different times or have different collectives; needs no clocks."""
    origin = np.array([d.origin_ns for d in digests], np.float64)
    if (origin.max() - origin.min()) / 1e9 > _APART_S:
        usual = int(np.abs(origin - np.median(origin)).argmin())
        apart = (origin - origin[usual]) / 1e9
        other = int(np.abs(apart).argmax())
        when = f"{abs(apart[other]):.0f} s {'after' if apart[other] > 0 else 'before'}"
        raise _different(digests, other, f"recorded {when} {digests[usual].path}")
    there = joined.row >= 0
    shared = there.sum(axis=1) >= 2
    by_id = np.array([by in ("seq", "comms_id") for by in joined.by], bool)
    if joined.mismatched >= 3 and joined.mismatched > 0.5 * int((shared & by_id).sum()):
        what = f"{joined.mismatched} collectives with the same id differ in operation or size"
        raise _different(digests, len(digests) - 1, what)
    awaited = joined.expected >= 2
    for column in range(1, len(digests)):
        own = there[:, column] & awaited
        if own.sum() >= _FEW and (awaited & ~there[:, column]).sum() >= _FEW and not (own & shared).any():
            raise _different(digests, column, "none of its collectives is one of the other ranks'")


def _check_clocks(digests: list[RankDigest], joined: Joined, clocks: Clocks) -> None:
    """Raise `BadTrace` if clocks would have to drift too fast, or collectives end before all ranks have begun them."""
    drift = np.abs(clocks.drift) * 1e6
    if drift.max(initial=0.0) > _DRIFT_PPM:
        what = f"its clock would have to be off by {drift.max():.0f} ppm to fit the others'"
        raise _different(digests, int(drift.argmax()), what)
    judged = (joined.row >= 0).sum(axis=1) >= 2
    judged &= np.array([op not in LOOSE_ENDS for op in joined.op], bool)
    if judged.sum() < _FEW or digests[0].device.from_host:
        return
    start, end = joined.start[judged], joined.end[judged]
    impossible = np.nanmax(start, axis=1) > np.nanmin(end, axis=1) + _SLACK_US
    if impossible.mean() > 0.25:
        last = np.bincount(np.nanargmax(start[impossible], axis=1), minlength=len(digests))
        what = f"{int(impossible.sum())} of {int(judged.sum())} collectives would end before all ranks have begun them"
        raise _different(digests, int(last.argmax()), what)


def _different(digests: list[RankDigest], column: int, what: str) -> BadTrace:
    return BadTrace(f"ranks of different runs: {what}; give the traces of one run", path=digests[column].path)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStack:
    """Holds which hardware and software a trace shows; False and None: not seen."""

    vendor: str | None  # nvidia | amd | cpu
    nccl: bool  # kernels of NCCL or RCCL
    fsdp: bool
    fsdp2: bool
    ddp: bool

    @property
    def nvidia_nccl(self) -> bool:
        """Return whether the job communicates by NCCL on NVIDIA GPUs, so that NCCL's own settings apply."""
        return self.nccl and self.vendor == "nvidia"

    @property
    def overlaps(self) -> bool:
        """Return whether `counterpoint.overlap(model)` can replace the collectives: yes for FSDP2 with NCCL."""
        return self.fsdp2 and self.nvidia_nccl


def traced_stack(job: TracedJob) -> TracedStack:
    """Return the hardware and software that the traces of a job show."""
    digests = job.digests
    names = {name for d in digests for name in d.names}
    device = next((d.device.name for d in digests if d.device.name), "") or ""
    communication = {d.names[i] for d in digests for i in set(d.gpu.name[d.gpu.kind == Kind.COMM].tolist())}
    return TracedStack(
        vendor=_vendor(device, names),
        nccl=any(map(is_nccl, communication)) and device != "cpu",
        fsdp=any(map(_FSDP.search, names)),
        fsdp2=any(map(_FSDP2.search, names)),
        ddp=any(name.startswith("DistributedDataParallel.") for name in names),
    )


def _vendor(device: str, names: set[str]) -> str | None:
    if device == "cpu":
        return "cpu"
    if _AMD.search(device):
        return "amd"
    if _NVIDIA.search(device):
        return "nvidia"
    if any(map(_AMD_NAMES.search, names)):
        return "amd"
    return "nvidia" if any(map(_NVIDIA_NAMES.search, names)) else None
