"""Predict how long GEMMs and a collective take together, by one of three models, which need different figures.

    kept    the speeds that both keep beside each other, and how often the collective waits: figures of a mechanism,
            means over launch orders; needs no shapes
    waves   tiles, SMs and clusters: NCCL beside GEMMs, in a given launch order (`play`)
    sums    copies that need no SM, then sums that do: zero-SM reductions beside GEMMs (`reduced_us`)

g is compute alone, c communication alone. While both run, compute keeps `compute_kept` of its speed and communication
`comm_kept`; the longer one then goes on alone. All three build on this rule:

    side by side     c / comm_kept <= g / compute_kept:  T = g + (1 - compute_kept) · c / comm_kept
                     otherwise                           T = c + (1 - comm_kept) · g / compute_kept

`together_us` takes the model with the least error on measured pairs of that kind: results/pair-models.md.

What overlap is worth, for T measured or predicted, is `hidden`, the share of the shorter side's time that it saves:

    serial = g + c + h              h: the head start of the side that goes first; the other side waits that long
    ideal  = max(g', c')            g' = g, plus h if compute waits; c' = c, plus h if the collective waits
    hidden = (serial - T) / min(g', c')                     1 perfect, 0 as slow as one after the other, below 0 worse
    ideal_fraction = (serial / T - 1) / (serial / ideal - 1) = hidden * ideal / T     ConCCL's "% of ideal" (2412.14335)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.occupancy import tiles_of, waves
from counterpoint.machine.profile import Contention, Disturbance, Profile, SumRates
from counterpoint.pair.sm_split import SmLayout
from counterpoint.records.measurement import Order, PairClass

Model = Literal["kept", "waves", "sums"]
Product = tuple[int, int, int]
"""M, N and K of a matrix product."""
REDUCTIONS = ("all_reduce", "reduce_scatter")
CLASS_BORDER = 1.15  # a side that takes this many times as long as the other makes the pair `G-long` or `C-long`
NEED_SMS = ("nccl", "nccl_zero_cta")  # the second copies without SMs, but the kernel that starts it needs one
FIRST_CHUNK = 7 / 8  # share of a large shard in its first chunk, as `collectives/program/tuning.py` cuts it
_BY_DEFINITION = {
    "ideal": Disturbance(compute_kept=1.0, comm_kept=1.0, hidden={}, copies=False, source="by definition"),
    "serial": Disturbance(compute_kept=0.0, comm_kept=1.0, hidden={}, source="by definition"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Describes GEMMs that run one after the other, and a collective that runs at the same time, with times in µs."""

    products: tuple[Product, ...]  # the GEMMs; () where the computation is something else
    compute_us: float  # the GEMMs alone, on all SMs
    collective: str  # PyTorch's name
    size_bytes: int  # of the full array
    comm_us: float  # the collective alone
    mechanism: str  # how the collective moves its bytes: a name in `Profile.mechanisms`
    num_ctas: int  # CTAs of the collective, one SM each; 0 for copy engines
    world_size: int  # ranks
    layout: SmLayout  # SMs of the GPU
    order: Order = "together"  # whether GEMMs or collective are launched first


def together_us(pair: Pair, profile: Profile, model: Model | None = None, *, gemm_sms: int | None = None) -> float:
    """Return the µs from the first launch until GEMMs and collective have ended, by `model` (None: `model_for`).

    `gemm_sms` is the number of SMs that GEMMs may use beside a zero-SM reduction; only the model `sums` uses it.
    """
    model = model or model_for(pair)
    if model == "waves":
        return _played_us(pair, profile)
    head_us = 0.0 if pair.order == "together" else profile.contention.head_start_us
    compute_us = max(0.0, pair.compute_us - (head_us if pair.order == "compute_first" else 0.0))
    comm_us = max(0.0, pair.comm_us - (head_us if pair.order == "comm_first" else 0.0))
    if not compute_us or not comm_us:
        return head_us + compute_us + comm_us
    if model == "kept":
        kept = disturbance(pair.mechanism, profile)
        comms = ((pair.collective, comm_us),)
        return head_us + kept_us(compute_us, comms, kept, persistent=profile.efficiency.persistent)
    rest = replace(pair, compute_us=compute_us, comm_us=comm_us)
    return head_us + reduced_us(rest, gemm_sms or pair.layout.num_sms, profile)


