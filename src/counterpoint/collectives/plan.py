"""Call in, program out; and which calls may share a buffer that is released early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from counterpoint.collectives import doubling
from counterpoint.collectives.movement import barrier, broadcast, exchange
from counterpoint.collectives.program import Call, Operation, Program, Tuning, joined
from counterpoint.collectives.reduction import all_reduce, reduce_scatter
from counterpoint.errors import Misconfigured

__all__ = ["DEFAULT", "DOUBLING", "may_release_early", "plan", "plan_all"]

DEFAULT = Tuning()

_PLANS: dict[Operation, Callable[[Call, int, Tuning], Program]] = {
    "all_gather": exchange,
    "all_to_all": exchange,
    "gather": exchange,
    "scatter": exchange,
    "send_recv": exchange,
    "broadcast": broadcast,
    "barrier": barrier,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}
DOUBLING: dict[Operation, Callable[[Call, int, Tuning], Program]] = {
    "all_gather": doubling.all_gather,
    "broadcast": doubling.broadcast,
    "all_reduce": doubling.all_reduce,
}
"""The operations that have a program of algorithm `doubling`."""


@lru_cache(maxsize=4096)
def plan(call: Call, rank: int, tuning: Tuning = DEFAULT) -> Program:
    """What `rank` does for `call`. Cached: the same arguments give the same object.

    Raises:
        Misconfigured: `rank` is not in the group, or the operation has no such algorithm.
    """
    if not 0 <= rank < call.world_size:
        raise Misconfigured(f"rank {rank} of a group of {call.world_size}: allowed are 0 to {call.world_size - 1}")
    plans = _PLANS if tuning.algorithm == "direct" else DOUBLING
    if call.operation not in plans:
        raise Misconfigured(
            f"{call.operation} with algorithm={tuning.algorithm!r}: {', '.join(plans)} have it; take 'direct'"
        )
    if tuning.staging_bytes is not None and call.operation != "reduce_scatter":
        raise Misconfigured(
            f"{call.operation} with staging_bytes={tuning.staging_bytes}: only reduce_scatter has slices"
        )
    program = plans[call.operation](call, rank, tuning)
    return replace(program, release=joined(program.release), steps=joined(program.steps), finish=joined(program.finish))


def plan_all(call: Call, tuning: Tuning = DEFAULT) -> tuple[Program, ...]:
    """The programs of all ranks, for the checker and the clock."""
    return tuple(plan(call, rank, tuning) for rank in range(call.world_size))


def may_release_early(calls: Sequence[Sequence[Program]]) -> bool:
    """Whether these calls, in any order, may follow each other on one output that is always released early.

    A release hands a credit to every rank in `pushers`. If the next call lets other ranks push, a credit that nobody
    took stays behind, and its holder would some day push while the output is read. So all calls must have the same
    pushers, on every rank. Those without any (all_reduce, reduce_scatter) only go with their like: they would let
    credits pass that were given before them.

    Args:
        calls: for each call the programs of all ranks, as `plan_all` gives them.
    """
    return len({tuple(program.pushers for program in programs) for programs in calls}) <= 1
