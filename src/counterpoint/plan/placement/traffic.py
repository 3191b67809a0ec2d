"""Compute how many bytes the ranks of a job send each other in a step: a placement's matrix M, stored as groups.

    "all"   every two ranks of a group exchange the same (a collective, whatever its algorithm);
            a rank that sends b bytes sends b / (n - 1) to each of the others
    "line"  each rank exchanges with the next one only (pipeline stages)
    "ring"  the same, and the last with the first (interleaved stages)

M(i, j) adds up both directions, in bytes of one step. Stored as groups, thousands of ranks take a handful of numbers
instead of a matrix of millions; `pairs` lists the pairs. The bytes that a rank sends on an axis are the sum of

    all_gather, reduce_scatter   (n - 1) / n · S          of layers and micro-batches: `exchanges.py`
    all_reduce                   2 · (n - 1) / n · S      of gradients and shards: `data_parallel.py`
    all_to_all                   (n - 1) / n · input
    send_recv                    input                    on pp per neighbour, forward; backward is as much

Stages are taken as equal: 1 / pp of layers, embedding and head each. Full recomputation sends forward's part again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import ParameterCount
from counterpoint.plan.job.parallel import Parallel, StagePart, part_parameters
from counterpoint.plan.network.group import AXES, Axis, axes
from counterpoint.plan.step.exchanges import Exchange, layer_exchanges, stage_exchanges

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Pattern = Literal["all", "line", "ring"]
RING = 1e-3  # fraction of a collective's bytes: its ring only decides between orders of nearly equal cost
CHUNK = 1 << 22  # values of an intermediate array
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "broadcast": 1}


@dataclass(frozen=True, eq=False, kw_only=True)
class AxisTraffic:
    """Describes the traffic inside the groups of one mesh axis, which have equal shapes."""

    axis: str  # name of the axis
    members: I64  # `[groups, ranks]`
    pair_bytes: F64  # `[groups]`, bytes of each pair that exchanges, both directions together
    pattern: Pattern = "all"  # which pairs exchange

    def pairs(self) -> tuple[I64, I64, F64]:
        """Return first rank, second rank and bytes of every pair, each pair once: three arrays `[pairs]`."""
        ranks = self.members.shape[1]
        if self.pattern == "all":
            i, j = np.triu_indices(ranks, 1)
        else:
            i = np.arange(ranks - 1 if self.pattern == "line" or ranks < 3 else ranks)
            j = (i + 1) % ranks
        return self.members[:, i].ravel(), self.members[:, j].ravel(), np.repeat(self.pair_bytes, len(i))

    @property
    def in_pairs(self) -> bool:
        """Return whether to list traffic by pairs of ranks: true if a group has no more pairs than ranks."""
        return self.pattern != "all" or self.members.shape[1] == 2


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTraffic:
    """Holds all traffic between the ranks in one step."""

    world_size: int  # ranks
    parts: tuple[AxisTraffic, ...]  # the exchanges
    mesh: tuple[tuple[str, int], ...] = ()  # axes and their lengths, the fastest first; (): the ranks form no mesh

    def with_rings(self) -> RankTraffic:
        """Return this traffic plus a ring in each group; a ring carries the fraction `RING` of the group's bytes."""
        rings = [
            replace(part, pattern="ring", pair_bytes=RING * part.pair_bytes * (part.members.shape[1] - 1) / 2)
            for part in self.parts
            if part.pattern == "all" and part.members.shape[1] > 3
        ]
        return replace(self, parts=(*self.parts, *rings))

    def between(self, label: I64, count: int) -> F64:
        """Return the bytes, both directions summed, between ranks of every two labels: `[count, count]`, diagonal 0.

        `label` `[world_size]` has numbers below `count`: the host of each rank, or the rank itself.
        """
        found = np.zeros((count, count))
        for part in self.parts:
            if part.in_pairs:
                first, second, num_bytes = part.pairs()
                flat = np.bincount(label[first] * count + label[second], num_bytes, minlength=count * count)
                found += flat.reshape(count, count)
                continue
            where = label[part.members]
            apart = np.flatnonzero(where.min(axis=1) != where.max(axis=1))
            for some in np.array_split(apart, -(-len(apart) * count // CHUNK) or 1):
                flat = np.arange(len(some))[:, None] * count + where[some]
                held = np.bincount(flat.ravel(), minlength=len(some) * count).reshape(len(some), count)
                found += (held * part.pair_bytes[some, None]).T @ held / 2
        found += found.T
        np.fill_diagonal(found, 0.0)
        return found

    @classmethod
    def of_job(cls, parallel: Parallel, sent: Mapping[Axis, float]) -> RankTraffic:
        """Return a job's traffic, given the bytes that a rank sends per step by axis; for pp, to *one* neighbour."""
        parts = []
        for axis, num_bytes in sent.items():
            group = axes(parallel)[axis]
            if group.ranks == 1 or not num_bytes:
                continue
            pattern: Pattern = "all" if axis != "pp" else "ring" if parallel.virtual > 1 else "line"
            each = 2 * num_bytes / (group.ranks - 1 if pattern == "all" else 1)
            members = group.members(parallel.world_size)
            pair_bytes = np.full(len(members), each)
            parts.append(AxisTraffic(axis=axis, members=members, pair_bytes=pair_bytes, pattern=pattern))
        mesh = tuple((axis, axes(parallel)[axis].ranks) for axis in AXES[:4])
        return cls(world_size=parallel.world_size, parts=tuple(parts), mesh=mesh)


def sent_bytes(job: Job) -> dict[Axis, float]:
    """Return the bytes that one rank sends per step, by mesh axis; for pp, to one neighbour."""
    model, parallel, training = job.model, job.parallel, job.training
    found: dict[Axis, float] = {}
    routed, micro = model.expert_layers, training.micro_batches(parallel)
    for layers, experts in ((model.layers - routed, None), (routed + model.mtp, model.experts)):
        for exchange in layer_exchanges(model, parallel, training, experts):
            again = 2 if training.recompute == "full" and not exchange.backward else 1
            _add(found, job, exchange, micro * again * layers / parallel.pp)
    if parallel.pp > 1:
        for exchange in stage_exchanges(model, parallel, training):
            _add(found, job, exchange, micro * parallel.virtual)
    _add_replicas(found, job, micro)
    return {axis: num_bytes for axis, num_bytes in found.items() if num_bytes}


def _add(found: dict[Axis, float], job: Job, exchange: Exchange, times: float) -> None:
    num_bytes = exchange.count * times * _sent(job, exchange.axis, exchange.operation, exchange.num_bytes)
    found[exchange.axis] = found.get(exchange.axis, 0.0) + num_bytes


def _sent(job: Job, axis: Axis, operation: str, num_bytes: float) -> float:
    """Return the bytes that one rank sends in one collective of an axis."""
    if operation == "send_recv":
        return num_bytes
    ranks = axes(job.parallel)[axis].ranks
    return PASSES[operation] * (ranks - 1) / ranks * num_bytes


def _add_replicas(found: dict[Axis, float], job: Job, micro: int) -> None:
    """Add to `found` the gradients, and with zero the parameters, that a rank of an average stage sends per step."""
    model, parallel, training = job.model, job.parallel, job.training
    stages = StagePart(
        layers=model.layers, routed=model.expert_layers, embedding=True, head=True, mtp=model.mtp
    )  # fmt: skip
    whole = part_parameters(model, parallel, stages)
    held = ParameterCount(shared=whole.shared / parallel.pp, experts=whole.experts / parallel.pp)
    element, often = training.element_bytes, micro if parallel.zero >= 2 else 1
    sharded = parallel.zero > 0 and parallel.shard is not None
    axes_held: dict[Axis, float] = {"shard" if sharded else "dp_cp": held.shared, "expert_dp": held.experts}
    for axis, parameters in axes_held.items():
        gradients = often * _sent(job, axis, "reduce_scatter" if parallel.zero else "all_reduce", training.grad_bytes)
        gathers = 0 if not parallel.zero else 1 if parallel.zero < 3 else micro * (1 + parallel.reshard_after_forward)
        gathered = gathers * _sent(job, axis, "all_gather", element)
        found[axis] = found.get(axis, 0.0) + parameters * (gradients + gathered)
    if sharded:
        part = held.shared * training.grad_bytes / axes(parallel)["shard"].ranks
        found["replicate"] = often * _sent(job, "replicate", "all_reduce", part)
