"""Choose how tokens travel to their experts and back, by the predicted time of each mechanism. No torch.

    torch   counts, a wait of the host, and NCCL's all_to_all with exact sizes, both ways
    gather  copy engines bring the tokens of all ranks; weighted sums of the local experts are reduced and scattered
    slabs   copy engines move a fixed number of rows to each rank, however many are wanted: for graphs

A time covers a dispatch, a combine and what is computed beside them. With n ranks, T tokens per rank and k experts per
token, a GPU receives and sends, in the dispatch and again in the combine:

    torch   T k (n - 1) / n rows, more on the rank whose experts are wanted most
    slabs   as many times the capacity factor, in as many rounds as that rank needs
    gather  T (n - 1) rows, however they are routed

So gather moves less where k > n. Elsewhere, with nothing to hide behind, torch is left with the exchange, against the
prediction: on 2 H200 Mixtral's layer (k = n = 2) took 11.4 ms by torch, 12.0 by gather (2026-11-23).
Transport hides behind compute as the profile says of its mechanism; kernels that select, permute and add up rows do not
hide at all, which is on the safe side. Not modelled: a host that is behind, late ranks, several
hosts. A token that goes to two experts of one rank counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile, default_profile
from counterpoint.pair.arrivals import COPY_ENGINES
from counterpoint.pair.together import disturbance, kept_us

ExchangeMechanism = Literal["torch", "gather", "slabs"]
EXCHANGE_MECHANISMS: tuple[ExchangeMechanism, ...] = ("torch", "gather", "slabs")  # the simplest first
CAPTURED: tuple[ExchangeMechanism, ...] = ("gather", "slabs")  # no host takes part: these can be recorded in a graph
MARGIN = 0.10  # predictions that differ by a smaller share of the time added to compute count as equal
FIXED = 0.7  # an exchange is left to torch if more than this share of its time would pass without any token
_NCCL = "nccl"  # the mechanism of a profile that needs SMs


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertExchange:
    """Describes the token exchange of an MoE layer: each of a rank's `tokens` tokens goes to `top_k` of all experts."""

    ranks: int
    top_k: int
    experts: int  # number of experts on all ranks
    tokens: int  # most tokens of a rank
    hidden: int
    element_bytes: int = 2  # bytes of an element as sent
    beside_us: float = 0.0  # µs of the compute beside dispatch and combine, alone; 0: no compute
    imbalance: float = 1.0  # rows of the rank with the most, over the mean
    capacity_factor: float = 1.25  # with slabs: rows reserved for a rank, over the mean
    captured: bool = False  # the exchange is recorded in a CUDA graph

    def __post_init__(self) -> None:
        sizes = (self.top_k, self.experts, self.hidden, self.element_bytes)
        if self.ranks < 2 or min(sizes) < 1 or self.tokens < 0:
            raise Misconfigured(f"{self}: give 2 ranks or more, 0 tokens or more, and 1 or more of everything else")
        if self.top_k > self.experts:
            raise Misconfigured(f"top_k={self.top_k} of {self.experts} experts: give at most as many")
        if not (0 <= self.beside_us < math.inf and 1 <= self.imbalance <= self.ranks and self.capacity_factor > 0):
            given = f"beside_us={self.beside_us}, imbalance={self.imbalance}, capacity_factor={self.capacity_factor}"
            raise Misconfigured(f"{given}: give 0 µs or more, 1 to {self.ranks} (the ranks), and a factor above 0")

    @property
    def row_bytes(self) -> int:
        """Return the size in bytes of a token as sent between ranks."""
        return self.hidden * self.element_bytes

    @property
    def mean_rows(self) -> int:
        """Return how many rows the experts of a rank get on average over ranks."""
        return self.tokens * self.top_k

    @property
    def most_rows(self) -> float:
        """Return how many rows the experts get on the rank that gets most."""
        return self.mean_rows * self.imbalance


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """Holds the mechanism chosen for an exchange, and the predicted µs by which it was chosen."""

    mechanism: ExchangeMechanism
    predicted_us: Mapping[ExchangeMechanism, float]  # µs of dispatch, combine and compute beside, by mechanism
    why: str  # one sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Holds a mechanism's µs without other work: of kernels, and of collectives by PyTorch's names."""

    kernels_us: float
    comms: tuple[tuple[str, float], ...]

    @property
    def alone_us(self) -> float:
        """Return the µs of kernels and collectives, one after the other."""
        return self.kernels_us + sum(us for _, us in self.comms)


