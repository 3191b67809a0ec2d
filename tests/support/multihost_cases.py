"""Calls over several hosts that the tests try, and their programs."""

from __future__ import annotations

from counterpoint.collectives.multihost.phases import Grid
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from counterpoint.collectives.program.steps import Program, Tuning
from tests.support.flatten import flatten, phases_all

GRIDS = [Grid(hosts=hosts, local=local) for hosts, local in ((1, 3), (3, 1), (2, 2), (2, 3), (3, 2))]


SLICE = 32  # bytes: several slices and a rest in small calls


def cases(n: int) -> dict[str, Call]:
    return {
        "all_gather": all_gather(n, 3),
        "all_gather, out of place": all_gather(n, 3, own="copy"),
        "all_gather, own block left": all_gather(n, 3, own="consumer"),
        "reduce_scatter": reduce_scatter(n, 5),
        "all_reduce": all_reduce(n, 40 * n + 3),
        "all_reduce, out of place": all_reduce(n, 40 * n, own="consumer"),
        "all_reduce, small": all_reduce(n, 3),
        "all_to_all": all_to_all([[3] * n] * n),
        "all_to_all, own block left": all_to_all([[3] * n] * n, own="consumer"),
        "broadcast": broadcast(n, 40 * n + 3, root=n - 1),
        "broadcast, small": broadcast(n, 3),
        "barrier": barrier(n),
    }


NAMES = list(cases(2))


def whole(call: Call, grid: Grid, tuning: Tuning = Tuning(), *, slice_bytes: int | None = SLICE) -> tuple[Program, ...]:  # noqa: B008
    return flatten(call, grid, phases_all(call, grid, slice_bytes=slice_bytes), tuning=tuning)
