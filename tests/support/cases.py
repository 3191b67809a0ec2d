"""Small calls of every operation, for the checkers."""

from __future__ import annotations

from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
    send_recv,
)
from counterpoint.collectives.program.steps import Tuning

PLAIN = Tuning()
CHUNKS = Tuning(chunk_bytes=16, relay_bytes=1)
TOGETHER = Tuning(arrivals="together")
TURNS = Tuning(chunk_bytes=16, turn_bytes=16)
PEERS = Tuning(chunk_bytes=16, peers_first=True)
SLICES = Tuning(chunk_bytes=16, turn_bytes=1, staging_bytes=100)
TAPERED = Tuning(chunk_bytes=16, last_bytes=16)


def _cases(world_size: int) -> dict[str, tuple[Call, Tuning]]:
    ranks, last = range(world_size), world_size - 1
    uneven = [[(source + 2 * target) % 4 for target in ranks] for source in ranks]
    ring = [[5 if target == (source + 1) % world_size else 0 for target in ranks] for source in ranks]
    return {
        "all_gather": (all_gather(world_size, 3), PLAIN),
        "all_gather, uneven": (all_gather(world_size, list(ranks)), PLAIN),
        "all_gather, chunks": (all_gather(world_size, 20), CHUNKS),
        "all_gather, turns, chunks": (all_gather(world_size, 20), TURNS),
        "all_gather, out of place": (all_gather(world_size, 3, own="copy"), TOGETHER),
        "all_gather, own block left": (all_gather(world_size, 3, own="consumer"), TOGETHER),
        "all_gather, peers first, chunks": (all_gather(world_size, 36, own="consumer"), PEERS),
        "all_to_all": (all_to_all(uneven), PLAIN),
        "all_to_all, peers first, chunks": (all_to_all([[20] * world_size] * world_size, own="consumer"), PEERS),
        "all_to_all, own block left": (all_to_all(uneven, own="consumer"), CHUNKS),
        "reduce_scatter": (reduce_scatter(world_size, 4), PLAIN),
        "reduce_scatter, chunks": (reduce_scatter(world_size, 36), CHUNKS),
        "reduce_scatter, slices": (reduce_scatter(world_size, 36), Tuning(staging_bytes=16 * world_size)),
        "reduce_scatter, slices, chunks": (reduce_scatter(world_size, [70, *[4] * last]), SLICES),
        "reduce_scatter, turns": (reduce_scatter(world_size, 4), Tuning(turn_bytes=1)),
        "all_reduce, turns, chunks": (all_reduce(world_size, 32 * world_size), TURNS),
        "all_reduce": (all_reduce(world_size, 3, own="copy"), PLAIN),
        "all_reduce, chunks": (all_reduce(world_size, 40 * world_size), CHUNKS),
        "all_reduce, last chunk small": (all_reduce(world_size, 36 * world_size, own="copy"), TAPERED),
        "broadcast": (broadcast(world_size, 5, root=last), PLAIN),
        "broadcast, relayed": (broadcast(world_size, 20 * last, root=last), CHUNKS),
        "scatter": (scatter(world_size, list(ranks)), PLAIN),
        "scatter, in place": (scatter(world_size, 3, root=last, own="in_place"), TOGETHER),
        "gather": (gather(world_size, 3), PLAIN),
        "gather, in place": (gather(world_size, [1 + rank for rank in ranks], root=last, own="in_place"), PLAIN),
        "send_recv": (send_recv(ring), CHUNKS),
        "barrier": (barrier(world_size), PLAIN),
    }


NAMES = list(_cases(2))


def case(name: str, world_size: int) -> tuple[Call, Tuning]:
    return _cases(world_size)[name]
