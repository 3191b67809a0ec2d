"""Choose how a matmul that depends on communication runs, by the predicted time of each execution. No torch.

    torch    NCCL and the matmul, one after the other
    serial   copy engines, then the matmul; or the matmul of the peers' rows, then copy engines beside that of own rows
    cuts     the pieces of `cuts.py`, multiplied by cuBLAS beside copy engines
    flagged  one persistent matmul that takes its tiles in the order in which rows arrive, beside copy engines

docs/design/tensor.md has the equations and what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair.arrivals import Hiding, Segment, ShardedMatmul, hiding_of, nccl_us
from counterpoint.pair.cuts import Piece, RowAxis, cut

TensorMechanism = Literal["torch", "serial", "cuts", "flagged"]
MECHANISMS: tuple[TensorMechanism, ...] = ("torch", "serial", "cuts", "flagged")  # the simplest first
MARGIN = 0.03  # of a time: nearer to each other, predictions are not worth the risk


@dataclass(frozen=True, kw_only=True)
class MatmulPlan:
    """Holds how a matmul that depends on communication runs, and the predictions that it was chosen by. Times in µs."""

    mechanism: TensorMechanism
    pieces: tuple[Piece, ...]  # of this rank; uncut unless the mechanism is cuts
    segments: tuple[Segment, ...]  # of this rank: its rows in the order of arrival or sending
    predicted_us: Mapping[TensorMechanism, float]  # of rank 0, so that all ranks choose alike
    alone_us: float  # the matmul
    comm_us: float  # the collective by NCCL
    hiding: Hiding
    estimated: bool  # a curve was not measured
    why: str  # one sentence
    assumed: str = field(compare=False)  # what no figure of this call says


def choose_matmul(
    task: ShardedMatmul,
    rank: int,
    profile: Profile | None = None,
    *,
    flagged_factor: float | None = 1.0,
    torch_comm_us: float | None = None,
    host_us: Mapping[TensorMechanism, float] | None = None,
    margin: float = MARGIN,
    grid_rows: int | None = None,
    launch_us: float | None = None,
) -> MatmulPlan:
    """Return the simplest execution whose predicted time is within `margin` of the best; torch's is the simplest.

    The mechanism goes by the predictions of rank 0, the pieces are those of `rank`: ranks that are given the same
    curves and figures choose alike, which they must.

    Args:
        task: the matmul.
        rank: this rank.
        profile: of the machine; None: the default one, H200.
        flagged_factor: speed of the persistent matmul over that of cuBLAS, measured; None: there is none.
        torch_comm_us: the collective alone by torch's group, measured; None: by the profile's `nccl_rates`.
        host_us: what the host needs to issue a call of each mechanism: none is taken to be shorter; None: nothing.
        margin: part of its time by which an execution must be beaten to be passed over, 0 to 1.
        grid_rows: as of `cut`.
        launch_us: as of `cut`.

    Raises:
        Misconfigured: `flagged_factor` or `margin` is out of range, or `cut` raises it.
    """
    profile = profile or default_profile()
    if not 0 <= margin < 1 or (flagged_factor is not None and not 0 < flagged_factor < math.inf):
        raise Misconfigured(f"margin={margin}, flagged_factor={flagged_factor}: give 0 <= margin < 1, and a factor > 0")
    first = RowAxis.of(task, 0, profile, grid_rows, launch_us)
    comm_us = nccl_us(task, profile) if torch_comm_us is None else torch_comm_us
    one_us = first.cost_us(task.rows)
    predicted: dict[TensorMechanism, float] = {
        "torch": comm_us + one_us,
        "serial": first.end_us(first.serial_bounds),
        "cuts": first.cuts.us,
    }
    if flagged_factor is not None:
        predicted["flagged"] = first.flagged_us(one_us / flagged_factor)
    by_gpu = predicted
    predicted = {name: max(us, (host_us or {}).get(name, 0.0)) for name, us in by_gpu.items()}
    best_us = min(predicted.values())
    chosen = next(name for name in MECHANISMS if (1 - margin) * predicted.get(name, math.inf) <= best_us)
    axis = first if rank == 0 else RowAxis.of(task, rank, profile, grid_rows, launch_us)
    known, estimated = hiding_of(task, profile), any(curve.estimated for curve in task.curves)
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
        estimated=estimated,
        why=f"{chosen} is the simplest within {margin:.0%} of the best of {times} µs{host}; {known.why}",
        assumed=f"matmuls keep {first.kept:.1%} of their speed for {first.busy_us:,.0f} µs of communication, all ranks "
        f"begin together{', and the time of the matmul is estimated, not measured' if estimated else ''}",
    )


def with_best_chunks(
    task: ShardedMatmul,
    profile: Profile | None = None,
    *,
    candidates: Sequence[int] = (1, 2, 4),
    margin: float = MARGIN,
) -> ShardedMatmul:
    """Return the task with the largest chunks whose cuts, on rank 0, take within `margin` of the least time.

    Args:
        task: the matmul.
        profile: of the machine; None: the default one, H200.
        candidates: numbers of chunks of the largest shard to compare.
        margin: part of their time by which larger chunks must be beaten, 0 to 1.
    """
    block = task.batch * max(task.shard_rows)
    found = [replace(task, chunk_rows=-(-block // chunks)) for chunks in sorted(candidates)]
    times = [cut(each, 0, profile).us for each in found]
    return next(each for each, us in zip(found, times, strict=True) if (1 - margin) * us <= min(times))
