"""Define the records of `counterpoint plan`: the prediction of a job. Schema `counterpoint.plan/1`. Times are µs."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from counterpoint.records import Record

PREDICTION_SCHEMA = "counterpoint.plan/1"
Setting = int | str | bool | tuple[int | str, ...] | None
Objective = Literal["step", "cost", "goodput"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


class TimePart(Record, frozen=True, kw_only=True):
    """Holds the time of one named part of a step; `means` explains the part."""

    name: str
    us: float
    means: str


class Bar(Record, frozen=True, kw_only=True):
    """Describes one task of a pipeline stage: F(orward), B(ackward) or W(eight gradients) of a micro-batch."""

    stage: int
    kind: str
    micro: int
    part: int
    start_us: float
    end_us: float


class StepInterval(Record, frozen=True, kw_only=True):
    """Holds the interval in which the step time lies with probability `level`, by errors on measured steps."""

    level: float
    seen: float  # fraction of similar measured steps that lay in the interval predicted from other sources' steps
    low_us: float
    usual_us: float  # median
    high_us: float
    rows: int  # number of measured steps
    sources: tuple[str, ...]  # who measured them, the most similar first
    alike: float  # number of sources, each counted by how similar its steps are
    slowest_us: float  # part of `high_us`: expected delay by the slowest rank, if rows have other numbers of ranks


class StepCause(Record, frozen=True, kw_only=True):
    """Names one way in which a run may differ from its job, the µs that it adds to the step, and how to check it."""

    name: str
    us: float
    tell: str


class ObservedStep(Record, frozen=True, kw_only=True):
    """Compares an observed step with its job's usual steps; `causes`: ways in which the run may differ from its job."""

    step_us: float
    predicted_us: float
    usual_us: float  # median of such runs
    faster_than: float  # fraction of such runs
    causes: tuple[StepCause, ...]  # the largest first; each is a change by itself


class RatioError(Record, frozen=True, kw_only=True):
    """Says how far off a predicted ratio of two step times is: with probability `level`, by at most `factor`."""

    level: float
    factor: float  # at least 1
    pairs: int  # number of pairs of measured steps
    sources: int


class RunLoss(Record, frozen=True, kw_only=True):
    """Holds the days that a training loses for one reason, such as repeating work after failures."""

    name: str
    days: float
    means: str


class TrainingRun(Record, frozen=True, kw_only=True):
    """Predicts a whole training: `days` = days of its steps + `losses`; `goodput` = days of its steps / `days`."""

    steps: int
    tokens: float
    days: float
    low_days: float | None = None  # `days` at the lower end of the step's interval
    high_days: float | None = None
    gpu_hours: float
    cost: float | None = None  # null: no price was given
    goodput: float
    failures: float  # expected
    failure_hours: float | None = None  # mean time between two failures of the job; null: nothing fails
    checkpoint_seconds: float  # for which training waits for one checkpoint
    checkpoint_minutes: float | None = None  # of work between two checkpoints; null: none is written
    losses: tuple[RunLoss, ...]


class PartChange(Record, frozen=True, kw_only=True):
    """Says how much longer a part of a step, or a loss, is than in another job, as a fraction of that job's total."""

    name: str
    change: float


class PlanOutcome(Record, frozen=True, kw_only=True):
    """Holds the main figures of one of several jobs; for an impossible job they are null and `why_not` says why."""

    label: str = ""  # how this job differs from the requested one: the value on a curve, or the resource improved
    settings: dict[str, Setting] = msgspec.field(default_factory=dict)  # of a search: fields that the search chose
    gpus: int | None = None
    step_us: float | None = None
    parts: dict[str, float] = msgspec.field(default_factory=dict)  # µs by name; they add up to `step_us`
    low_us: float | None = None  # ends of the step's interval
    high_us: float | None = None
    mfu: float | None = None
    exposed_comm_us: float | None = None
    tokens_per_s: float | None = None
    memory_gib: float | None = None  # of the fullest GPU
    fits: bool | None = None
    fits_probability: float | None = None
    run: TrainingRun | None = None
    too_close: bool = False  # too close to the fastest choice of a search to tell which one is faster
    on_front: bool = False  # of a search: no other choice has as little of GPUs, step and memory
    more: PartChange | None = None  # of a search: the part that is longer than in the first choice by most
    why_not: str | None = None