def model_for(pair: Pair) -> Model:
    """Return the name of the model with the least error on measured pairs of this kind (results/pair-models.md)."""
    if pair.products and pair.mechanism in NEED_SMS:
        return "waves"
    return "sums" if pair.mechanism == "zero_sm" and pair.collective in REDUCTIONS else "kept"


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapRatios:
    """Holds how much one pair gains from overlap, measured or predicted, by the equations of this module."""

    serial_us: float
    ideal_us: float
    hidden: float
    ideal_fraction: float


def overlap(*, compute_us: float, comm_us: float, both_us: float, order: Order, head_us: float) -> OverlapRatios:
    """Return how much compute and a collective that take `both_us` together gain from overlap.

    In this module's equations g is `compute_us`, c `comm_us`, T `both_us` and h `head_us`.
    """
    waiting_compute = compute_us + (head_us if order == "comm_first" else 0.0)
    waiting_comm = comm_us + (head_us if order == "compute_first" else 0.0)
    serial = compute_us + comm_us + (head_us if order != "together" else 0.0)
    ideal = max(waiting_compute, waiting_comm)
    hidden = (serial - both_us) / min(waiting_compute, waiting_comm)
    return OverlapRatios(serial_us=serial, ideal_us=ideal, hidden=hidden, ideal_fraction=hidden * ideal / both_us)


def pair_class(compute_us: float, comm_us: float) -> PairClass:
    """Return `G-long` or `C-long` if compute or the collective, alone, takes over 15 % longer, else `GC-equal`."""
    if compute_us > CLASS_BORDER * comm_us:
        return "G-long"
    return "C-long" if comm_us > CLASS_BORDER * compute_us else "GC-equal"


# kept: no shapes


def disturbance(mechanism: str, profile: Profile) -> Disturbance:
    """Return how much compute and collectives by a mechanism slow each other down; raise Misconfigured if unknown."""
    known = {**profile.mechanisms, **_BY_DEFINITION}
    if mechanism not in known:
        raise Misconfigured(f"mechanism = {printable(mechanism)!r}: known are {', '.join(known)}; give one of them")
    return known[mechanism]


def kept_us(compute_us: float, comms: Sequence[tuple[str, float]], kept: Disturbance, *, persistent: bool) -> float:
    """Return the µs until compute and a sequence of collectives that runs beside compute have both ended.

        behind      T = g + c             a persistent GEMM has all SMs, the collective waits for its end
        together    T = (1 - held) · side by side + held · behind                            never more than g + c

    `held`, the share of collectives that wait, follows from the mean `hidden` = (g + c - T) / min(g, c) that was
    measured over launch orders: held = 1 - hidden / hidden of side by side. It is 0 where GEMMs are not persistent:
    before Hopper their blocks come and go with every wave, and a collective gets in.

    `comms` are the collectives by PyTorch's name, each with its µs alone; `persistent` says whether GEMMs hold their
    SMs to their end (Hopper and later).
    """
    comm_us = sum(us for _, us in comms)
    serial = compute_us + comm_us
    if not comm_us or not compute_us or not kept.compute_kept:
        return serial
    beside = side_by_side_us(compute_us, comm_us, kept.compute_kept, kept.comm_kept)
    held = sum(us * kept.held(operation) for operation, us in comms) / comm_us if persistent else 0.0
    return min((1.0 - held) * beside + held * serial, serial)


def side_by_side_us(compute_us: float, comm_us: float, compute_kept: float, comm_kept: float) -> float:
    """Return the µs until compute and collective end: both start at once, slowed to these fractions, and never wait."""
    slow_g, slow_c = compute_us / compute_kept, comm_us / comm_kept
    if slow_c <= slow_g:
        return compute_us + (1.0 - compute_kept) * slow_c
    return comm_us + (1.0 - comm_kept) * slow_g


# waves: NCCL, which needs SMs


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmKernel:
    """Describes one GEMM alone: `num_sms` resident blocks take its `tiles` one after another, in `time_us`."""

    tiles: int
    num_sms: int
    time_us: float

    @property
    def tile_us(self) -> float:
        """Return the µs of one tile, equal to the µs of one wave."""
        return self.time_us / _rounds(self.tiles, self.num_sms)


@dataclass(frozen=True, kw_only=True, slots=True)
class SmShares:
    """Says how many SMs GEMM and collective get while both run, and by what factor each slows down."""

    waiting_ctas: int  # CTAs of the collective that find no SM beside a resident kernel
    sms_beside: int  # SMs that a kernel can use while the collective is resident
    waiting_us: float = math.inf  # time that waiting CTAs need once they start; at most the collective's
    compute_slowdown: float = 1.0  # factor on a kernel's time at equal SMs, by memory bandwidth and power
    comm_slowdown: float = 1.0  # factor on the collective's time

    @property
    def fits(self) -> bool:
        """Return whether all CTAs of the collective can start beside a resident GEMM."""
        return not self.waiting_ctas


