"""A toy collective, as a new one is added: rank r's tensor goes to rank r + 1. One program, one row."""

from __future__ import annotations

from counterpoint.collectives.program.calls import BlockLayout, Call, Sizes
from counterpoint.collectives.program.direct import arrival, own_block, signal_ready, wait_ready
from counterpoint.collectives.program.operations import Operation
from counterpoint.collectives.program.steps import Batch, Copy, Flag, Program, Tuning, Wait


def shift(call: Call, rank: int, tuning: Tuning) -> Program:
    """Build the program: wait until the next rank is ready, push to it, and wait for the previous one."""
    following, previous = (rank + 1) % call.world_size, (rank - 1) % call.world_size
    if not call.sends(rank, following):
        return Program(call=call, tuning=tuning, rank=rank, steps=own_block(call, rank))
    source, target = call.source_span(rank, following), call.target_span(rank, following)
    brought = call.target_span(previous, rank)
    return Program(
        call=call,
        tuning=tuning,
        rank=rank,
        release=(signal_ready("output", rank, [previous]),),
        steps=(
            wait_ready("output", [following]),
            Copy(following, source, target),
            Batch((arrival(following, target, rank, 0),)),
        ),
        finish=(Batch((Wait(Flag("output", "arrived", previous), brought),)),),
    )


def to_next(world_size: int, num_bytes: int, root: int) -> Sizes:
    ranks = range(world_size)
    return [[num_bytes if target == (source + 1) % world_size else 0 for target in ranks] for source in ranks]


SHIFT = Operation(
    layout=BlockLayout(name="shift", input="block", output="blocks", own=("copy",)),
    program=shift,
    sizes=to_next,
    measured_by=frozenset({"torch", "programs"}),
)
