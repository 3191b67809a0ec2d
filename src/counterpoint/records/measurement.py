"""Define the records of `counterpoint measure`: requests, times, and kernels that ran. Times are µs, sizes bytes.

`Measurement` is the contract `counterpoint.measurement/1` (docs/reference/measurement.md): keys may be added, never
renamed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from counterpoint.records import Record

MEASUREMENT_SCHEMA = "counterpoint.measurement/1"

LEGS = ("dispatch", "combine")  # of an exchange: tokens to the ranks of their experts, and sums back
Order = Literal["together", "comm_first", "compute_first"]
PairClass = Literal["G-long", "C-long", "GC-equal"]


class Timing(Record, frozen=True, kw_only=True):
    """Holds the median (µs) over rounds, with 10th and 90th percentile, on the rank with the largest median.

    `rounds_us` has the slowest rank's time of each round; the slowest rank may change between rounds. Durations whose
    rounds were measured in alternation can be compared by `rounds_us`, round by round.
    """

    us: float
    p10_us: float
    p90_us: float
    rank: int
    per_rank_us: tuple[float, ...]  # the median of every rank
    runs: int | None = None  # rounds that count; None: an old result, without them
    rounds_us: tuple[float | None, ...] = ()  # None: a round that does not count; (): an old result, without them


class Scenario(Record, frozen=True, kw_only=True, tag=True):
    """Requests that a workload and a collective are measured together by several mechanisms and launch orders."""

    name: str  # unique within its suite
    workload: str  # a name of measurement/workloads.py: "gemm 8192x8192x8192"
    collective: str  # PyTorch's name: "all_gather"
    size_bytes: int | None = None  # of the full array; None: from `ratio`
    ratio: float | None = None  # wanted T_c / T_g, for the fastest mechanism alone
    mechanisms: tuple[str, ...]  # "nccl", "nccl+priority=high", "nccl+max_ctas=8+gemm_sms=124"
    orders: tuple[Order, ...] = ("together", "comm_first", "compute_first")
    dtype: str | None = None  # of the collective, by torch's name; None: that of measurement/workloads.py
    compute_dtype: str | None = None  # of the workload; None: that of measurement/workloads.py, whatever `dtype` is


class BlockRow(Record, frozen=True, kw_only=True):
    """Holds the time of one operation alone: a collective with a size and a number of CTAs, a copy, or a GEMM.

    Other rows hold the time of a matmul that depends on communication, or of this matmul or communication alone (all
    these rows have `can_hide`), or of one leg of an exchange of tokens.
    """

    # "all_gather", "gemm 8192x8192x8192", "all_gather_matmul 8192x7168x8192", "dispatch mixtral-8x7b 4096 zipf"
    what: str
    mechanism: str
    size_bytes: int | None = None
    num_ctas: int | None = None
    num_sms: int | None = None
    time: Timing
    gb_per_s: float | None = None  # bus bandwidth, as nccl-tests counts it
    tflops: float | None = None
    can_hide: bool | None = None  # whether the communication can hide behind the matmul at all: pair/arrivals.py
    over_longer: float | None = None  # time / time of the longer of matmul and collective alone - 1
    path: str | None = None  # how the calls were carried out, as their backend reports: "torch", "serial", "cuts"
    why: str | None = None  # why the calls were carried out so
    dtype: str | None = None  # by torch's name; None: a result from before it was kept
    marked: str | None = None


class Block(Record, frozen=True, kw_only=True, tag=True):
    """Requests that one operation is measured alone, at several sizes or with several settings of a control."""

    name: str  # unique within its suite
    what: (
        str  # a collective, a workload's name, "all_gather_matmul 8192x7168x8192" or "exchange mixtral-8x7b 4096 zipf"
    )
    mechanisms: tuple[str, ...]  # of a collective; of a workload: "stock", "gemm_sms=116"; of a matmul: "cuts"
    sizes_bytes: tuple[int, ...] = ()  # of a collective
    dtype: str | None = None  # as `Scenario.dtype`


class Plan(Record, frozen=True, kw_only=True):
    """Holds the request of the parent process to its workers: one JSON file that every rank reads."""

    suite: str
    device: Literal["cuda", "cpu"]
    world_size: int
    parts: tuple[Scenario | Block, ...]  # in the order in which they are measured; each gives one line of results
    rounds: int = 12
    dropped_rounds: int = 2
    seed: int = 0
    timeout_s: float = 100.0  # limit for a collective that waits for a rank
    results: str  # rank 0 appends one `Outcome` a line here
    errors: str  # folder: a rank that fails writes rank<N>.json here
    # limit by CLOCK_MONOTONIC: after the first part, a part begins only if at mean duration it would end before this;
    # each has an equal share of what is left, and more than twelve rounds only if they fit
    until_s: float | None = None


class Outcome(Record, frozen=True, kw_only=True):
    """Holds one line of the results file: all rows of one finished scenario or block."""

    scenario: str
    rows: tuple[Row, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)
    environment: Environment | None = None  # in the first line of a run


class RankFailure(Record, frozen=True, kw_only=True):
    """Says why one rank ended early."""

    rank: int
    kind: str  # name of the exception's class
    text: str
    scenario: str | None = None


class Usage(Record, frozen=True, kw_only=True):
    """Counts thread blocks and SMs of the computation and the collective, as the profiler saw them; `null` on a CPU."""

    compute_blocks: int | None = None  # of its longest kernel
    compute_blocks_per_sm: int | None = None
    compute_sms: int | None = None
    comm_ctas: int | None = None  # 0: copies only
    waves_alone: int | None = None  # of the longest compute kernel on the whole device
    waves_together: int | None = None  # on the SMs that the collective leaves


class DeviceState(Record, frozen=True, kw_only=True):
    """Holds the extremes over ranks of the values that NVML reported right after a scenario."""

    sm_mhz_min: int
    sm_mhz_max: int
    power_w_max: float
    temperature_c_max: int
    throttle: tuple[str, ...] = ()


class Row(Record, frozen=True, kw_only=True):
    """Holds the result of a scenario by one mechanism in one launch order; formulas: docs/reference/measurement.md."""

    scenario: str
    workload: str
    collective: str
    size_bytes: int
    dtype: str | None = None  # of the collective; None: a result from before it was kept
    compute_dtype: str | None = None  # of the workload
    ratio: float | None  # as asked
    mechanism: str
    order: Order
    compute_alone: Timing  # T_g: without any control
    compute_controlled: Timing  # compute alone under this mechanism's controls, which shows their cost
    comm_alone: Timing  # by this mechanism
    best_comm_alone_us: float  # by the fastest mechanism of the scenario: T_c
    best_mechanism: str
    serial: Timing  # measured one after the other
    together: Timing  # T: from the first start to the last end
    compute_together: Timing
    comm_together: Timing
    head_start_us: float  # measured; 0 for "together"
    hidden: float  # fraction of the shorter of both times that overlap saves: pair/together.py
    ideal_fraction: float
    compute_kept: float
    comm_kept: float
    pair_class: PairClass
    tflops_alone: float | None = None
    tflops_together: float | None = None
    mfu_alone: float | None = None  # of the datasheet's dense peak, 0..1
    mfu_together: float | None = None
    usage: Usage | None = None
    evidence: tuple[Evidence, ...] = ()
    marked: str | None = None  # why this row must not be believed: a knob that did nothing, launches that came late
    device: DeviceState | None = None

    @property
    def operation(self) -> str:
        """Return the collective's name without sizes: "all_gather", "dispatch"."""
        return self.collective.partition(" ")[0]

    @property
    def serial_us(self) -> float:
        """Return the µs of computation and collective, one after the other: T_g + T_c + head start."""
        return self.compute_alone.us + self.best_comm_alone_us + self.head_start_us

    @property
    def speedup(self) -> float:
        """Return the speedup over computation and collective one after the other: `serial_us` / T."""
        return self.serial_us / self.together.us


