"""Choose how a matmul that depends on communication runs, by each execution's predicted time. No torch.

    torch    NCCL and the matmul, one after the other
    serial   copy engines, then the matmul; or the matmul of the peers' rows, then copy engines beside that of own rows
    cuts     the pieces of `cuts.py`, multiplied by cuBLAS beside copy engines
    flagged  one persistent matmul that takes its tiles in the order in which rows arrive, beside copy engines

docs/design/tensor.md has the equations and what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair.arrivals import Hiding, Segment, ShardedMatmul, hiding_of, nccl_us
from counterpoint.pair.cuts import Piece, RowAxis, cut

MatmulMechanism = Literal["torch", "serial", "cuts", "flagged"]
MATMUL_MECHANISMS: tuple[MatmulMechanism, ...] = ("torch", "serial", "cuts", "flagged")  # the simplest first
MARGIN = 0.03  # predicted times that differ by a smaller share count as equal


@dataclass(frozen=True, kw_only=True)
class MatmulPlan:
    """Holds how a matmul that depends on communication runs, and the predicted µs by which that was chosen."""

    mechanism: MatmulMechanism
    pieces: tuple[Piece, ...]  # of this rank; uncut unless the mechanism is cuts
    segments: tuple[Segment, ...]  # of this rank: its rows in the order of arrival or sending
    predicted_us: Mapping[MatmulMechanism, float]  # of rank 0, so that all ranks choose alike
    alone_us: float  # the matmul
    comm_us: float  # the collective by NCCL
    hiding: Hiding
    estimated: bool  # a curve was not measured
    why: str  # one sentence


def choose_matmul(
    task: ShardedMatmul,
    rank: int,
    profile: Profile | None = None,
    *,
    flagged_factor: float | None = 1.0,
    host_us: Mapping[MatmulMechanism, float] | None = None,
) -> MatmulPlan:
    """Return the simplest execution predicted to take within `MARGIN` of the best time; torch's is the simplest.

    The mechanism goes by the predictions of rank 0, the pieces are those of `rank`: ranks that are given the same
    curves and figures choose alike, which they must.

    Args:
        task: the matmul.
        rank: this rank.
        profile: of the machine; None: the default one, H200.
        flagged_factor: speed of the persistent matmul over that of cuBLAS, measured; None: there is none.
        host_us: what the host needs to issue a call of each mechanism: none is taken to be shorter; None: nothing.

    Raises:
        Misconfigured: `flagged_factor` is not above 0, or the profile has no `nccl_rates` of the collective.
    """
    profile = profile or default_profile()
    if flagged_factor is not None and not 0 < flagged_factor < math.inf:
        raise Misconfigured(f"flagged_factor={flagged_factor}: give a factor > 0, or None")
    first, comm_us = RowAxis(task, 0, profile), nccl_us(task, profile)
    one_us = first.cost_us(task.rows)
    predicted: dict[MatmulMechanism, float] = {
        "torch": comm_us + one_us,
        "serial": first.end_us(first.serial_bounds),
        "cuts": first.cuts.us,
    }
    if flagged_factor is not None:
        predicted["flagged"] = first.flagged_us(one_us / flagged_factor)
    by_gpu = predicted
    predicted = {name: max(us, (host_us or {}).get(name, 0.0)) for name, us in by_gpu.items()}
    best_us = min(predicted.values())
    chosen = next(name for name in MATMUL_MECHANISMS if (1 - MARGIN) * predicted.get(name, math.inf) <= best_us)
    axis = first if rank == 0 else RowAxis(task, rank, profile)
    known = hiding_of(task, profile)
    times = ", ".join(f"{name} {us:,.0f}" for name, us in predicted.items())
    host = "" if predicted == by_gpu else ", as long as the host needs or longer"
    return MatmulPlan(
        mechanism=chosen,
        pieces=axis.cuts.pieces if chosen == "cuts" else axis.pieces(axis.serial_bounds),
        segments=axis.segments,
        predicted_us=predicted,
        alone_us=task.alone_us,
        comm_us=comm_us,
        hiding=known,
        estimated=any(curve.estimated for curve in task.curves),
        why=f"{chosen} is the simplest within {MARGIN:.0%} of the best of {times} µs{host}; {known.why}",
    )


def with_best_chunks(task: ShardedMatmul, profile: Profile | None = None) -> ShardedMatmul:
    """Return the task with the largest chunks whose predicted time, on rank 0, is within `MARGIN` of the least.

    Compared are one, two and four chunks of the largest shard.
    """
    block = task.batch * max(task.shard_rows)
    found = [replace(task, chunk_rows=-(-block // chunks)) for chunks in (1, 2, 4)]
    times = [cut(each, 0, profile).us for each in found]
    return next(each for each, us in zip(found, times, strict=True) if (1 - MARGIN) * us <= min(times))
