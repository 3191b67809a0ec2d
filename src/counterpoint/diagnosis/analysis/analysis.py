"""Compute the results of one job lazily: each result is computed at first use, and cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from counterpoint.diagnosis.analysis import accounts
from counterpoint.diagnosis.analysis.accounts import Activity, Waits
from counterpoint.diagnosis.analysis.compute_losses import ComputeLoss, compute_losses
from counterpoint.diagnosis.analysis.experts import (
    EXPERTS,
    ExpertImbalance,
    ExpertWaits,
    blame_experts,
    expert_imbalance,
    expert_waits,
)
from counterpoint.diagnosis.analysis.idle import RankIdle, hosts_known, idle_of_ranks, summarise_idle
from counterpoint.diagnosis.analysis.kernels import Blocked, KernelSet, compare_overlap, find_blocked
from counterpoint.diagnosis.analysis.operators import card_rates, operator_times
from counterpoint.diagnosis.analysis.replay import INDEPENDENT_STREAMS, LAUNCH_ORDER, replay
from counterpoint.diagnosis.analysis.stragglers import find_delays, find_stragglers
from counterpoint.diagnosis.analysis.stream_order import find_stream_order
from counterpoint.diagnosis.analysis.unrecorded import Unrecorded, find_unrecorded
from counterpoint.diagnosis.reading.operator_work import WorkOf, operator_work
from counterpoint.diagnosis.reading.traced_job import TracedJob, TracedStack, traced_stack
from counterpoint.records.causes import COMPUTE_CAUSES
from counterpoint.records.diagnosis import (
    Account,
    Collective,
    CollectiveKind,
    GpuAccount,
    Idle,
    RankAccount,
    Replay,
    Straggler,
)
from counterpoint.records.operators import CardRates, OperatorTime
from counterpoint.trace.timeline import F64, Bools

_SAVED_SHARE = 0.1  # of the delay by stalls: a stand-in that saves less has waited as long itself
_UNTOLD_SHARE = 0.1  # of exposed communication: if more of it lacks ranks, known waits say little


@dataclass(frozen=True)
class Analysis:
    """Holds cached results of one job in µs; arrays list ranks in `job` order and collectives in `job.joined` order."""

    job: TracedJob
    everyone: tuple[RankAccount, ...] = ()  # accounts of all ranks of a job of which `job` has some; (): it has all

    @cached_property
    def busy(self) -> list[Activity]:
        """Return when the GPU of each rank computed, communicated and copied."""
        return [accounts.activity(self.job, column) for column in range(len(self.job.ranks))]

    @cached_property
    def waits(self) -> Waits:
        """Return each rank's µs of waiting and of transfer in each collective."""
        return accounts.waits(self.job, self.busy)

    @cached_property
    def waits_untold(self) -> bool:
        """Return whether much of the exposed communication is in collectives of which not all ranks were recorded."""
        inside = self.waits.step >= 0
        exposed = np.nansum(self.waits.exposed, axis=1)[inside]
        return float(exposed[~self.waits.complete[inside]].sum()) > _UNTOLD_SHARE * float(exposed.sum())

    @cached_property
    def per_rank(self) -> tuple[RankAccount, ...]:
        """Return each rank's account: its time split into compute, communication, copies and idle time."""
        return accounts.rank_accounts(self.job, self.busy, self.waits)

    @cached_property
    def per_gpu(self) -> tuple[GpuAccount, ...]:
        """Return the account of each GPU of processes that drive several GPUs."""
        return accounts.gpu_accounts(self.job, self.busy, self.waits)

    @cached_property
    def totals(self) -> Account:
        """Return the mean of the ranks' accounts."""
        return accounts.totals(self.everyone or self.per_rank)

    @property
    def step_us(self) -> float:
        """Return the mean µs of a step."""
        return self.totals.duration_us / self.job.num_steps

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Return every collective, in the order of `job.joined`."""
        return accounts.collectives(self.job, self.waits)

    @cached_property
    def kinds(self) -> tuple[CollectiveKind, ...]:
        """Return the table of collectives by operation, group, size and phase, most exposed first."""
        return accounts.collective_kinds(self.job, self.waits, self.collectives)

    @cached_property
    def stack(self) -> TracedStack:
        """Return which vendor's GPUs, and which collective libraries, the trace shows."""
        return traced_stack(self.job)

    @cached_property
    def experts(self) -> ExpertWaits:
        """Return each rank's µs of compute between dispatch and combine, and of waiting in the combine."""
        return expert_waits(self.job, self.waits, self.busy)

    @cached_property
    def expert_imbalance(self) -> ExpertImbalance | None:
        """Return the cost of unequal load of experts; None if the cost is small."""
        return expert_imbalance(self.job, self.busy, self.experts, self.step_us)

    @cached_property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Return the ranks that make the others wait, worst first; none where only hosts were recorded."""
        job, waits = self.job, self.waits
        if not job.gpu_recorded:
            return ()
        found = find_stragglers(job, self.busy, waits, find_delays(job, waits))
        return blame_experts(job, self.busy, self.experts, found)

    @property
    def told_late(self) -> tuple[Straggler, ...]:
        """Return the late ranks to report; if expert imbalance is reported, without ranks whose experts delay them."""
        return tuple(s for s in self.stragglers if not self.expert_imbalance or s.detail != EXPERTS)

    @cached_property
    def kernels(self) -> KernelSet:
        """Return the comparison of each kind of compute kernel alone and beside communication."""
        return compare_overlap(self.job, self.busy)

    @cached_property
    def _work_of(self) -> WorkOf:
        """Return `operator_work` with a cache: ranks make the same calls."""
        return cache(operator_work)

    @cached_property
    def card(self) -> CardRates | None:
        """Return what the GPU of the lowest rank can do; None for a CPU and an unknown GPU."""
        return card_rates(self.job.digests[0].device)

    @cached_property
    def operators(self) -> tuple[OperatorTime, ...]:
        """Return the GPU time of a step by operator, inputs and place, most time first."""
        return operator_times(self.job, self.card, self._work_of)

    @cached_property
    def compute_losses(self) -> tuple[ComputeLoss, ...]:
        """Return the causes for which kernels take longer than this GPU needs for their work."""
        return compute_losses(self.job, self.card, self.step_us, self._work_of)

    @cached_property
    def blocked(self) -> tuple[Blocked, ...]:
        """Return the collectives that waited because a kernel held every SM, not because streams share one queue."""
        order = self.stream_order
        return tuple(b for b in find_blocked(self.job) if order is None or not order[b.column][b.op])

    @cached_property
    def stream_order(self) -> tuple[F64, ...] | None:
        """Return the µs by which operations began late since all streams share one queue; None if they do not."""
        return None if self.job.digests[0].device.from_host else find_stream_order(self.job)

    @cached_property
    def unrecorded(self) -> Unrecorded:
        """Return which collectives lack traces of some ranks, and each one's suspected wait for these ranks in µs."""
        return find_unrecorded(self.job, self.busy, self.waits)

    @cached_property
    def rank_idle(self) -> tuple[RankIdle, ...]:
        """Return each rank's gaps in the steps: the times in which the rank's GPU ran nothing."""
        return idle_of_ranks(self.job, self.per_rank)

    @cached_property
    def idle(self) -> Idle | None:
        """Return the idle time of a step and its causes; None where only hosts were recorded."""
        return summarise_idle(self.job, self.rank_idle) if self.job.gpu_recorded else None

    @cached_property
    def replay(self) -> Replay | None:
        """Return the replayed step, unchanged and with each change; None if the steps cannot be replayed."""
        if self.idle is None:
            return None
        alone_us = self.kernels.alone_us
        held: dict[str, Sequence[Bools]] = {}
        if self.blocked:
            held[LAUNCH_ORDER] = blocked = [np.zeros(len(d.gpu), bool) for d in self.job.digests]
            for b in self.blocked:
                blocked[b.column][b.op] = True
        if self.stream_order:
            held[INDEPENDENT_STREAMS] = [lost_us > 0 for lost_us in self.stream_order]
        return replay(
            self.job,
            typical=self._typical(),
            alone_us=alone_us if any(np.isfinite(us).any() for us in alone_us) else None,
            held=held,
            suspected_us=self.unrecorded.by_operation(self.job),
            stack=self.stack,
            hosts_known=hosts_known(self.idle),
            collective_waits=self._collective_waits(),
            compute_us={COMPUTE_CAUSES[loss.cause].short: loss.without_us for loss in self.compute_losses},
        )

    @cached_property
    def saved_us(self) -> dict[str, float]:
        """Return by how many µs each change shortens the replayed step, by the change's name."""
        played = self.replay
        return {w.name: max(played.replayed_us - w.step_us, 0.0) for w in played.what_if} if played else {}

    @property
    def late_us(self) -> float:
        """Return the µs that the late ranks cost a replayed step; of stalls, where their stand-ins save nothing."""
        stalls = sum(s.delay_us for s in self.told_late if s.cause == "host_stall") / self.job.num_steps
        saved, by_stalls = (self.saved_us.get(name, 0.0) for name in ("no straggler", "no stall on any rank"))
        return saved if saved > _SAVED_SHARE * stalls else min(stalls, by_stalls)

    def _typical(self) -> dict[int, int]:
        """Return the stand-in of each late rank: the rank with median compute time among ranks that are not late."""
        late = {self.job.ranks.index(rank) for s in self.stragglers for rank in s.ranks}
        others = (column for column in range(len(self.job.ranks)) if column not in late)
        healthy = sorted(others, key=lambda column: self.per_rank[column].compute_us)
        return {column: healthy[len(healthy) // 2] for column in late} if healthy else {}

    def _collective_waits(self) -> str | None:
        waits = self.waits
        if not len(waits.complete):
            return None
        return "joined" if waits.complete.all() else "partly_joined" if waits.told.any() else "as_measured"
