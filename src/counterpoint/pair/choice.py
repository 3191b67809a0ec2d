"""Choose how many SMs a GEMM and a concurrent collective get, by the least predicted time of both together.

`choose_split`      NCCL beside GEMMs: limits for both sides, over the launch orders
                    T(split) = mean over orders of max(end of the GEMM, end of the collective)
`choose_gemm_sms`   a zero-SM reduction beside GEMMs: SMs that the GEMM leaves free add up what has arrived at once,
                    and the GEMM takes more waves without them

docs/design/pair.md has the equations and what they leave out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from msgspec import structs

from counterpoint.errors import Misconfigured
from counterpoint.machine.occupancy import waves
from counterpoint.machine.profile import Contention, Profile, default_profile
from counterpoint.pair.curves import CommPoint, Curves
from counterpoint.pair.sm_split import SmLayout, SmSplit
from counterpoint.pair.together import REDUCTIONS, Pair, overlap, play_order, reduced_us, sm_shares
from counterpoint.records.measurement import Order

Objective = Literal["mean", "worst"]
ORDERS: tuple[Order, ...] = ("together", "comm_first", "compute_first")
FEWER_CTAS = (16, 12, 8, 4)  # multiples of NCCL's cluster of 4, which it drops otherwise
FREE_SMS = (0, 4, 8, 12, 16)  # SMs that a GEMM may leave free; cuBLAS' blocks come in pairs, and a GPC has 16 or 18


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Holds a division of SMs between GEMM and collective, and the times in µs predicted for that division."""

    split: SmSplit  # the division
    compute_us: float  # µs of the GEMM alone with the SMs of this split
    comm_us: float  # µs of the collective alone with the CTAs of this split
    together_us: dict[Order, float]  # µs of both together, by launch order
    objective_us: float  # the mean, or the worst, of `together_us`
    hidden: float  # mean over orders; pair/together.py defines it
    waves_alone: int  # waves of the GEMM with the most tiles, on all SMs
    waves_together: int  # waves of the same GEMM on the SMs that are left beside the collective
    fits: bool  # whether the collective starts beside a resident GEMM
    reason: str = field(default="", compare=False)  # why this division, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSms:
    """Holds the best number of SMs for a GEMM (None: all), and the predicted µs with its reduction for each number."""

    gemm_sms: int | None
    together_us: dict[int, float]


def choose_gemm_sms(pair: Pair, profile: Profile) -> GemmSms:
    """Return how many SMs a GEMM should use so that it and a zero-SM reduction end soonest; on ties the most."""
    if pair.collective not in REDUCTIONS:
        raise Misconfigured(f"{pair.collective} adds up nothing; allowed are {', '.join(REDUCTIONS)}")
    if min(pair.size_bytes, pair.compute_us, pair.comm_us, pair.world_size - 1) <= 0:
        raise Misconfigured(
            f"{pair.size_bytes} bytes, {pair.compute_us} and {pair.comm_us} µs, {pair.world_size} ranks: "
            "give positive sizes and times, and two ranks or more"
        )
    num_sms = pair.layout.num_sms
    candidates = [num_sms - free for free in FREE_SMS if free < num_sms] if pair.products else [num_sms]
    found = {sms: reduced_us(pair, sms, profile) for sms in candidates}
    best = min(found, key=found.__getitem__)
    return GemmSms(gemm_sms=None if best == num_sms else best, together_us=found)


def predict(
    curves: Curves,
    workload: str,
    collective: str,
    size_bytes: int,
    split: SmSplit,
    *,
    orders: Sequence[Order] = ORDERS,
    objective: Objective = "mean",
    contention: Contention | None = None,
) -> Budget:
    """Return the predicted times of a GEMM and a collective under one division of the SMs.

    `curves` have the measured times of both sides alone, `workload` is a name in them, and `size_bytes` is of the full
    array. The objective is the `mean` or the `worst` over the launch orders that count. `contention` None: the default
    profile's, H200.

    Raises:
        Misconfigured: nothing was measured at or around this point; no order; the split leaves the GEMM no SM.
    """
    if not orders:
        raise Misconfigured(f"no launch order is given; choose from: {', '.join(ORDERS)}")
    known = contention or default_profile().contention
    gemm, num_sms = curves.gemm(workload), split.gemm_sms or curves.layout.num_sms
    kernels = gemm.kernels(num_sms)
    comm, best_us = curves.comm(collective, size_bytes, split), curves.fastest_us(collective, size_bytes)
    rate = min(1.0, best_us / comm.time_us)
    here = structs.replace(
        known, comm_cluster=split.cga_cluster or known.comm_cluster, compute_loss=known.compute_loss * rate
    )
    shares = sm_shares(kernels, comm.num_ctas, curves.layout, here)
    left_us = _waiting_us(curves, collective, comm, replace(split, max_ctas=shares.waiting_ctas))
    ends = {
        order: play_order(order, kernels, comm.time_us, replace(shares, waiting_us=left_us), known) for order in orders
    }
    alone_us, longest = gemm.time_us(curves.layout.num_sms), max(kernels, key=lambda kernel: kernel.tiles)
    beside = longest.num_sms if shares.fits else min(longest.num_sms, shares.sms_beside)
    return Budget(
        split=split,
        compute_us=gemm.time_us(num_sms),
        comm_us=comm.time_us,
        together_us=ends,
        objective_us=fmean(ends.values()) if objective == "mean" else max(ends.values()),
        hidden=fmean(_hidden(order, alone_us, best_us, end, known) for order, end in ends.items()),
        waves_alone=waves(longest.tiles, num_sms=curves.layout.num_sms, blocks_per_sm=1),
        waves_together=waves(longest.tiles, num_sms=beside, blocks_per_sm=1),
        fits=shares.fits,
    )