class Curve(Record, frozen=True, kw_only=True):
    """Predicts the job for several values of one flag or field; the label of each point is its value."""

    name: str
    means: str = ""  # a sentence on what the values change, and what stays
    points: tuple[PlanOutcome, ...]


class SearchResult(Record, frozen=True, kw_only=True):
    """Lists ways to divide a job over `gpus` GPUs, fastest first.

    `considered` = priced + too_large + impossible + ways that are proved to be slower than the last one listed.
    """

    gpus: int = 0
    objective: Objective = "step"  # the objective that ranks results for several numbers of GPUs
    considered: int = 0
    priced: int = 0
    too_large: int = 0
    impossible: int = 0
    complete: bool = True  # false: the search was interrupted, and a faster way may have been left out
    why_not: str | None = None  # why there are no choices
    choices: tuple[PlanOutcome, ...] = ()


class LevelLoad(Record, frozen=True, kw_only=True):
    """Counts bytes per step over one network level, both directions; `time_us`: transfer time of the busiest GPU."""

    level: str
    num_bytes: float
    cost: float
    time_us: float | None


class RankOrder(Record, frozen=True, kw_only=True):
    """Describes one placement of the ranks; `cost` = distance · bytes, summed over `levels`, the innermost first."""

    name: str
    cost: float
    time_us: float | None
    levels: tuple[LevelLoad, ...]


class PlacementResult(Record, frozen=True, kw_only=True):
    """Holds the rank order found and the orders compared with it; `host_of` has the host of every rank.

    `files` maps the name of each file for launchers, whether it was written or not, to text on how to use it.
    """

    orders: tuple[RankOrder, ...]
    host_of: tuple[str, ...]
    files: dict[str, str]
    steps: tuple[str, ...]


class FitError(Record, frozen=True, kw_only=True):
    """Holds the error of a fit on sizes that were held out: |predicted / measured - 1|."""

    operation: str
    ranks: int
    sizes: int
    mean: float
    worst: float
    nccl_mean: float  # mean error of NCCL's own model, on the same sizes


class Prediction(Record, frozen=True, kw_only=True):
    """Holds the whole answer of `counterpoint plan`.

    `parts` add up to `step_us`, so they count only exposed communication. `comm` is communication alone, by axis
    (from a trace: by operation). What a trace does not say is null.
    """

    schema: str = PREDICTION_SCHEMA
    model: str
    gpu: str
    gpus: int
    step_us: float
    parts: tuple[TimePart, ...]
    comm: tuple[TimePart, ...]
    exposed_comm_us: float
    comm_to_compute: float
    serial_us: float
    ideal_us: float
    micro_batches: int | None = None
    tokens_per_s: float | None = None
    model_tflops: float | None = None
    mfu: float | None
    memory: dict[str, float]
    stage_memory_gib: tuple[float, ...] = ()  # memory (GiB) of each pipeline stage
    memory_available_gib: float | None = None
    fits: bool | None = None
    fits_probability: float | None = None
    fits_source: str = ""  # where the probability comes from
    verdict: str
    validated: str
    interval: StepInterval | None = None
    observed: ObservedStep | None = None  # if given, all times are scaled to this step
    comparisons: RatioError | None = None
    notes: tuple[str, ...]
    job: dict[str, Any]
    timeline: tuple[Bar, ...] = ()
    curves: tuple[Curve, ...] = ()
    sensitivities: tuple[PlanOutcome, ...] = ()  # the job with one figure improved, the largest gain first
    search: SearchResult | None = None
    searches: tuple[SearchResult, ...] = ()  # one for each number of GPUs that was asked for, the best first
    placement: PlacementResult | None = None
    run: TrainingRun | None = None
    asked: dict[str, str] = msgspec.field(default_factory=dict)  # flags and fields that were changed