def play(
    kernels: Sequence[GemmKernel],
    comm_us: float,
    *,
    compute_at_us: float,
    comm_at_us: float,
    comm_first: bool,
    shares: SmShares,
) -> float:
    """Return the µs at which kernels and collective have ended, simulated kernel by kernel and wave by wave.

    CTAs of a collective that find no SMs start when the kernel that holds them ends. While the collective is resident,
    a kernel whose blocks do not all fit works through its tiles on the SMs left; its other blocks join when the
    collective ends.

    The kernels, in stream order, may start at `compute_at_us`, the collective at `comm_at_us`. With `comm_first` it
    takes its SMs before the first kernel; otherwise a kernel that leaves none delays it.
    """
    now, left_us = compute_at_us, comm_us - max(0.0, compute_at_us - comm_at_us)
    resident = shares.fits or comm_first
    for index, kernel in enumerate(kernels):
        resident = resident or (index > 0 and comm_at_us <= now)  # the collective gets in between two kernels
        if not resident or left_us <= 0.0:
            now += kernel.time_us
            if not resident and comm_at_us < now:
                left_us = min(left_us, shares.waiting_us)
            continue
        alone_us, busy_us = kernel.time_us, left_us * shares.comm_slowdown
        if not shares.fits:
            sms = min(kernel.num_sms, shares.sms_beside)
            late_sms = kernel.num_sms - sms
            alone_us = finish_us(kernel.tiles, kernel.tile_us, sms=sms, late_sms=late_sms, late_us=busy_us)
        before_us = max(0.0, comm_at_us - now)
        shared_us = min(max(0.0, alone_us - before_us) * shares.compute_slowdown, busy_us)
        now += alone_us + shared_us * (1.0 - 1.0 / shares.compute_slowdown)
        left_us -= shared_us / shares.comm_slowdown
    return max(now, max(now, comm_at_us) + left_us)


def play_order(
    order: Order, kernels: Sequence[GemmKernel], comm_us: float, shares: SmShares, contention: Contention
) -> float:
    """Return the µs at which kernels and collective have ended in one launch order, with `contention`'s head start."""
    head_us = contention.head_start_us
    if order == "comm_first":
        return play(kernels, comm_us, compute_at_us=head_us, comm_at_us=0.0, comm_first=True, shares=shares)
    comm_at_us = head_us if order == "compute_first" else 0.0
    behind = play(kernels, comm_us, compute_at_us=0.0, comm_at_us=comm_at_us, comm_first=False, shares=shares)
    if order == "compute_first":
        return behind
    # the slowest rank decides, so one on which the GEMM was faster is enough
    before = play(kernels, comm_us, compute_at_us=0.0, comm_at_us=0.0, comm_first=True, shares=shares)
    return contention.gemm_wins * behind + (1.0 - contention.gemm_wins) * before


def finish_us(tiles: int, tile_us: float, *, sms: int, late_sms: int, late_us: float) -> float:
    """Return the µs at which `tiles` are done on `sms` SMs from 0 on and `late_sms` more from `late_us` on.

    It is the least x of {k t, late + k t} with sms * floor(x / t) + late_sms * floor((x - late) / t) >= tiles.
    """
    if late_sms <= 0:
        return tile_us * _rounds(tiles, sms)
    early_waves = late_waves = 0
    end = 0.0
    while sms * early_waves + late_sms * late_waves < tiles:
        early, late = (early_waves + 1) * tile_us, late_us + (late_waves + 1) * tile_us
        end = min(early, late)
        early_waves += early <= late
        late_waves += late <= early
    return end


def steps_of(products: Sequence[Product], num_sms: int, tile: tuple[int, int]) -> list[int]:
    """Return for each GEMM K times the tiles of its busiest SM: the GEMM's time is proportional to this."""
    return [k * _rounds(tiles_of(m, n, tile), num_sms) for m, n, k in products]


def gemm_kernels(
    products: Sequence[Product], time_us: float, num_sms: int, tile: tuple[int, int]
) -> tuple[GemmKernel, ...]:
    """Return a kernel for each GEMM; the GEMMs share `time_us` in proportion to K times their waves."""
    steps = steps_of(products, num_sms, tile)
    tiles = [tiles_of(m, n, tile) for m, n, _ in products]
    return tuple(
        GemmKernel(tiles=count, num_sms=min(num_sms, count), time_us=time_us * each / sum(steps))
        for count, each in zip(tiles, steps, strict=True)
    )


