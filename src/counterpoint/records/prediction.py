"""Hold what `plan` answers: what a job is predicted to take. Contract `counterpoint.plan/1`. Times are µs."""

from __future__ import annotations

from typing import Any

import msgspec

from counterpoint.records.base import Record

PREDICTION_SCHEMA = "counterpoint.plan/1"


class TimePart(Record, frozen=True, kw_only=True):
    """Holds the time of a named part of a whole; `means` says what it is."""

    name: str
    us: float
    means: str


class Bar(Record, frozen=True, kw_only=True):
    """Says what a stage runs from `start_us` to `end_us`: kind F, B or W, of one micro-batch and part of the model."""

    stage: int
    kind: str
    micro: int
    part: int
    start_us: float
    end_us: float


class Point(Record, frozen=True, kw_only=True):
    """Predicts the job with one value changed; `why_not` where it cannot be, and all else is null."""

    value: str
    step_us: float | None = None
    mfu: float | None = None
    exposed_comm_us: float | None = None
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    fits: bool | None = None
    why_not: str | None = None


class Curve(Record, frozen=True, kw_only=True):
    """Predicts the job over the values of one what-if or field."""

    name: str
    unit: str
    points: tuple[Point, ...]


class Sensitivity(Record, frozen=True, kw_only=True):
    """Says what the step would be if one thing were better."""

    name: str
    step_us: float
    change: float  # step_us over that of the job, - 1


class Choice(Record, frozen=True, kw_only=True):
    """Describes one way to divide the job: `settings` by field of the job's file."""

    settings: dict[str, int | str]
    step_us: float
    mfu: float
    memory_gib: float


class SearchResult(Record, frozen=True, kw_only=True):
    """Lists ways to divide a job, fastest first; `considered` = priced + too_large + impossible."""

    considered: int
    priced: int
    too_large: int
    impossible: int
    choices: tuple[Choice, ...]


class LevelLoad(Record, frozen=True, kw_only=True):
    """Says what crosses one level of the network in a step, both ways; `time_us`: of its busiest GPU, null: unknown."""

    level: str
    num_bytes: float
    cost: float
    time_us: float | None


class RankOrder(Record, frozen=True, kw_only=True):
    """Describes one way to place the ranks: cost = distance · bytes, summed over its levels, inside out."""

    name: str
    cost: float
    time_us: float | None
    levels: tuple[LevelLoad, ...]


class PlacementResult(Record, frozen=True, kw_only=True):
    """Holds the rank order found, first, and those it is compared with; `host_of` has the host of every rank.

    `files`: name to how it is used, of what was or could be written for launchers.
    """

    orders: tuple[RankOrder, ...]
    host_of: tuple[str, ...]
    files: dict[str, str]
    steps: tuple[str, ...]


class Prediction(Record, frozen=True, kw_only=True):
    """Holds the whole answer of `counterpoint plan`.

    `parts` add up to `step_us`; communication in them is what is exposed. `comm` is communication alone, by axis
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
    memory_available_gib: float | None = None
    fits: bool | None = None
    verdict: str
    validated: str
    notes: tuple[str, ...]
    job: dict[str, Any]
    timeline: tuple[Bar, ...] = ()
    curves: tuple[Curve, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    search: SearchResult | None = None
    placement: PlacementResult | None = None
    asked: dict[str, str] = msgspec.field(default_factory=dict)  # what-ifs and fields that were changed
