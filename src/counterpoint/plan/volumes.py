"""How much each rank of a job sends on each axis in one step, for `Traffic.of_job`.

    all_gather, reduce_scatter   (n - 1) / n · S          of layers and micro-batches: `exchanges.py`
    all_reduce                   2 · (n - 1) / n · S      of gradients and shards: `data_parallel.py`
    all_to_all                   (n - 1) / n · input
    send_recv                    input                    on pp per neighbour, forward; backward is as much

Stages are taken as equal: 1 / pp of layers, embedding and head each. Full recomputation sends forward's part again.
"""

from __future__ import annotations

from counterpoint.plan.exchanges import Exchange, layer_exchanges, send
from counterpoint.plan.groups import Axis, axes
from counterpoint.plan.job import Job
from counterpoint.plan.layers import expert_layers
from counterpoint.plan.parameters import Held, most_held

__all__ = ["sent_bytes"]

TIMES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2, "broadcast": 1}


def sent_bytes(job: Job) -> dict[Axis, float]:
    """By axis, what a rank sends in one step; on pp, to one neighbour."""
    model, parallel, training = job.model, job.parallel, job.training
    found: dict[Axis, float] = {}
    routed, micro = expert_layers(model), training.micro_batches(parallel)
    for layers, experts in ((model.layers - routed, None), (routed, model.experts)):
        for exchange in layer_exchanges(model, parallel, training, experts):
            again = 2 if training.recompute == "full" and not exchange.backward else 1
            _add(found, job, exchange, micro * again * layers / parallel.pp)
    if parallel.pp > 1:
        for exchange in send(model, parallel, training):
            _add(found, job, exchange, micro * parallel.virtual)
    _add_replicas(found, job, micro)
    return {axis: num_bytes for axis, num_bytes in found.items() if num_bytes}


def _add(found: dict[Axis, float], job: Job, exchange: Exchange, times: float) -> None:
    """`times` equal exchanges."""
    num_bytes = exchange.count * times * _sent(job, exchange.axis, exchange.operation, exchange.num_bytes)
    found[exchange.axis] = found.get(exchange.axis, 0.0) + num_bytes


def _sent(job: Job, axis: Axis, operation: str, num_bytes: float) -> float:
    """By one rank, in one collective."""
    if operation == "send_recv":
        return num_bytes
    ranks = axes(job.parallel)[axis].ranks
    return TIMES[operation] * (ranks - 1) / ranks * num_bytes


def _add_replicas(found: dict[Axis, float], job: Job, micro: int) -> None:
    """Gradients, and with zero parameters, of a mean stage."""
    model, parallel, training = job.model, job.parallel, job.training
    routed = expert_layers(model)
    whole = most_held(model, parallel, layers=model.layers, routed=routed, embedding=True, head=True)
    held = Held(shared=whole.shared / parallel.pp, experts=whole.experts / parallel.pp)
    element, often = 4 if training.precision == "fp32" else 2, micro if parallel.zero >= 2 else 1
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
