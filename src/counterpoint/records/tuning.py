"""Define the records of `counterpoint tune`: pairs of a step, the mechanisms tried, and what whole steps confirmed.

`Tuned` is the content of `counterpoint.toml`, the contract `counterpoint.tuning/1` (docs/reference/tune.md): keys may
be added, never renamed. Times are µs, sizes bytes. `sigma_us` is the standard error of a time.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from counterpoint.records import Record
from counterpoint.records.measurement import Environment, Order

TUNING_SCHEMA = "counterpoint.tuning/1"
LEAVE = "leave"
"""The choice of a pair that stays as torch and NCCL run it."""

Name = Annotated[str, Meta(max_length=200)]
_LONGEST = 1000
Sentence = Annotated[str, Meta(max_length=_LONGEST)]
Micros = Annotated[float, Meta(ge=0, le=1e12)]


def as_sentence(text: str) -> str:
    """Return a text, cut to the greatest length that the file allows for a sentence."""
    return text[:_LONGEST]


class _Strict(Record, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Makes records refuse unknown fields, and leave default values out of the file."""


class StepPair(_Strict, frozen=True, kw_only=True):
    """Describes a compute operation and a collective of a training step that may run at the same time.

    Independent: `operation` is PyTorch's name of a collective, `compute` a workload of measurement/workloads.py.
    Dependent: `all_gather_matmul` or `matmul_reduce_scatter`, and `compute` is its matmul on each rank.
    Tokens: `operation` is `exchange`, and `compute` the experts, as in `qwen3-30b-a3b 4096 zipf`.
    """

    operation: Name
    compute: Name
    bytes_per_rank: Annotated[int, Meta(ge=0, le=1 << 50)]  # full array / ranks; exchange: the rows of a rank
    ranks: Annotated[int, Meta(ge=2, le=1 << 20)]
    dtype: Name = "bfloat16"  # of the communicated data: float32 if gradients are reduced in float32
    compute_dtype: Name | None = None  # None: as `dtype`
    first: Order | None = None  # which side reaches the GPU first; None: not known, all orders count
    calls: Annotated[int, Meta(ge=1, le=1 << 30)] = 1  # number of such pairs in a step
    where: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()  # modules, as patterns of fnmatch: "layers.*"

    @property
    def computed_in(self) -> str:
        """Return the dtype of the computation: `compute_dtype`, or `dtype` if that is None."""
        return self.compute_dtype or self.dtype


class Tried(_Strict, frozen=True, kw_only=True):
    """Holds the measured time of a pair by one mechanism, from the first start to the last end.

    Where `paired_sigma_us` is known, `us` is stock's time minus the mean difference between both in the rounds that
    both ran.
    """

    mechanism: Name  # of measurement/mechanisms.py: "nccl+max_ctas=8"
    us: Micros
    sigma_us: Micros  # standard error of `us`, which includes the drift of GPU clocks over rounds
    paired_sigma_us: Micros | None = None  # of the difference to stock, round by round
    runs: Annotated[int, Meta(ge=1, le=1 << 30)]  # rounds that count
    predicted_us: Micros | None = None  # by the model that chose what to measure
    marked: Sentence | None = None  # why the time is invalid, such as a knob that did nothing


class TunedPair(StepPair, frozen=True, kw_only=True):
    """Holds the mechanism chosen for a pair, and why."""

    mechanism: Name  # LEAVE, or one of `tried`
    why: Sentence
    us: Micros  # of the mechanism
    sigma_us: Micros
    stock: Name  # the mechanism that runs where nothing is chosen: "nccl"
    stock_us: Micros
    stock_sigma_us: Micros
    compute_us: Micros | None = None  # compute alone
    comm_us: Micros | None = None  # communication alone, by the fastest mechanism tried
    next_best: Name | None = None
    next_best_us: Micros | None = None
    tried: Annotated[tuple[Tried, ...], Meta(max_length=256)] = ()

    @property
    def is_left(self) -> bool:
        """Return whether the choice is `leave` or stock: torch and NCCL run the pair as without counterpoint."""
        return self.mechanism in (LEAVE, self.stock)

    @property
    def saved_us(self) -> float:
        """Return the µs that the choice saves per step, by the measured times of the pair."""
        return 0.0 if self.is_left else self.calls * (self.stock_us - self.us)


class StepVariant(_Strict, frozen=True, kw_only=True):
    """Holds the time of whole steps under one set of choices; steps of the variants were measured in alternation."""

    name: Name  # "stock", "tuned", "tuned without all_gather 33554432"
    us: Micros
    sigma_us: Micros
    runs: Annotated[int, Meta(ge=1, le=1 << 30)]


class StepTuning(_Strict, frozen=True, kw_only=True):
    """Says which choices were confirmed by measured whole steps, and which were not."""

    before_us: Micros
    after_us: Micros
    sigma_us: Micros  # standard error of the difference of both, round by round
    variants: Annotated[tuple[StepVariant, ...], Meta(max_length=256)]
    falsified: Annotated[tuple[Sentence, ...], Meta(max_length=256)] = ()  # choices taken back, with the figures


class Tuned(_Strict, frozen=True, kw_only=True):
    """Holds all that `tune` chose on one machine."""

    schema: Name = TUNING_SCHEMA
    seconds: Annotated[float, Meta(ge=0, le=1e9)]  # duration of the tuning
    profile: Name  # digest of the figures that the model used: machine/profile.py
    made: Environment  # where; a file of another machine is not followed
    step: StepTuning | None = None
    notes: Annotated[tuple[Sentence, ...], Meta(max_length=256)] = ()
    pair: Annotated[tuple[TunedPair, ...], Meta(max_length=10_000)] = ()  # the tables [[pair]] of the file
