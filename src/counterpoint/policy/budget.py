"""How many SMs each side of a pair should get: the choice with the least predicted time over the launch orders.

    T(choice) = mean over orders of max(end of the GEMM with its SMs, end of the collective with its CTAs)

docs/budget.md has the equations and what they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.machine.occupancy import waves
from counterpoint.measure.metrics import overlap
from counterpoint.policy.choice import Choice
from counterpoint.policy.curves import CommPoint, Curves
from counterpoint.policy.layout import SmLayout
from counterpoint.policy.timeline import Kernel, Shares, play
from counterpoint.records.measurement import Order

__all__ = ["ORDERS", "Budget", "Calibration", "Objective", "candidates_for", "choose", "predict"]

Objective = Literal["mean", "worst"]
ORDERS: tuple[Order, ...] = ("together", "comm_first", "compute_first")
FEWER_CTAS = (16, 12, 8, 4)  # multiples of NCCL's cluster of 4, which it drops otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What only pairs can tell. The defaults are of 4 x H200 (2026-11-21); `calibrate.fit` fits them."""

    compute_loss: float = 0.05  # of the GEMM's speed, beside the collective at its full rate
    comm_loss: float = 0.09  # of the collective's speed, beside a GEMM
    gemm_wins: float = 1.0  # launched together: how often the GEMM takes the SMs first on some rank
    comm_cluster: int = 4  # blocks of plain NCCL that need one GPC: 4 on Hopper, unless a choice says otherwise
    head_start_us: float = 100.0  # of the side that goes first


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A division of SMs and what it is predicted to cost. Times in µs."""

    workload: str
    collective: str
    size_bytes: int
    choice: Choice
    compute_us: float  # T_g, alone with the SMs of this choice
    comm_us: float  # T_c, alone with the CTAs of this choice
    together_us: dict[Order, float]  # T by launch order
    objective_us: float  # the mean, or the worst, of them
    hidden: float  # mean over orders
    waves_alone: int  # of the GEMM with the most tiles, on all SMs
    waves_together: int  # on the SMs that it has beside the collective
    fits: bool  # the collective starts beside a resident GEMM
    reason: str = field(default="", compare=False)


def predict(
    curves: Curves,
    workload: str,
    collective: str,
    size_bytes: int,
    choice: Choice,
    *,
    orders: Sequence[Order] = ORDERS,
    objective: Objective = "mean",
    calibration: Calibration | None = None,
) -> Budget:
    """What one choice costs.

    Args:
        curves: of the machine.
        workload: one or more GEMMs, by name (`measure/workloads.py`).
        collective: PyTorch's name.
        size_bytes: of the full array.
        choice: the division to look at.
        orders: launch orders that count.
        objective: over these orders, `mean` or `worst`.
        calibration: what pairs have taught; None for the defaults.

    Raises:
        Misconfigured: nothing was measured at or around this point; no order; the choice leaves the GEMM no SM.
    """
    if not orders:
        raise Misconfigured(f"no launch order is given; choose from: {', '.join(ORDERS)}")
    known = calibration or Calibration()
    gemm, num_sms = curves.gemm(workload), choice.gemm_sms or curves.layout.num_sms
    kernels = gemm.kernels(num_sms)
    comm, best_us = curves.comm(collective, size_bytes, choice), curves.fastest_us(collective, size_bytes)
    shares = _shares(curves, collective, choice, comm, kernels, known, rate=min(1.0, best_us / comm.time_us))
    ends = {order: _end_us(order, kernels, comm.time_us, shares, known) for order in orders}
    alone_us, longest = gemm.time_us(curves.layout.num_sms), max(kernels, key=lambda kernel: kernel.tiles)
    beside = longest.num_sms if shares.fits else min(longest.num_sms, shares.sms_beside)
    return Budget(
        workload=workload,
        collective=collective,
        size_bytes=size_bytes,
        choice=choice,
        compute_us=gemm.time_us(num_sms),
        comm_us=comm.time_us,
        together_us=ends,
        objective_us=fmean(ends.values()) if objective == "mean" else max(ends.values()),
        hidden=fmean(_hidden(order, alone_us, best_us, end, known) for order, end in ends.items()),
        waves_alone=waves(longest.tiles, num_sms=curves.layout.num_sms, blocks_per_sm=1),
        waves_together=waves(longest.tiles, num_sms=beside, blocks_per_sm=1),
        fits=shares.fits,
    )


def choose(
    curves: Curves,
    workload: str,
    collective: str,
    size_bytes: int,
    *,
    orders: Sequence[Order] = ORDERS,
    candidates: Iterable[Choice] | None = None,
    objective: Objective = "mean",
    calibration: Calibration | None = None,
) -> Budget:
    """The candidate with the least predicted time; of equal ones the first.

    Args:
        candidates: choices to compare; None for those of `candidates_for` this machine that the curves
            cover. The others as for `predict`.

    Raises:
        Misconfigured: no candidate, or as `predict`.
    """
    untold = ""
    if candidates is None:
        every = candidates_for(curves.layout, curves.most_ctas(collective), clusters=curves.clusters(collective))
        # plain NCCL stays in any case: where even that lies off the curves, the error says what is missing
        covered = (each for each in every if curves.cover(workload, collective, size_bytes, each))
        candidates = tuple(dict.fromkeys((Choice(), *covered)))
        untold = "; nothing else could be compared, the curves cover no other division" if len(candidates) == 1 else ""

    def predicted(choice: Choice) -> Budget:
        return predict(
            curves, workload, collective, size_bytes, choice,
            orders=orders, objective=objective, calibration=calibration,
        )  # fmt: skip

    budgets = [predicted(choice) for choice in candidates]
    if not budgets:
        raise Misconfigured("no candidate is given; give at least one, such as Choice() for plain NCCL")
    best = min(budgets, key=lambda budget: budget.objective_us)
    stock = next((budget for budget in budgets if budget.choice == Choice()), None)
    return replace(best, reason=_reason(best, stock) + untold)


def candidates_for(layout: SmLayout, default_ctas: int, *, clusters: Iterable[int] = ()) -> tuple[Choice, ...]:
    """Plain NCCL and fewer CTAs, each with all SMs for the GEMM and with a GEMM that leaves exactly their SMs free.

    Beside such a GEMM NCCL's own clusters may not find room, so `clusters` (sizes) are tried there as well.
    """
    counts = [None, *(count for count in FEWER_CTAS if count < default_ctas)]
    whole = layout.gemm_cluster
    left = {count: (layout.num_sms - (count or default_ctas)) // whole * whole for count in counts}
    return (
        *(Choice(max_ctas=count) for count in counts),
        *(
            Choice(max_ctas=count, cga_cluster=cluster, gemm_sms=sms)
            for cluster in (None, *clusters)
            for count, sms in left.items()
        ),
    )


def _shares(
    curves: Curves, collective: str, choice: Choice, comm: CommPoint, kernels: Sequence[Kernel], known: Calibration,
    *, rate: float,
) -> Shares:  # fmt: skip
    """Who gets which SMs; `rate` is the collective's speed relative to its fastest."""
    layout, cluster = curves.layout, choice.cga_cluster or known.comm_cluster
    waiting = max(
        layout.waiting_ctas(gemm_sms=kernel.num_sms, num_ctas=comm.num_ctas, comm_cluster=cluster) for kernel in kernels
    )
    return Shares(
        fits=waiting == 0,
        waiting_us=_waiting_us(curves, collective, comm, replace(choice, max_ctas=waiting)),
        sms_beside=layout.gemm_sms_beside(comm.num_ctas, comm_cluster=cluster),
        compute_slowdown=1.0 / (1.0 - known.compute_loss * rate),
        comm_slowdown=1.0 / (1.0 - known.comm_loss),
    )