class Environment(Record, frozen=True, kw_only=True):
    """Describes the machine, versions and command of a measurement."""

    device: str  # cuda | cpu
    gpu: str | None = None
    world_size: int
    driver: str | None = None
    torch: str
    nccl: str | None = None
    counterpoint: str
    commit: str | None = None
    command: tuple[str, ...]
    date: str  # ISO 8601, UTC
    variables: dict[str, str]  # NCCL_*, CUDA_*, TORCH_*


class Measurement(Record, frozen=True, kw_only=True):
    """Holds all measured rows of one suite of scenarios and blocks."""

    schema: str = MEASUREMENT_SCHEMA
    suite: str
    environment: Environment
    rounds: int
    dropped_rounds: int
    rows: tuple[Row, ...]
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)  # mechanism: why it was not measured
    unmeasured: dict[str, str] = msgspec.field(default_factory=dict)  # scenario or block: why it has no row at all
    blocks: tuple[BlockRow, ...] = ()


class Launched(Record, frozen=True, kw_only=True):
    """Describes one kernel, copy or memset as the profiler (CUPTI) or the driver saw it; unknown fields are `null`."""

    kind: Literal["kernel", "copy", "memset"]
    name: str
    stream: int | None = None  # the profiler's number of the stream
    priority: int | None = None  # of the stream, as the driver says; lower goes first, 0 is the default
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    regs_per_thread: int | None = None
    smem_bytes: int | None = None  # static + dynamic, per block
    bytes: int | None = None  # of a copy
    start_us: float = 0.0  # on the profiler's clock
    duration_us: float = 0.0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the grid; 0 for a copy."""
        return 0 if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]


class Observation(Record, frozen=True, kw_only=True):
    """Holds, for `Control.verify`, the kernels that ran when a pair was launched with a control and without it."""

    compute: tuple[Launched, ...] = ()
    comm: tuple[Launched, ...] = ()
    compute_without: tuple[Launched, ...] = ()  # the same launches with the control off
    comm_without: tuple[Launched, ...] = ()
    compute_sms: tuple[int, ...] | None = None  # ids of the SMs on which a probe ran in the compute stream
    comm_sms: tuple[int, ...] | None = None


class Evidence(Record, frozen=True, kw_only=True):
    """Says whether one control took effect, and which observation shows that."""

    control: str  # as in a mechanism's name: "gemm_sms=108"
    asked: str
    seen: str
    took_effect: bool
