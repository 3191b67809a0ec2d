"""Call in, program out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from counterpoint.collectives.movement import barrier, broadcast, exchange
from counterpoint.collectives.program import Call, Operation, Program, Tuning, joined
from counterpoint.collectives.reduction import all_reduce, reduce_scatter
from counterpoint.errors import Misconfigured

__all__ = ["DEFAULT", "plan", "plan_all"]

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


@lru_cache(maxsize=4096)
def plan(call: Call, rank: int, tuning: Tuning = DEFAULT) -> Program:
    """What `rank` does for `call`. Cached: the same arguments give the same object.

    Raises:
        Misconfigured: `rank` is not in the group.
    """
    if not 0 <= rank < call.world_size:
        raise Misconfigured(f"rank {rank} of a group of {call.world_size}: allowed are 0 to {call.world_size - 1}")
    program = _PLANS[call.operation](call, rank, tuning)
    return replace(program, release=joined(program.release), steps=joined(program.steps), finish=joined(program.finish))


def plan_all(call: Call, tuning: Tuning = DEFAULT) -> tuple[Program, ...]:
    """The programs of all ranks, for the checker and the clock."""
    return tuple(plan(call, rank, tuning) for rank in range(call.world_size))
