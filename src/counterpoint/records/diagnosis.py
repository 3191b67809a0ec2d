"""Define the records of a diagnosis, which `counterpoint diagnose --json` prints.

Times are µs, bandwidths GB/s, sizes bytes. `Diagnosis` is the contract `counterpoint.diagnosis/1`
(docs/reference/diagnosis.md): keys may be added, never renamed. A value that is not known is `null`, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

from counterpoint.records import Record
from counterpoint.records.nccl import NcclReport
from counterpoint.records.operators import CardRates, OperatorTime

SCHEMA = "counterpoint.diagnosis/1"
WHOLE_TRACE = "whole trace"  # the name of the one step where none were found
_RUNS_SHOWN = 8  # runs of consecutive ranks that a sentence names
OWN_MARK = "counterpoint diagnose --perfetto"  # `written_by` of timelines that are drawn from a diagnosis

StragglerCause = Literal[
    "host_stall", "slow_kernels", "slow_kernel", "more_work", "late_input", "no_host_events", "unknown"
]
KernelCause = Literal["tail_effect", "sm_contention", "bandwidth", "none"]
Severity = Literal["high", "medium", "low"]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text, `ranks 0-3, 5, 8-15`; of more than 8 ranges only the first 8 are named."""
    starts = [r for r, before in zip(ranks, (None, *ranks), strict=False) if before is None or r - before > 1]
    ends = [r for r, after in zip(ranks, (*ranks[1:], None), strict=True) if after is None or after - r > 1]
    runs = [f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True)]
    shown = ", ".join(runs[:_RUNS_SHOWN]) + (" …" if len(runs) > _RUNS_SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def in_sentence(title: str) -> str:
    """Return a title as it stands within a sentence: its first letter is small, except in DDP or FSDP."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 kernel`, `2 kernels`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Source(Record, frozen=True, kw_only=True):
    """Names the trace files that were read."""

    format: str  # kineto | nsys | mixed
    files: tuple[str, ...]
    events: int


class StepTime(Record, frozen=True, kw_only=True):
    """Holds start and end of one training step (µs, clock of the lowest rank); 0 is the start of the first step."""

    name: str
    start_us: float
    duration_us: float


class Account(Record, frozen=True, kw_only=True):
    """Splits the time of all analysed steps into compute, communication, copies and idle, of one rank or as mean.

    duration = compute + exposed_comm + exposed memcpy + idle; communication = overlapped + exposed_comm.
    `hidden` = overlapped / communication. wait + transfer = time inside collectives that were matched across ranks,
    counted once where several run at the same time, as transfer if one of them moves bytes (a collective by copies also
    waits before its first copy, while the stream holds it back); null where none could be matched, as with one rank's
    trace. `multi_tensor_us` is the compute in which only kernels over lists of tensors run: optimizers, clipping and
    casts of a rank's parameters.
    """

    duration_us: float
    compute_us: float
    comm_us: float
    overlapped_us: float
    exposed_comm_us: float
    memcpy_us: float
    idle_us: float
    wait_us: float | None
    transfer_us: float | None
    hidden: float | None
    comm_to_compute: float | None
    mfu: float | None = None
    exposed_wait_us: float | None = None  # the part of exposed_comm spent waiting for a late rank
    multi_tensor_us: float = 0.0


class GpuAccount(Account, frozen=True, kw_only=True):
    """Holds the split of time (`Account`) of one GPU of a process that drives several GPUs."""

    rank: int
    gpu: int  # its number on the host


class RankAccount(Account, frozen=True, kw_only=True):
    """Holds the split of time (`Account`) of one rank: of its GPU, or the mean over all GPUs of its process."""

    rank: int
    other_gpu_us: float = 0.0  # the part of idle_us in which another GPU of the process works


class Collective(Record, frozen=True, kw_only=True):
    """Describes one collective, matched across the ranks that took part in it.

    The wait of a rank = last start - own start, null where no other rank is matched; transfer = last end - last start;
    exposed = mean over ranks of the time inside the collective while no compute runs. `bytes` is the full array
    (nccl-tests), null where the trace does not say.
    """

    op: str
    group: str
    index: int
    bytes: int | None
    ranks: tuple[int, ...]
    last_rank: int
    start_us: float
    end_us: float
    wait_us: dict[str, float | None]
    transfer_us: float
    algo_gb_per_s: float | None
    bus_gb_per_s: float | None
    exposed_us: float
    num_ctas: int | None  # blocks of the communication kernel; 0: copy engines
    joined_by: str  # seq | comms_id | order | none
    step: str | None = None
    parallel: str | None = None  # dp | tp | pp | ep | cp | sp | dp+cp ...
    phase: str | None = None  # forward | backward | optimizer
    module: str | None = None  # module (or layer) around the launch


class CollectiveKind(Record, frozen=True, kw_only=True):
    """Sums up the collectives of one operation, group, size and phase in the analysed steps: count, times, bandwidth.

    `exposed_us` is per step and rank; of concurrent collectives, the one that compute waits for counts. `best_gb_per_s`
    is the highest bus bandwidth that any kind of collective of the group has in this recording. `link_gb_per_s` is what
    the links of one GPU carry, by the user's machine profile or the data sheet; null for an unknown GPU, and where the
    group may be on several hosts.
    """

    op: str
    group: str
    group_name: str | None  # the program's name of the group
    parallel: str | None
    ranks: int | None  # of the group
    bytes: int | None
    phase: str | None
    count: int
    wait_us: float | None  # null where ranks of the group have no trace
    transfer_us: float  # median; includes the wait where the wait is unknown
    bus_gb_per_s: float | None  # bus bandwidth at `transfer_us`
    best_gb_per_s: float | None
    exposed_us: float
    link_gb_per_s: float | None = None


class Straggler(Record, frozen=True, kw_only=True):
    """Names a rank that makes others wait; `delay_us` is the sum of its delays in entering collectives."""

    rank: int
    delay_us: float
    times_last: int
    cause: StragglerCause
    evidence: str
    detail: str | None = None  # operation, allocator, garbage_collection, ...
    start_us: float | None = None  # start of the range in which the rank is latest
    end_us: float | None = None
    phase: str | None = None  # forward | backward | optimizer: where it loses the time
    module: str | None = None  # or layer
    with_ranks: tuple[int, ...] = ()  # ranks as late for the same cause; all fields but `evidence` include them

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return this rank and the ranks that are late together with it, ascending."""
        return tuple(sorted((self.rank, *self.with_ranks)))


class KernelComparison(Record, frozen=True, kw_only=True):
    """Holds median times of a kind of compute kernel (name, grid, block, shapes), alone and beside communication."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shapes: str | None
    alone_count: int
    overlapped_count: int
    alone_us: float | None
    alone_p10_us: float | None
    alone_p90_us: float | None
    overlapped_us: float | None
    overlapped_p10_us: float | None
    overlapped_p90_us: float | None
    slowdown: float | None
    cost_us: float  # per rank, over all analysed steps
    cause: KernelCause
    waves_alone: int | None = None
    waves_overlapped: int | None = None
    blocks_per_sm: int | None = None
    comm_ctas: int | None = None
    comm_ctas_without_extra_wave: int | None = None


class Finding(Record, frozen=True, kw_only=True):
    """Describes one problem to act on; `cost_us`: µs that the problem adds to a step, by the replay if there is one."""

    kind: str  # straggler | tail_effect | launch_order | sm_contention | bandwidth | exposed_comm | ...
    cost_us: float
    severity: Severity
    title: str
    evidence: str
    advice: str
    rank: int | None = None
    start_us: float | None = None
    end_us: float | None = None
    remedy: str | None = None  # name of the change, where one change removes several findings

    @classmethod
    def of(
        cls,
        kind: str,
        cost_us: float,
        step_us: float,
        *,
        title: str,
        evidence: str,
        advice: str,
        rank: int | None = None,
        start_us: float | None = None,
        end_us: float | None = None,
    ) -> Finding:
        """Return a finding; its severity is high if it costs 10 % of `step_us` or more, medium from 3 %, else low."""
        share = cost_us / step_us if step_us > 0 else 0.0
        severity: Severity = "high" if share >= 0.1 else "medium" if share >= 0.03 else "low"
        return cls(kind=kind, cost_us=cost_us, severity=severity, title=title, evidence=evidence, advice=advice,
                   rank=rank, start_us=start_us, end_us=end_us)  # fmt: skip


def by_remedy(findings: Sequence[Finding]) -> list[tuple[Finding, ...]]:
    """Return the findings grouped by the change that removes them; groups are in the order of their first finding."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.remedy or finding.advice, []).append(finding)
    return [tuple(group) for group in groups.values()]


class HostTime(Record, frozen=True, kw_only=True):
    """Names a host operation or Python function, and for how many µs of a cause's idle time the host ran it."""

    name: str
    us: float


class IdleCause(Record, frozen=True, kw_only=True):
    """Says how long a GPU idles for one cause: µs per step, mean over ranks; `longest_us` is the longest gap."""

    category: str  # operation | launch | allocator | ... | queued | no_launch_recorded | unrecorded | nothing_recorded
    us: float
    count: float  # gaps a step
    longest_us: float
    operations: tuple[HostTime, ...]  # host operations during the gaps, most time first; at most 5
    functions: tuple[HostTime, ...]  # Python functions around these operations, where stacks were recorded; at most 5
    phases: tuple[HostTime, ...] = ()  # forward, backward, optimizer: where the host was, as far as known
    modules: tuple[HostTime, ...] = ()  # or layers; at most 5


class Idle(Record, frozen=True, kw_only=True):
    """Splits the idle time of a step (mean over ranks) into causes, which add up to `idle_us`; the longest is first.

    `explained_us` is the idle time whose cause the trace shows. launches: calls per step that launch work on the GPU;
    launch_interval_us: from one launch to the next, without stalls; kernel_us: duration of the mean compute kernel.
    """

    idle_us: float
    explained_us: float
    causes: tuple[IdleCause, ...]
    launches: float | None
    launch_interval_us: float | None
    kernel_us: float | None


class WhatIfStep(Record, frozen=True, kw_only=True):
    """Holds the µs that a step would take after one change, by a replay of the step."""

    name: str
    step_us: float


class Replay(Record, frozen=True, kw_only=True):
    """Holds the measured and the replayed time of the mean step; `error` = replayed / measured - 1.

    `waits` says whether the graph explains the waits of operations (other than for other ranks) or keeps them as
    measured; `collective_waits` says whether waiting inside collectives comes from matched ranks or, where other ranks
    have no trace, is kept as measured; null without collectives.
    """

    measured_us: float
    replayed_us: float
    error: float
    what_if: tuple[WhatIfStep, ...]
    steps: int
    waits: str | None = None  # explained | as_measured
    collective_waits: str | None = None  # joined | partly_joined | as_measured


class TimelineLane(Record, frozen=True, kw_only=True):
    """Holds one row of the timeline: the spans of one kind on one rank (µs, on the clock of `StepTime`)."""

    rank: int
    name: str  # compute | communication | wait | memcpy | host
    start_us: tuple[float, ...]
    duration_us: tuple[float, ...]
    labels: tuple[str, ...]
    stream: str | None = None  # the one stream (without a GPU, thread) of all these spans; None: spans of any stream


class ExposedCost(Record, frozen=True, kw_only=True):
    """Holds what exposed communication costs a day; money is in the currency of the price, null without a price."""

    gpus: int
    gpu_hours_a_day: float
    price_per_gpu_hour: float | None
    cost_a_day: float | None


class Diagnosis(Record, frozen=True, kw_only=True):
    """Holds the whole answer of `counterpoint diagnose`."""

    schema: str = SCHEMA
    source: Source
    world_size: int
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    gpu: str | None
    clock_offsets_us: dict[str, float | None]
    clock_uncertainty_us: dict[str, float | None]
    clock_drift_ppm: dict[str, float | None]
    verdict: str
    notes: tuple[str, ...]
    steps: tuple[StepTime, ...]
    totals: Account
    per_rank: tuple[RankAccount, ...]
    collectives: tuple[Collective, ...]
    stragglers: tuple[Straggler, ...]
    kernels: tuple[KernelComparison, ...]
    findings: tuple[Finding, ...]
    replay: Replay | None
    idle: Idle | None = None
    collective_kinds: tuple[CollectiveKind, ...] = ()  # most exposed first
    per_gpu: tuple[GpuAccount, ...] = ()  # of processes that drive several GPUs
    nccl: NcclReport | None = None  # null: no log of NCCL was given
    cost: ExposedCost | None = None  # null: nobody asked
    operators: tuple[OperatorTime, ...] = ()  # most time first; what is left out stands in the last row
    card: CardRates | None = None  # null: the GPU is not known

    @property
    def has_steps(self) -> bool:
        """Return whether steps were found; if not, the whole recording counts as one step."""
        return [s.name for s in self.steps] not in ([], [WHOLE_TRACE])

    def __repr__(self) -> str:
        """Return one line of text: ranks, steps and the verdict."""
        return f"Diagnosis({len(self.ranks)} of {self.world_size} ranks, {len(self.findings)} findings: {self.verdict})"

    def _repr_html_(self) -> str:
        """Return the verdict and the findings as HTML for a notebook; text from the trace is escaped."""
        rows = "".join(
            f"<tr><td>{f.cost_us / 1e3:.2f} ms</td><td><b>{escape(f.title)}</b><br>{escape(f.advice)}</td></tr>"
            for f in self.findings
        )
        table = f"<table><tr><th>cost of step time</th><th>what to do</th></tr>{rows}</table>" if rows else ""
        return f"<p><b>{escape(self.verdict)}</b></p>{table}"


COMPARISON_SCHEMA = "counterpoint.comparison/1"


class Change(Record, frozen=True, kw_only=True):
    """Holds one time (µs) in the earlier run and in this run; None: a run does not have the time, and 0 is assumed."""

    name: str
    before_us: float | None
    now_us: float | None
    change_us: float


class FindingChange(Change, frozen=True, kw_only=True):
    """Holds one finding's cost in the earlier run and in this run; None: not found. `name` is the finding's title."""

    kind: str
    rank: int | None


class KernelChange(Change, frozen=True, kw_only=True):
    """Holds a kernel's µs per step in both runs, at this run's number of calls, for grids and shapes in both runs."""

    slowdown: float


class OperatorChange(Change, frozen=True, kw_only=True):
    """Holds the µs per step and rank of a kernel of an operator in both runs; `name` is the operator."""

    kernel: str


class Comparison(Record, frozen=True, kw_only=True):
    """Compares a run with an earlier run; every list has the largest growth first.

    `parts` (compute, exposed communication, copies, idle) add up to `step`.
    """

    schema: str = COMPARISON_SCHEMA
    verdict: str
    before: tuple[str, ...]  # files of the earlier run
    now: tuple[str, ...]
    notes: tuple[str, ...]  # why the two runs may not be comparable
    step: Change
    hidden_before: float | None
    hidden_now: float | None
    parts: tuple[Change, ...]
    findings: tuple[FindingChange, ...]
    idle: tuple[Change, ...]  # by cause
    exposed: tuple[Change, ...]  # by operation
    late: tuple[Change, ...]  # by rank: how long the others waited for it
    kernels: tuple[KernelChange, ...]  # those that became slower, by name
    operators: tuple[OperatorChange, ...] = ()  # largest change first


WATCH_SCHEMA = "counterpoint.watch/1"


class WatchedStep(Record, frozen=True, kw_only=True):
    """Sums up the diagnosis of the steps that end with `step`; `line` is the line in the log."""

    schema: str = WATCH_SCHEMA
    step: int
    unix_s: float
    line: str
    verdict: str
    ranks: tuple[int, ...]  # ranks whose traces were read
    world_size: int
    step_us: float
    usual_us: float | None = None  # mean time of the unrecorded steps since the previous recording
    hidden: float | None  # share of the communication that is hidden; null: no communication was seen
    exposed_comm_us: float
    idle_us: float
    late_rank: int | None  # the rank that makes the others wait longest
    late_us: float | None
    late_cause: StragglerCause | None
    late_detail: str | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
