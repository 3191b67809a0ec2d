"""Describe a whole training: its length, how often machines fail, and what checkpoints and GPUs cost."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.fields import JobRecord, Rate

Tokens = Annotated[float, Meta(ge=1, le=1e16)]  # the largest trainings have some 10^13
Hours = Annotated[float, Meta(ge=1e-2, le=1e9)]


class Run(JobRecord, frozen=True, kw_only=True):
    """Describes the training to which a job's step belongs. Checkpoints are written if machines fail, or if asked."""

    tokens: Tokens | None = None  # that are trained on; the last step is a whole one
    steps: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = None  # instead of tokens
    price_per_gpu_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # in any currency
    gpu_mtbf_hours: Hours | None = None  # mean time between failures that one GPU causes; None: none
    node_mtbf_hours: Hours | None = None  # that a node causes, besides those of its GPUs; None: none
    restart_minutes: Annotated[float, Meta(ge=0, le=1e6)] = 10.0  # from a failure until training goes on
    checkpoint_minutes: Annotated[float, Meta(ge=1e-3, le=1e7)] | Literal["optimal"] = "optimal"  # of work between two
    checkpoint_seconds: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # that training waits; None: size / storage
    checkpoint_gb: Rate | None = None  # of all ranks together; None: parameters and states of the optimizer
    storage_gb_per_s: Rate = 100.0  # at which all ranks together write: assumed

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.steps is None):
            given = "both" if self.steps is not None else "neither"
            raise Misconfigured(f"run.tokens and run.steps: {given} given; give one of them")
        if self.checkpoint_seconds is not None and self.checkpoint_gb is not None:
            raise Misconfigured("run.checkpoint_seconds with run.checkpoint_gb: both say how long one takes; give one")