def _waiting_us(curves: Curves, collective: str, comm: CommPoint, part: Choice) -> float:
    """What is left for the CTAs that wait: their share of the bytes, at the rate of that many alone.

    Channels do not need each other; off the curves nobody knows that rate, and everything is left.
    """
    if part.max_ctas in (0, comm.num_ctas) or not curves.cover_comm(collective, comm.size_bytes, part):
        return comm.time_us
    waiting = curves.comm(collective, comm.size_bytes, part)
    return min(comm.time_us, waiting.time_us * waiting.num_ctas / comm.num_ctas)


def _end_us(order: Order, kernels: Sequence[Kernel], comm_us: float, shares: Shares, known: Calibration) -> float:
    """T in one launch order."""

    def end(*, compute_at_us: float = 0.0, comm_at_us: float = 0.0, comm_first: bool) -> float:
        return play(
            kernels, comm_us,
            compute_at_us=compute_at_us, comm_at_us=comm_at_us, comm_first=comm_first, shares=shares,
        )  # fmt: skip

    match order:
        case "comm_first":
            return end(compute_at_us=known.head_start_us, comm_first=True)
        case "compute_first":
            return end(comm_at_us=known.head_start_us, comm_first=False)
        case "together":  # the slowest rank decides, so one on which the GEMM was faster is enough
            return known.gemm_wins * end(comm_first=False) + (1.0 - known.gemm_wins) * end(comm_first=True)


def _hidden(order: Order, compute_us: float, comm_us: float, both_us: float, known: Calibration) -> float:
    head_us = 0.0 if order == "together" else known.head_start_us
    return overlap(compute_us=compute_us, comm_us=comm_us, both_us=both_us, order=order, head_us=head_us).hidden


def _reason(best: Budget, stock: Budget | None) -> str:
    """One sentence: how the two share, and what that wins over plain NCCL if that was a candidate."""
    clusters = f" in clusters of {best.choice.cga_cluster}" if best.choice.cga_cluster else ""
    sides = f"{best.choice.max_ctas or 'NCCL’s own'} CTAs{clusters} beside {best.choice.gemm_sms or 'all'} SMs"
    how = "the collective starts beside the GEMM" if best.fits else "the collective waits where a GEMM came first"
    steps = f"the GEMM takes {best.waves_together} waves instead of {best.waves_alone}"
    if best.waves_together == best.waves_alone:
        steps = f"the GEMM keeps its {best.waves_alone} waves"
    said = f"{sides}: {how}, {steps}, {best.objective_us:,.0f} µs"
    if stock is None or stock.choice == best.choice:
        return said
    return f"{said}, {1.0 - best.objective_us / stock.objective_us:.0%} less time than plain NCCL"
