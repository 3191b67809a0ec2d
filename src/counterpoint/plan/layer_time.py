"""One layer and micro-batch on one rank, in time: compute by kind, communication alone, and what of it is exposed.

forward   = compute + every exchange                            activations are needed before anything can go on
backward  = compute + recomputed + exchanges; those `beside` run together with the weight gradients' products:
            exposed = together(dW, exchanges) - dW              (`overlap.py`)
recomputed: selective: attention's core; full: forward again, with its exchanges
"""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.plan.compute_cost import Machine, cost
from counterpoint.plan.exchanges import Exchange, layer_exchanges
from counterpoint.plan.job import Job
from counterpoint.plan.layers import Flash, Matmul, Operation, Share, Traffic, Work, embedding, head, layer
from counterpoint.plan.model import Experts
from counterpoint.plan.overlap import find_mechanism, together_us
from counterpoint.plan.parameters import layer_parameters
from counterpoint.plan.prices import MeshPrices
from counterpoint.records.base import Record

__all__ = ["Spent", "WorkTime", "end_time", "layer_time"]

EXPOSED = {"tp": "tensor_us", "cp": "context_us", "ep": "expert_us"}


class Spent(Record, frozen=True, kw_only=True):
    """Where the time of a rank goes, µs; communication is what of it is exposed."""

    matmul_us: float = 0.0
    attention_us: float = 0.0
    memory_bound_us: float = 0.0
    recompute_us: float = 0.0
    shard_copies_us: float = 0.0
    tensor_us: float = 0.0
    context_us: float = 0.0
    expert_us: float = 0.0
    shards_us: float = 0.0

    @property
    def total_us(self) -> float:
        return sum(self.terms().values())

    @property
    def compute_us(self) -> float:
        """Without communication."""
        return (
            self.matmul_us + self.attention_us + self.memory_bound_us + self.recompute_us + self.shard_copies_us
        )  # fmt: skip

    def terms(self) -> dict[str, float]:
        """By name."""
        return {name: getattr(self, name) for name in self.__struct_fields__}

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """self + times · other."""
        mine, more = self.terms(), other.terms()
        return Spent(**{name: mine[name] + times * more[name] for name in mine})


class WorkTime(Record, frozen=True, kw_only=True):
    """Forward and backward of a layer, or of an end of the model.

    Args:
        weight_us: of backward, the products that make weight gradients.
        comm_us: communication alone, by axis, both directions.
    """

    forward: Spent
    backward: Spent
    weight_us: float
    comm_us: dict[str, float]


def layer_time(job: Job, machine: Machine, prices: MeshPrices, experts: Experts | None = None) -> WorkTime:
    """One layer; with `experts` one that has them."""
    model, parallel, training = job.model, job.parallel, job.training
    share = Share.of(parallel, training)
    work = layer(model, share, experts)
    exchanges = layer_exchanges(model, parallel, training, experts)
    forward = _compute(work.forward, machine)
    again = {"none": (), "selective": work.core, "full": work.forward}[training.recompute]
    back = _compute((*work.backward, *_accumulation(job, experts)), machine)
    sent = [exchange for exchange in exchanges if not exchange.backward]
    repeated = sent if training.recompute == "full" else []
    weight_us = sum(cost(op, machine).us for op in work.backward if isinstance(op, Matmul) and op.weight_gradient)
    late = _exposed(job, machine, prices, [e for e in exchanges if e.backward], weight_us)
    late = _added(late, _exposed(job, machine, prices, repeated, 0.0))
    recompute_us = _compute(again, machine).total_us
    comm_us: dict[str, float] = {}
    for exchange in (*exchanges, *repeated):
        comm_us[exchange.axis] = comm_us.get(exchange.axis, 0.0) + prices.us(exchange)
    return WorkTime(
        forward=forward.plus(Spent(**_exposed(job, machine, prices, sent, 0.0))),
        backward=back.plus(Spent(recompute_us=recompute_us, **late)),
        weight_us=weight_us,
        comm_us=comm_us,
    )


def end_time(job: Job, machine: Machine, *, first: bool) -> WorkTime:
    """Embedding or head."""
    share = Share.of(job.parallel, job.training)
    work: Work = (embedding if first else head)(job.model, share)
    weight = sum(cost(op, machine).us for op in work.backward if isinstance(op, Matmul) and op.weight_gradient)
    return WorkTime(
        forward=_compute(work.forward, machine), backward=_compute(work.backward, machine), weight_us=weight, comm_us={}
    )


def _compute(operations: Iterable[Operation], machine: Machine) -> Spent:
    us = {"matmul_us": 0.0, "attention_us": 0.0, "memory_bound_us": 0.0}
    for operation in operations:
        kind = "memory_bound_us"
        if isinstance(operation, Matmul):
            kind = "matmul_us"
        elif isinstance(operation, Flash):
            kind = "attention_us"
        us[kind] += cost(operation, machine).us
    return Spent(**us)


def _exposed(
    job: Job, machine: Machine, prices: MeshPrices, exchanges: Iterable[Exchange], weight_us: float
) -> dict[str, float]:
    """By part. What runs beside the weight gradients is divided by the axes' time alone."""
    exposed: dict[str, float] = {}
    beside = []
    for exchange in exchanges:
        name = EXPOSED[exchange.axis]
        if exchange.beside:
            beside.append(exchange)
        else:
            exposed[name] = exposed.get(name, 0.0) + prices.us(exchange)
    if beside:
        comms = tuple((exchange.operation, prices.us(exchange)) for exchange in beside)
        both = together_us(
            weight_us, comms, find_mechanism(job.mechanism), persistent=machine.efficiency.persistent
        )  # fmt: skip
        for exchange, (_, us) in zip(beside, comms, strict=True):
            part = us / sum(alone for _, alone in comms)
            name = EXPOSED[exchange.axis]
            exposed[name] = exposed.get(name, 0.0) + (both - weight_us) * part
    return exposed


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one.keys() | other.keys()}


def _accumulation(job: Job, experts: Experts | None) -> tuple[Operation, ...]:
    """Gradients of this micro-batch added to those before it, where the product that makes them does not do that."""
    training, parallel = job.training, job.parallel
    if training.fused_accumulation or training.micro_batches(parallel) == 1 or parallel.zero == 3:
        return ()
    held = layer_parameters(job.model, experts)
    elements = held.shared / parallel.tp + held.experts / parallel.tp / parallel.ep
    return (Traffic(name="gradients added up", num_bytes=elements * (2 + 2 * training.grad_bytes)),)