def sm_shares(kernels: Sequence[GemmKernel], num_ctas: int, layout: SmLayout, known: Contention) -> SmShares:
    """Return how many SMs GEMM kernels and a collective get while both run, and how much each slows down."""
    cluster = known.comm_cluster
    waiting = (layout.waiting_ctas(gemm_sms=one.num_sms, num_ctas=num_ctas, comm_cluster=cluster) for one in kernels)
    return SmShares(
        waiting_ctas=max(waiting),
        sms_beside=layout.gemm_sms_beside(num_ctas, comm_cluster=cluster),
        compute_slowdown=1.0 / (1.0 - known.compute_loss),
        comm_slowdown=1.0 / (1.0 - known.comm_loss),
    )


def _played_us(pair: Pair, profile: Profile) -> float:
    if not pair.products or pair.mechanism not in NEED_SMS:
        what = f"{pair.mechanism} beside {len(pair.products)} GEMMs"
        raise Misconfigured(f"model 'waves' of {what}: it is about {' and '.join(NEED_SMS)} beside GEMMs; take 'kept'")
    kernels = gemm_kernels(pair.products, pair.compute_us, pair.layout.num_sms, profile.chip.matmul_tile)
    shares = sm_shares(kernels, max(1, pair.num_ctas), pair.layout, profile.contention)
    return play_order(pair.order, kernels, pair.comm_us, shares, profile.contention)


def _rounds(tiles: int, num_sms: int) -> int:
    return waves(tiles, num_sms=num_sms, blocks_per_sm=1)


# sums: copies need no SM, what adds up their bytes does


def reduced_us(pair: Pair, gemm_sms: int, profile: Profile) -> float:
    """Return the µs at which a zero-SM reduction and GEMMs on `gemm_sms` SMs, launched together, have ended.

        GEMM        T_g(n) = T_g * sum of K * ceil(tiles / n) / sum of K * ceil(tiles / S), slower by the contention
                    while the other side runs
        chunk 1     7/8 of the shard, copied after 7/8 of the time of the copies; then the rest
        sum         (world + 1) * shard bytes of memory: at the rate of each free SM, and of the memory when the GEMM
                    has ended; with no SM left free, between two GEMMs or after the last
        all_reduce  after the sums its all_gather, half of its time alone

    Raises:
        Misconfigured: the collective adds up nothing.
    """
    if pair.collective not in REDUCTIONS:
        raise Misconfigured(f"{pair.collective} adds up nothing; allowed are {', '.join(REDUCTIONS)}")
    sums, num_sms = profile.sums, pair.layout.num_sms
    whole, steps = (steps_of(pair.products, sms, profile.chip.matmul_tile) for sms in (num_sms, gemm_sms))
    ends = list(accumulate(pair.compute_us * each / sum(whole) for each in steps)) or [pair.compute_us]
    slower = 1 + sums.contention * min(pair.comm_us, ends[-1]) / ends[-1]
    ends = [end * slower for end in ends]
    moved = (pair.world_size + 1) * pair.size_bytes / pair.world_size
    brought = pair.comm_us if pair.collective == "reduce_scatter" else pair.comm_us / 2
    after = pair.comm_us - brought  # µs of the all_gather that follows the sums
    first = _summed_us(FIRST_CHUNK * brought, 0.0, FIRST_CHUNK * moved, ends, num_sms - gemm_sms, sums)
    last = _summed_us(brought, first, (1 - FIRST_CHUNK) * moved, ends, num_sms - gemm_sms, sums)
    comm_end = max(first + FIRST_CHUNK * after, last) + (1 - FIRST_CHUNK) * after
    between = gemm_sms == num_sms and last < ends[-1]  # the sums ran in between, and the GEMMs waited for them
    return max(ends[-1] + (moved / sums.memory_gb_per_s / 1000 if between else 0.0), comm_end)


def _summed_us(
    there_us: float, after_us: float, moved: float, ends: Sequence[float], free_sms: int, sums: SumRates
) -> float:
    """Return when a sum of `moved` bytes ends that waits for its data (`there_us`) and an earlier sum (`after_us`)."""
    fast, slow = sums.memory_gb_per_s * 1000, free_sms * sums.sm_gb_per_s * 1000  # bytes per µs
    if not free_sms:
        begins = next((end for end in ends if end >= there_us), there_us)
        return max(begins, after_us) + moved / fast
    begins = max(there_us, after_us)
    beside = min(moved, max(0.0, ends[-1] - begins) * slow)
    return begins + beside / slow + (moved - beside) / fast