def choose_expert(
    task: ExpertExchange,
    profile: Profile | None = None,
    *,
    offered: Sequence[ExchangeMechanism] | None = None,
    host_us: Mapping[ExchangeMechanism, float] | None = None,
) -> ExpertPlan:
    """Return the simplest mechanism (torch's is simplest) whose exposed time is within `MARGIN` of the least.

    Another mechanism than torch's is chosen only if it adds less than torch's by `MARGIN`. Two kinds of exchange are
    left to torch: of few tokens, as in decoding, where over 70 % of the other mechanism's time would pass without any
    token; and without compute beside them, in which that mechanism moves no fewer bytes (`top_k <= ranks`). Ranks that
    give the same figures choose alike, which they must.

    `profile` None: the default one, H200; `offered` None: all mechanisms, or `CAPTURED` in a graph. `host_us` has the
    µs of the host to issue a dispatch and a combine by each mechanism, a lower limit of the predicted time.

    Raises:
        Misconfigured: nothing that is offered can be recorded in a graph, or nothing is offered.
    """
    profile = profile or default_profile()
    able = CAPTURED if task.captured else EXCHANGE_MECHANISMS
    wanted = able if offered is None else offered
    allowed = [name for name in able if name in wanted]
    if not allowed:
        raise Misconfigured(f"offered={', '.join(wanted) or 'nothing'}: give at least one of {', '.join(able)}")
    host_us = host_us or {}
    predicted = {name: max(predicted_us(task, name, profile), host_us.get(name, 0.0)) for name in EXCHANGE_MECHANISMS}
    added = {name: predicted[name] - task.beside_us for name in allowed}
    best_us, most_us = min(added.values()), (1 - MARGIN) * added.get("torch", math.inf)
    near = [name for name in allowed if (1 - MARGIN) * added[name] <= best_us]
    chosen = next(name for name in near if name == "torch" or added[name] <= most_us)
    times = ", ".join(f"{name} {us:,.0f}" for name, us in added.items())
    beside = f" on top of {task.beside_us:,.0f} µs of compute" if task.beside_us else ""
    why = f"{chosen} is the simplest within {MARGIN:.0%} of the best of {times} µs{beside}"
    left = _why_left(task, chosen, profile) if chosen != "torch" and "torch" in allowed else None
    if left is not None:
        chosen, why = "torch", left
    return ExpertPlan(mechanism=chosen, predicted_us=predicted, why=why)


def _why_left(task: ExpertExchange, chosen: ExchangeMechanism, profile: Profile) -> str | None:
    """Return why torch should run an exchange although `chosen` is predicted to be faster; None if it should not."""
    if not task.beside_us and task.top_k <= task.ranks:
        return f"with top_k={task.top_k} on {task.ranks} ranks and nothing beside it none of ours was measured to win"
    alone = replace(task, beside_us=0.0)
    alone_us, empty_us = (predicted_us(each, chosen, profile) for each in (alone, replace(alone, tokens=0)))
    if empty_us <= FIXED * alone_us:
        return None
    few = f"{task.tokens:,} tokens are too few for {chosen}"
    return f"{few}: {empty_us:,.0f} of its {alone_us:,.0f} µs would pass without any"