def choose_split(
    curves: Curves,
    workload: str,
    collective: str,
    size_bytes: int,
    *,
    orders: Sequence[Order] = ORDERS,
    candidates: Iterable[SmSplit] | None = None,
    objective: Objective = "mean",
    contention: Contention | None = None,
) -> Budget:
    """Return the division of SMs with the least predicted time of GEMM and collective together; on a tie the first.

    The arguments are as in `predict`; `candidates` are the splits to compare, None: all from `candidates_for` for this
    machine that the curves cover.

    Raises:
        Misconfigured: there is no candidate, or `predict` raises it.
    """
    alone = ""
    if candidates is None:
        every = candidates_for(curves.layout, curves.most_ctas(collective), clusters=curves.clusters(collective))
        # plain NCCL stays in any case: where even that lies off the curves, the error says what is missing
        covered = (each for each in every if curves.cover(workload, collective, size_bytes, each))
        candidates = tuple(dict.fromkeys((SmSplit(), *covered)))
        alone = "; nothing else could be compared, the curves cover no other division" if len(candidates) == 1 else ""
    budgets = [
        predict(
            curves, workload, collective, size_bytes, split,
            orders=orders, objective=objective, contention=contention,
        )
        for split in candidates
    ]  # fmt: skip
    if not budgets:
        raise Misconfigured("no candidate is given; give at least one, such as SmSplit() for plain NCCL")
    best = min(budgets, key=lambda budget: budget.objective_us)
    stock = next((budget for budget in budgets if budget.split == SmSplit()), None)
    return replace(best, reason=_reason(best, stock) + alone)


def candidates_for(layout: SmLayout, default_ctas: int, *, clusters: Iterable[int] = ()) -> tuple[SmSplit, ...]:
    """Return divisions to try: NCCL with default or fewer CTAs, beside a GEMM on all SMs or on the SMs left over."""
    counts = [None, *(count for count in FEWER_CTAS if count < default_ctas)]
    whole = layout.gemm_cluster
    left = {count: (layout.num_sms - (count or default_ctas)) // whole * whole for count in counts}
    return (
        *(SmSplit(max_ctas=count) for count in counts),
        *(
            SmSplit(max_ctas=count, cga_cluster=cluster, gemm_sms=sms)
            for cluster in (None, *clusters)  # beside such a GEMM NCCL's own clusters may not find room
            for count, sms in left.items()
        ),
    )


def _waiting_us(curves: Curves, collective: str, comm: CommPoint, part: SmSplit) -> float:
    """Return the µs that CTAs which waited for the GEMM need, once started, for their share of the bytes.

    NCCL's channels work independently. Where the curves lack their rate, this is the time of the whole collective.
    """
    if part.max_ctas in (0, comm.num_ctas) or not curves.cover_comm(collective, comm.size_bytes, part):
        return comm.time_us
    waiting = curves.comm(collective, comm.size_bytes, part)
    return min(comm.time_us, waiting.time_us * waiting.num_ctas / comm.num_ctas)


def _hidden(order: Order, compute_us: float, comm_us: float, both_us: float, known: Contention) -> float:
    head_us = 0.0 if order == "together" else known.head_start_us
    return overlap(compute_us=compute_us, comm_us=comm_us, both_us=both_us, order=order, head_us=head_us).hidden


def _reason(best: Budget, stock: Budget | None) -> str:
    """Return a sentence on how `best` divides the SMs, and what it saves over plain NCCL (`stock`), if tried."""
    clusters = f" in clusters of {best.split.cga_cluster}" if best.split.cga_cluster else ""
    sides = f"{best.split.max_ctas or 'NCCL’s own'} CTAs{clusters} beside {best.split.gemm_sms or 'all'} SMs"
    how = "the collective starts beside the GEMM" if best.fits else "the collective waits where a GEMM came first"
    steps = f"the GEMM takes {best.waves_together} waves instead of {best.waves_alone}"
    if best.waves_together == best.waves_alone:
        steps = f"the GEMM keeps its {best.waves_alone} waves"
    said = f"{sides}: {how}, {steps}, {best.objective_us:,.0f} µs"
    if stock is None or stock.split == best.split:
        return said
    return f"{said}, {1.0 - best.objective_us / stock.objective_us:.0%} less time than plain NCCL"
