"""Define the records of `counterpoint doctor`: its checks of a machine, and what `--check` proves from traces.

`Checkup` is the contract `counterpoint.doctor/1`, `Effect` is `counterpoint.effect/1`: keys may be added, never
renamed. Times are µs, sizes bytes. What is not known is `null`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from counterpoint.records import Record

CHECKUP_SCHEMA = "counterpoint.doctor/1"


class Check(Record, frozen=True, kw_only=True):
    """Holds the result of one check of the machine."""

    name: str  # "peer_access"
    status: Literal["ok", "warning", "problem", "not_seen"]
    seen: str
    means: str = ""  # what the result means for overlap
    fix: str = ""  # what to do, with the command or variable
    values: dict[str, int | float | str | None] = msgspec.field(default_factory=dict)


class Checkup(Record, frozen=True, kw_only=True):
    """Holds all checks of one machine."""

    schema: str = CHECKUP_SCHEMA
    host: str
    gpus: tuple[str, ...]
    driver: str | None
    checks: tuple[Check, ...]


EFFECT_SCHEMA = "counterpoint.effect/1"

KnobState = Literal["took_effect", "no_effect", "not_seen"]


class CommCalls(Record, frozen=True, kw_only=True):
    """Counts the calls of one collective operation that counterpoint did not carry out by copy engines."""

    by: Literal["nccl", "other"]
    operation: str
    calls: int
    us: float  # sum of the calls' times, including waits for other ranks


class RankEffect(Record, frozen=True, kw_only=True):
    """Holds one rank's copies, sums and collective calls. Overlaps count once, except in `calls`."""

    rank: int
    copies: int  # number of copies between GPUs by copy engines
    copied_bytes: int | None
    copies_us: float
    own_copies: int  # number of copies within the own GPU, on the streams of `copies`
    own_copied_bytes: int | None
    own_copies_us: float
    sums: int  # number of kernels that add up what peers have sent
    sums_us: float
    calls: tuple[CommCalls, ...]  # longest first
    communication_us: float  # time of the copies between GPUs and of the calls


class KnobEffect(Record, frozen=True, kw_only=True):
    """Says whether one choice took effect: the use of copies, a pair's mechanism, or one knob of a mechanism."""

    knob: str  # "copies" without a tuning; else "zero_sm", "leave", "max_ctas=8"
    state: KnobState
    seen: str
    fix: str  # what to do or to record; empty if it took effect
    on_ranks: tuple[int, ...]  # ranks whose traces show this
    pair: int | None = None  # its number in the file, from 1 on; None: there is no tuning
    operation: str | None = None
    compute: str | None = None
    bytes_per_rank: int | None = None
    ranks: int | None = None
    mechanism: str | None = None


class Effect(Record, frozen=True, kw_only=True):
    """Holds the whole answer of `doctor --check`."""

    schema: str = EFFECT_SCHEMA
    files: tuple[str, ...]
    world_size: int
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    took_effect: bool  # at least one knob took effect, and none is `no_effect`
    verdict: str
    knobs: tuple[KnobEffect, ...]  # in the order of the file
    per_rank: tuple[RankEffect, ...]
    notes: tuple[str, ...]