def predicted_us(task: ExpertExchange, mechanism: ExchangeMechanism, profile: Profile | None = None) -> float:
    """Return the µs of a dispatch, a combine and the compute beside them, by one mechanism."""
    profile = profile or default_profile()
    parts = _PARTS[mechanism](task, profile)
    kept = disturbance(_NCCL if mechanism == "torch" else COPY_ENGINES, profile)
    persistent = profile.efficiency.persistent
    if not task.beside_us:
        return parts.alone_us
    return parts.kernels_us + kept_us(task.beside_us, parts.comms, kept, persistent=persistent)


def _torch(task: ExpertExchange, profile: Profile) -> _Parts:
    """Return the times by NCCL: to send the counts, to wait for the counts on the host, and to send rows both ways."""
    rates = profile.nccl_rates
    crossing = task.most_rows * task.row_bytes * (task.ranks - 1) / task.ranks
    rows_us = rates.latency_us + crossing / rates.bus_gb_per_s["all_to_all"] / 1000
    counts_us = rates.latency_us + profile.rates.copy_us + profile.efficiency.host_collective_us
    return _Parts(kernels_us=_repacked_us(task, profile), comms=(("all_to_all", counts_us + 2 * rows_us),))


def _slabs(task: ExpertExchange, profile: Profile) -> _Parts:
    """Return the times of fixed-size copies, in as many rounds as the rank with the most rows needs."""
    rounds = math.ceil(task.imbalance / task.capacity_factor)
    rows_us = rounds * _copied_us(task, task.mean_rows * task.capacity_factor / task.ranks, profile)
    return _Parts(kernels_us=_repacked_us(task, profile), comms=(("all_to_all", 2 * rows_us),))


def _gather(task: ExpertExchange, profile: Profile) -> _Parts:
    """Return the times of all-gathering all tokens, and of reduce-scattering the experts' weighted sums."""
    rows, tokens = task.most_rows, task.ranks * task.tokens
    kernels_us = _streamed_us(2 * rows, task, profile) + _streamed_us(rows + tokens, task, profile)
    routing_us = 3 * profile.rates.kernel_us + _copied_us(task, 8 * task.tokens * task.top_k / task.row_bytes, profile)
    sums_us = _streamed_us((task.ranks + 1) * task.tokens, task, profile)
    rows_us = _copied_us(task, task.tokens, profile)
    comms = (("all_gather", routing_us + rows_us), ("reduce_scatter", rows_us + sums_us))
    return _Parts(kernels_us=kernels_us, comms=comms)


_PARTS: Mapping[ExchangeMechanism, Callable[[ExpertExchange, Profile], _Parts]] = {
    "torch": _torch,
    "gather": _gather,
    "slabs": _slabs,
}


def _repacked_us(task: ExpertExchange, profile: Profile) -> float:
    """Return the µs of the kernels around an exchange: order rows by rank, by expert, by rank again, and add up."""
    packed_us = _streamed_us(2 * task.mean_rows, task, profile)
    permuted_us = _streamed_us(2 * task.most_rows, task, profile)
    return packed_us + 2 * permuted_us + _streamed_us(task.mean_rows + task.tokens, task, profile)


def _streamed_us(rows: float, task: ExpertExchange, profile: Profile) -> float:
    """Return the µs of a kernel whose reads and writes add up to `rows` rows."""
    return profile.rates.kernel_us + rows * task.row_bytes / profile.sums.memory_gb_per_s / 1000


def _copied_us(task: ExpertExchange, rows: float, profile: Profile) -> float:
    """Return the µs of copying `rows` rows to each other rank, one rank after another."""
    rates = profile.rates
    bytes_per_us = 1000 * min(rates.push_gb_per_s, rates.link_gb_per_s)
    copy_us = rates.copy_us + rows * task.row_bytes / bytes_per_us + rates.batch_us
    return rates.launch_us + 2 * rates.signal_us + rates.batch_us + (task.ranks - 1) * copy_us
