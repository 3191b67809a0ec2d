"""Call in, program out; and which calls may share a buffer that is released early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.operations import OPERATIONS
from counterpoint.collectives.program.reductions import slice_of
from counterpoint.collectives.program.steps import Program, Tuning, merge_batches
from counterpoint.errors import Misconfigured

__all__ = ["DEFAULT", "may_release_early", "most_staging_bytes", "plan", "plan_all"]

DEFAULT = Tuning()


@lru_cache(maxsize=4096)
def plan(call: Call, rank: int, tuning: Tuning = DEFAULT) -> Program:
    """Return what `rank` does for `call`. Cached: the same arguments give the same object.

    Raises:
        Misconfigured: `rank` is not in the group, or the operation has no slices.
    """
    if not 0 <= rank < call.world_size:
        raise Misconfigured(f"rank {rank} of a group of {call.world_size}: allowed are 0 to {call.world_size - 1}")
    row = OPERATIONS[call.operation]
    if tuning.staging_bytes is not None and "staging_bytes" not in row.tuning:
        raise Misconfigured(
            f"{call.operation} with staging_bytes={tuning.staging_bytes}: only "
            f"{', '.join(name for name, row in OPERATIONS.items() if 'staging_bytes' in row.tuning)} has slices"
        )
    made = row.program(call, rank, tuning)
    release, steps, finish = map(merge_batches, (made.release, made.steps, made.finish))
    return replace(made, release=release, steps=steps, finish=finish)


def plan_all(call: Call, tuning: Tuning = DEFAULT) -> tuple[Program, ...]:
    """Return the programs of all ranks, for the checker and the clock."""
    return tuple(plan(call, rank, tuning) for rank in range(call.world_size))


@lru_cache(maxsize=1024)
def most_staging_bytes(call: Call, tuning: Tuning) -> int:
    """Return the staging of the rank that needs most. Of a call in slices one is planned for that, not all of them."""
    if tuning.staging_bytes is not None and call.world_size > 1:
        call, tuning = slice_of(call, tuning.staging_bytes), replace(tuning, staging_bytes=None)
    return max(program.staging_bytes for program in plan_all(call, tuning)) if call.reduces else 0


def may_release_early(calls: Sequence[Sequence[Program]]) -> bool:
    """Return whether these calls, in any order, may follow each other on one output that is always released early.

    A release hands a credit to every rank in `pushers`. If the next call lets other ranks push, a credit that nobody
    took stays behind, and its holder would some day push while the output is read. So all calls must have the same
    pushers, on every rank. Those without any (all_reduce, reduce_scatter) only go with their like: they would let
    credits pass that were given before them.

    Args:
        calls: for each call the programs of all ranks, as `plan_all` gives them.
    """
    return len({tuple(program.pushers for program in programs) for programs in calls}) <= 1
